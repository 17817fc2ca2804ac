"""Nested states as named tensors and values, and back.

PyTorch saves a state as nested dicts and lists; a checkpoint has names. A name is the path joined
by dots, as in `torch.distributed.checkpoint`::

    {"model": {"w": tensor}, "optimizers": [{"state": {0: {"step": tensor}}}], "epoch": 3}

    model.w                          tensor    path ("model", "w")
    optimizers.0.state.0.step        tensor    path ("optimizers", 0, "state", "0", "step")
    epoch                            value 3

1. Dicts are walked, their keys as text; a number in a path is the index of a list.
2. Lists and tuples are walked if they contain a tensor; otherwise they are a single value.
3. Values that are neither tensors nor plain are unread.

On the way back, numbers in paths make lists. In a dict with `param_groups`, the keys of `state` are
numbers, as in PyTorch's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.checkpoint.formats.torch_files.pickles import Global, shortened
from reshard.checkpoint.formats.torch_files.values import (
    ArchivedTensor,
    explain,
    is_tensor_call,
    numpy_array,
)
from reshard.errors import FormatError

StatePath = tuple[str | int, ...]
_MAX_DEPTH = 64
# Shared parts are walked once for each place they are in.
_MAX_PARTS = 30_000_000
_MAX_LIST_LENGTH = 1_000_000
_PLAIN = (str, int, float, bool, type(None))
_AMONG_VALUES = "a tensor among plain values"


class FlatState(NamedTuple):
    """The contents of a nested state, by name.

    Attributes:
        tensors: every tensor.
        values: numbers, text, None, and lists, tuples and dicts of such.
        paths: the path of each tensor and value.
        unread: everything else, with the reason.
        unread_tensors: the names in `unread` that are tensors.
    """

    tensors: Mapping[str, Any]
    values: Mapping[str, Any]
    paths: Mapping[str, StatePath]
    unread: Mapping[str, str]
    unread_tensors: frozenset[str] = frozenset()


def flatten_state(
    state: Any,
    label: str,
    is_tensor: Callable[[Any], bool] = lambda value: type(value) is ArchivedTensor,
) -> FlatState:
    """Return the tensors and values of a nested state; `label` names the file in errors.

    >>> flat = flatten_state({"a": {"b": 1}, "c": [1, 2]}, "x")
    >>> flat.values, flat.paths
    ({'a.b': 1, 'c': [1, 2]}, {'a.b': ('a', 'b'), 'c': ('c',)})

    Raises:
        FormatError: two paths with the same name; a state that is too deep, or contains itself.
    """
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    unread: dict[str, str] = {}
    unread_tensors = set[str]()
    for path, value in _Walk(label, is_tensor).leaves(state, ()):
        name = ".".join(map(str, path))
        if name in paths or name in unread:
            other = paths.get(name, ())
            raise FormatError(
                f"{label}: {list(other)} and {list(path)} are both named {shortened(name)!r} when "
                "the parts are joined by dots; rename one of the keys"
            )
        if is_tensor(value):
            tensors[name] = value
        elif isinstance(value, _Unread):
            unread[name] = value.reason
            if value.is_tensor:
                unread_tensors.add(name)
            continue
        else:
            values[name] = value
        paths[name] = path
    return FlatState(tensors, values, paths, unread, frozenset(unread_tensors))


class _Unread(NamedTuple):
    """A value that is neither a tensor nor plain."""

    reason: str
    is_tensor: bool = False


class _Walk:
    """A walk through a state."""

    def __init__(self, label: str, is_tensor: Callable[[Any], bool]) -> None:
        self._label = label
        self._is_tensor = is_tensor
        self._parts = 0

    def leaves(self, value: Any, path: StatePath) -> Iterator[tuple[StatePath, Any]]:
        """Yield every leaf with its path."""
        self._count(path)
        kind = type(value)
        if kind is dict and value:
            for key, item in value.items():
                if isinstance(key, _PLAIN) or type(key) is Global:
                    yield from self.leaves(item, (*path, str(key)))
                else:
                    text = f"{type(key).__name__} {len(path)}"
                    yield (*path, text), _Unread(f"its key is {explain(key)}")
        elif self._is_tensor(value):
            yield path, value
        elif kind in (list, tuple) and self._has_tensor(value, path):
            for number, item in enumerate(value):
                yield from self.leaves(item, (*path, number))
        else:
            yield path, self._plain(value, path)

    def _count(self, path: StatePath) -> None:
        self._parts += 1
        if len(path) > _MAX_DEPTH or self._parts > _MAX_PARTS:
            raise FormatError(
                f"{self._label} holds a state that is deeper than {_MAX_DEPTH} or larger than "
                f"{_MAX_PARTS} parts at {shortened('.'.join(map(str, path)))!r}; does it hold "
                "itself?"
            )

    def _has_tensor(self, value: Any, path: StatePath) -> bool:
        """Return whether a list or tuple contains a tensor, at any depth."""
        self._count(path)
        if self._is_tensor(value):
            return True
        kind = type(value)
        if kind is dict:
            return any(self._has_tensor(item, (*path, "")) for item in value.values())
        if kind in (list, tuple):
            return any(self._has_tensor(item, (*path, 0)) for item in value)
        return False

    def _plain(self, value: Any, path: StatePath) -> Any:
        """Return a plain value, or `_Unread` if some of it is not plain."""
        self._count(path)
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is Global and value.module == "torch":
            return str(value)
        if kind in (list, tuple):
            items = [self._plain(item, (*path, 0)) for item in value]
            return next((item for item in items if type(item) is _Unread), kind(items))
        if kind is dict:
            plains = {}
            for key, item in value.items():
                if not isinstance(key, _PLAIN):
                    return _Unread(f"one of its keys is {explain(key)}")
                plain = self._plain(item, (*path, ""))
                if type(plain) is _Unread:
                    return plain
                plains[key] = plain
            return plains
        array = numpy_array(value)
        if isinstance(array, np.ndarray) and array.dtype.kind in "biuf" and array.size < 10_000:
            return array.tolist()
        return _Unread(explain(value), is_tensor_call(value))


class PlainValues:
    """The plain values of a checkpoint by name, their paths, and the parts that are not read."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.paths: dict[str, StatePath] = {}
        self.unread: list[tuple[str, str]] = []

    def add(self, name: str, value: Any, path: StatePath = (), label: str = "the state") -> None:
        """Add a value if it is plain, or list it as unread. A name that is taken stays."""
        # In a list, which stays a single value unless it contains a tensor.
        flat = flatten_state([value], label)
        if flat.tensors or flat.unread:
            reasons = [_AMONG_VALUES] if flat.tensors else [*flat.unread.values()]
            self.unread.append((name, reasons[0]))
            return
        # Types are text in it, as among all other values.
        self.values.setdefault(name, flat.values[""][0])
        if path:
            self.paths.setdefault(name, path)

    def add_state(
        self,
        state: Any,
        prefix: StatePath = (),
        label: str = "the state",
        add_tensor: Callable[[str, str, ArchivedTensor], None] | None = None,
    ) -> None:
        """Add the values of a nested state; `add_tensor(name, label, tensor)` takes its tensors.

        Args:
            state: a value that may be nested.
            prefix: the path of the state.
            label: the file, for errors.
            add_tensor: without it, tensors are listed as unread.

        Raises:
            FormatError: a state that is too deep.
        """
        for part in reversed(prefix):
            state = {part: state}
        flat = flatten_state(state, label)
        self.unread += flat.unread.items()
        for name, tensor in flat.tensors.items():
            if add_tensor is None:
                self.unread.append((name, _AMONG_VALUES))
                continue
            add_tensor(name, label, tensor)
            self.paths.setdefault(name, flat.paths[name])
        for name, value in flat.values.items():
            # Two parts of a state may have equal names when the keys of their paths are joined.
            if name in self.values:
                self.unread.append((name, "another value has this name"))
                continue
            self.values[name] = value
            self.paths[name] = flat.paths[name]


def unflatten_state(leaves: Mapping[str, Any], paths: Mapping[str, StatePath]) -> Any:
    """Return the nested state of named tensors and values; names without a path are at the top.

    >>> paths = {"a.b": ("a", "b"), "c.0": ("c", 0)}
    >>> unflatten_state({"a.b": 1, "c.0": 2, "d.e": 3}, paths)
    {'a': {'b': 1}, 'c': [2], 'd.e': 3}

    Raises:
        FormatError: a leaf inside another leaf.
    """
    items = [(paths.get(name) or (name,), name, leaf) for name, leaf in leaves.items()]
    return _nest(items, 0)


def _nest(items: Sequence[tuple[StatePath, str, Any]], depth: int) -> Any:
    """Return the dict or list of leaves `(path, name, value)` whose paths begin alike."""
    groups: dict[str | int, list[tuple[StatePath, str, Any]]] = {}
    for item in items:
        groups.setdefault(item[0][depth], []).append(item)
    parts: dict[str | int, Any] = {}
    for part, members in groups.items():
        is_leaf = [len(path) == depth + 1 for path, _, _ in members]
        if any(is_leaf) and len(members) > 1:
            if is_leaf[0] and not is_leaf[1]:
                raise FormatError(f"{shortened(members[1][1])!r} is inside another leaf")
            name = members[is_leaf.index(True, 1)][1]
            raise FormatError(f"{shortened(name)!r} is where another leaf has its parts")
        parts[part] = members[0][2] if is_leaf[0] else _nest(members, depth + 1)
    numbers = [part for part in parts if type(part) is int and 0 <= part < _MAX_LIST_LENGTH]
    if parts and len(numbers) == len(parts):
        # An unread part leaves None.
        return [parts.get(number) for number in range(max(numbers) + 1)]
    state = parts.get("state")
    if "param_groups" in parts and isinstance(state, dict) and all(map(_is_number, state)):
        parts["state"] = {int(key): inner for key, inner in state.items()}
    return {str(part): inner for part, inner in parts.items()}


def _is_number(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit()


def settle_paths(names: Iterable[str], paths: Mapping[str, StatePath]) -> dict[str, StatePath]:
    """Return the paths of leaves in a nested state that is read again under the same names.

    A leaf keeps its path if that joins to its name and passes no other leaf. All others move to the
    top, with the other members of their lists.

    >>> paths = {"a.b": ("a", "b"), "a": ("a",), "step": ("opt", 0), "c.0": ("c", 0)}
    >>> settle_paths(paths, paths)
    {'a.b': ('a.b',), 'a': ('a',), 'step': ('step',), 'c.0': ('c', 0)}
    """
    settled = {name: paths.get(name) or (name,) for name in names}
    moved = [name for name, path in settled.items() if ".".join(map(str, path)) != name]
    while True:
        lists = {
            settled[name][:length]
            for name in moved
            for length, part in enumerate(settled[name])
            if type(part) is int
        }
        settled |= {name: (name,) for name in moved}
        # A leaf at the top stays, and leaves that would be inside it move to the top.
        closed = lists.union(settled.values())
        moved = [
            name
            for name, path in settled.items()
            if any(path[:length] in closed for length in range(1, len(path)))
        ]
        if not moved:
            return settled
