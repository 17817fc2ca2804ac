"""Selecting tensors of a checkpoint, and renaming them.

Five options are applied in this order, whatever order they are given in:

1. `select` takes the tensors under a prefix, such as those of a model among several, and removes
   the prefix from their names;
2. `include` takes the names that match any of its globs, and `exclude` removes the names that match
   any of its globs. Both match the names of the checkpoint, or the names that `select` returns;
3. `strip_prefix` removes prefixes, in order, from the names that have them;
4. `rename` gives other names: the first `pattern=name` whose pattern matches is applied::

    layers.*.w1=model.layers.*.gate      each `*` is the same text on both sides, in order
    *.layers.*.w=layers.{2}.{1}.w        or by number, where the order changes

Options apply to the names of tensors, items and values. Nothing is copied: a tensor by another name
is bound to the same bytes, and keeps its digest. Likely mistakes are errors: a pattern that does
not match anything, two objects that would have the same name, and an empty selection.

Optimizer state follows its parameter: a `rename` for a weight also renames its state and its name
in the groups of the optimizer, unless another `rename` matches the state itself::

    rename: model.layers.*.w1=model.layers.*.gate

    model.layers.0.w1                  model.layers.0.gate
    optim.state.layers.0.w1.exp_avg    optim.state.layers.0.gate.exp_avg
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from reshard._records import Record
from reshard.errors import RecipeError, UsageError
from reshard.text import count_text

if TYPE_CHECKING:
    from reshard.checkpoint.contents import Checkpoint
    from reshard.checkpoint.training.state import TrainingState
    from reshard.mesh import DeviceMesh
    from reshard.recipes.recipe import Recipe
    from reshard.recipes.rules import Rule

_MAX_LISTED = 8
_PART = re.compile(r"\*|\{(\d{1,4})\}")


class TensorSelection(Record):
    """A part of a checkpoint, and its names.

    Args:
        include: globs on names, with `*` for any characters; all names are taken if empty.
        exclude: globs on names that are left out.
        strip_prefix: prefixes to remove from names, in this order.
        rename: texts `pattern=name`; each `*` of a pattern stands for the same `*` of the name, or
            for `{1}`, `{2}` in it.
        select: the prefix of the names that are taken, such as `ema_state_dict`, which is removed.

    Raises:
        UsageError: a value that is not a list of texts, or a text that cannot be parsed.

    >>> chosen = TensorSelection(include=["model.*"], rename=["model.*.w1=*.gate"])
    >>> chosen.new_name("model.layers.0.w1"), chosen.new_name("optimizer.step")
    ('layers.0.gate', None)
    """

    include: Iterable[str] = ()
    exclude: Iterable[str] = ()
    strip_prefix: Iterable[str] = ()
    rename: Iterable[str] = ()
    select: str | None = None

    def __post_init__(self) -> None:
        for name in self.field_names:
            if name != "select":
                object.__setattr__(self, name, _read_texts(name, getattr(self, name)))
        chosen = self.select
        if chosen is not None and (not isinstance(chosen, str) or not chosen.strip(".")):
            raise UsageError(
                f"select {chosen!r}; give the prefix of a model's names, such as 'ema_state_dict'"
            )
        for text in self.rename:
            _parse_renaming(text)

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude or self.changes_names)

    @property
    def changes_names(self) -> bool:
        """Whether the selection can change names."""
        return bool(self.strip_prefix or self.rename or self.select)

    @cached_property
    def selected_prefix(self) -> str:
        """The prefix of `select` with a dot at its end; `""` without it."""
        return "" if self.select is None else self.select.rstrip(".") + "."

    def takes(self, name: str) -> bool:
        """Return whether this name is taken."""
        if not name.startswith(self.selected_prefix):
            return False
        name = name.removeprefix(self.selected_prefix)
        is_in = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return is_in and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def new_name(self, name: str) -> str | None:
        """Return the new name, or None if the name is left out."""
        if not self.takes(name):
            return None
        stripped = self.strip(name)
        return self.renamed(stripped) or stripped

    def strip(self, name: str) -> str:
        """Return a name without the prefixes."""
        name = name.removeprefix(self.selected_prefix)
        for prefix in self.strip_prefix:
            name = name.removeprefix(prefix)
        return name

    def renamed(self, name: str) -> str | None:
        """Apply `rename` to a name without prefixes; return None if no pattern matches it."""
        for text in self.rename:
            pattern, pieces = _parse_renaming(text)
            match = pattern.fullmatch(name)
            if match is not None:
                return "".join(part if isinstance(part, str) else match[part] for part in pieces)
        return None

    def to_json(self) -> dict[str, str | list[str]]:
        """Return the options that are given, as plain values."""
        values = zip(self.field_names, self.astuple(), strict=True)
        return {
            name: texts if isinstance(texts, str) else list(texts)
            for name, texts in values
            if texts
        }


def find_new_names(
    checkpoint: Checkpoint, selection: TensorSelection, *, is_expected: bool = True
) -> dict[str, str | None]:
    """Return the new name of each tensor, item and value, or None if it is left out.

    Args:
        checkpoint: the source.
        selection: the tensors, items and values to take, and their new names.
        is_expected: whether each pattern must match a name, and the selection must not be empty.

    Raises:
        UsageError: a pattern that does not match anything; a selection without tensors.
        UnreadableTensorError: only tensors that cannot be read are selected.
    """
    names = [*checkpoint.tensors, *checkpoint.items, *checkpoint.values]
    others = [*checkpoint.unreadable, *dict(checkpoint.unread)]
    if is_expected:
        _expect_matches(checkpoint, selection, names, others)
    new = {name: selection.new_name(name) for name in (*names, *others)}
    if is_expected and checkpoint.tensors and all(new[name] is None for name in checkpoint.tensors):
        for name in checkpoint.unreadable:
            if new[name] is not None:
                # This raises UnreadableTensorError with the reason.
                _ = checkpoint[name]
        raise UsageError(
            f"no tensor is left of {count_text(len(checkpoint), 'tensor')} in {checkpoint.folder}; "
            "change --include or --exclude"
        )
    return new


def list_left_out(checkpoint: Checkpoint, selection: TensorSelection) -> list[str]:
    """Return the names that the tensors left out by `include` and `exclude` would have."""
    if not selection.include and not selection.exclude:
        return []
    result = []
    for name in checkpoint.tensors:
        if not selection.takes(name):
            stripped = selection.strip(name)
            result.append(selection.renamed(stripped) or stripped)
    return result


def by_new_names(checkpoint: Checkpoint, new: Mapping[str, str | None]) -> Checkpoint:
    """Return a checkpoint whose tensors, items and values have other names.

    Args:
        checkpoint: the checkpoint with the old names.
        new: the new name by the old name, or None to leave it out; other names stay.

    Raises:
        RecipeError: two objects with the same name, or an empty name.
    """
    names = [*checkpoint.tensors, *checkpoint.items, *checkpoint.values]
    _expect_different_names(checkpoint, {name: new.get(name, name) for name in names})

    def find(name: str) -> str | None:
        return new.get(name, name)

    kept_unread = [(name, why) for name, why in checkpoint.unread if find(name) is not None]
    paths = {}
    for name, path in checkpoint.paths.items():
        renamed = find(name)
        moved = path if renamed == name else move_path(path, renamed or "")
        if renamed is not None and moved is not None:
            paths[renamed] = moved
    return checkpoint.replace(
        tensors=_rename_all(checkpoint.tensors, find),
        unreadable=_rename_keys(checkpoint.unreadable, find),
        unread=tuple((find(name) or name, why) for name, why in kept_unread),
        items=_rename_all(checkpoint.items, find),
        values=_rename_keys(checkpoint.values, find),
        paths=paths,
        checksums=tuple(
            checksum.replace(tensor=renamed)
            for checksum in checkpoint.checksums
            if (renamed := find(checksum.tensor)) is not None
        ),
    )


def move_path(path: tuple[str | int, ...], name: str) -> tuple[str | int, ...] | None:
    """Return the path in a nested state dict for a new name, or None if it is unknown.

    Keys with dots at the beginning and at the end of the path are not split.

    >>> move_path(("model", "layers.0.w"), "layers.0.w")
    ('layers.0.w',)
    >>> move_path(("model", "layers", 0, "w1"), "model.layers.0.gate")
    ('model', 'layers', 0, 'gate')
    """
    # Keep as many keys as possible at the beginning, then at the end, and replace those between.
    for begin_count in range(len(path) - 1, -1, -1):
        front = ".".join(map(str, path[:begin_count])) + "." if begin_count else ""
        if not name.startswith(front) or name == front:
            continue
        rest = name[len(front) :]
        for end in range(begin_count + 1, len(path) + 1):
            tail = ".".join(map(str, path[end:]))
            if not tail:
                return (*path[:begin_count], rest)
            if rest == tail:
                return (*path[:begin_count], *path[end:])
            if rest.endswith(f".{tail}"):
                return (*path[:begin_count], rest.removesuffix(f".{tail}"), *path[end:])
    return None


def _rename_all(things: Mapping[str, Any], find: Callable[[str], str | None]) -> dict[str, Any]:
    """Return objects that have a `name`, by their new names."""
    return {
        renamed: thing if renamed == name else thing.replace(name=renamed)
        for name, thing in things.items()
        if (renamed := find(name)) is not None
    }


def _rename_keys(things: Mapping[str, Any], find: Callable[[str], str | None]) -> dict[str, Any]:
    return {renamed: thing for name, thing in things.items() if (renamed := find(name)) is not None}


def _expect_different_names(checkpoint: Checkpoint, new: Mapping[str, str | None]) -> None:
    """Raise RecipeError if two objects would have the same name, or an object an empty name."""
    old_of: dict[str, str] = {}
    for old, name in new.items():
        if name is None:
            continue
        if not name:
            raise RecipeError(
                f"{old!r} in {checkpoint.folder} would have an empty name; change --strip-prefix "
                "or --rename"
            )
        if name in old_of:
            raise RecipeError(
                f"{old_of[name]!r} and {old!r} in {checkpoint.folder} would both be {name!r}; "
                "leave one of them out with --exclude, or change --strip-prefix or --rename"
            )
        old_of[name] = old


def _expect_matches(
    checkpoint: Checkpoint, selection: TensorSelection, names: list[str], others: list[str]
) -> None:
    """Raise UsageError for a pattern without a match: it would be a mistake without any effect."""
    prefix = selection.selected_prefix
    if prefix:
        chosen = [name for name in names if name.startswith(prefix)]
        if not any(name in checkpoint.tensors for name in chosen):
            raise UsageError(_describe_idle(checkpoint, "select", prefix[:-1], names))
        names = [name.removeprefix(prefix) for name in chosen]
        others = [name.removeprefix(prefix) for name in others if name.startswith(prefix)]
    for option, globs in (("include", selection.include), ("exclude", selection.exclude)):
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in (*names, *others)):
                raise UsageError(_describe_idle(checkpoint, option, glob, names))
    globs_only = selection.replace(select=None)
    taken = [name for name in names if globs_only.takes(name)]
    for prefix in selection.strip_prefix:
        stripped = [name.removeprefix(prefix) for name in taken]
        if taken and stripped == taken:
            raise UsageError(_describe_idle(checkpoint, "strip-prefix", prefix, taken))
        taken = stripped
    for text in selection.rename:
        pattern, _ = _parse_renaming(text)
        if taken and not any(pattern.fullmatch(name) for name in taken):
            raise UsageError(_describe_idle(checkpoint, "rename", text, taken))


def _describe_idle(checkpoint: Checkpoint, option: str, text: str, names: list[str]) -> str:
    if option == "select":
        fronts = dict.fromkeys(name.rpartition(".")[0].split(".")[0] for name in names)
        listed = ", ".join(map(repr, [front for front in fronts if front][:_MAX_LISTED]))
        return (
            f"--select {text!r}: no tensor in {checkpoint.folder} has a name that begins with "
            f"{text + '.'!r}; names begin with {listed or 'no such word'}"
        )
    import difflib

    # Comparing the text with each name is slow, and the first names suffice for a hint.
    near = difflib.get_close_matches(text.partition("=")[0], names[:5000], 1, 0.3) or names[:1]
    shown = f", such as {near[0]!r}" if near else ""
    how = "a prefix is the beginning of a name, dot and all"
    if option != "strip-prefix":
        how = "a pattern is for the whole of a name, `*` stands for any characters"
    return (
        f"--{option} {text!r} matches none of {count_text(len(names), 'name')} in "
        f"{checkpoint.folder}{shown}; {how}"
    )


def _read_texts(what: str, values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{what} {values!r}; give a list of texts, such as [{values!r}]")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise UsageError(f"{what} has {text!r}; expected a text that is not empty")
    return texts


@lru_cache(maxsize=1024)
def _parse_renaming(text: str) -> tuple[re.Pattern[str], tuple[str | int, ...]]:
    """Parse `pattern=name`: the pattern, and the text and the numbers of parts of the new name.

    Raises UsageError for text that cannot be parsed.
    """
    pattern, divider, name = text.partition("=")
    if not divider or not pattern or not name or "=" in name:
        raise UsageError(
            f"cannot read the renaming {text!r}; write pattern=name, such as "
            "'layers.*.w1=model.layers.*.gate'"
        )
    parts = pattern.split("*")
    # Names may contain line breaks.
    expression = re.compile("(.*?)".join(map(re.escape, parts)), re.DOTALL)
    stars = len(parts) - 1
    pieces: list[str | int] = []
    by_order, by_number, end = 0, [], 0
    for match in _PART.finditer(name):
        pieces.append(name[end : match.start()])
        end = match.end()
        if match[1] is None:
            by_order += 1
            pieces.append(by_order)
        else:
            by_number.append(int(match[1]))
            pieces.append(int(match[1]))
    pieces.append(name[end:])
    if by_order and by_number:
        raise UsageError(
            f"the renaming {text!r} has `*` and numbers in the new name; write one of them, "
            "such as {1} for each `*`"
        )
    wrong = [number for number in by_number if not 1 <= number <= stars]
    if wrong or (by_order and by_order != stars):
        said = f"{{{wrong[0]}}}" if wrong else f"{by_order} `*`"
        raise UsageError(
            f"the renaming {text!r} has {said} in the new name, and its pattern has "
            f"{stars} `*`; write as many, or numbers from {{1}} to {{{stars}}}"
            if stars
            else f"the renaming {text!r} has {said} in the new name, and its pattern has no `*`"
        )
    return expression, tuple(pieces)


_GROUPS = "param_groups"


def select(
    checkpoint: Checkpoint,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    strip_prefix: Iterable[str] = (),
    rename: Iterable[str] = (),
    select: str | None = None,
) -> Checkpoint:
    """Return the checkpoint with some of its tensors, items and values, by their new names.

    No byte is copied or read.

    Args:
        checkpoint: a checkpoint from `open`.
        include: globs on names; all names are taken if empty.
        exclude: globs on names that are left out.
        strip_prefix: prefixes to remove from names, in this order.
        rename: texts `pattern=name`, such as `layers.*.w1=model.layers.*.gate`.
        select: the prefix of the names that are taken, which is removed first.

    Raises:
        UsageError: a pattern that cannot be parsed, or that does not match anything; an empty
            selection.
        RecipeError: two tensors, items or values with the same name.
    """
    return select_from(checkpoint, TensorSelection(include, exclude, strip_prefix, rename, select))


def open_selected(
    path: str | os.PathLike[str],
    *,
    select: str | None = None,
    mesh: DeviceMesh | str | None = None,
    rules: Iterable[Rule | str] = (),
    recipe: str | os.PathLike[str] | Recipe | None = None,
    check_copies: str = "sample",
    allow: Iterable[str] = (),
) -> Checkpoint:
    """Describe the checkpoint at `path`: a folder, a safetensors file, or an index file.

    Only headers are read. Every error that headers can show is reported.

    Args:
        path: the location of the checkpoint.
        select: the prefix of a model among several, such as `ema_state_dict`: the checkpoint has
            only the tensors of that model, without the prefix.
        mesh: the mesh of the ranks that wrote the checkpoint, such as `"tp=2"`, if their files
            have plain tensors without shardings.
        rules: the shardings over that mesh, such as `["*.weight=tp, -", "*=..."]`.
        recipe: a recipe with these shardings: a name, a file, or `auto` to choose by config.json.
        check_copies, allow: how to compare copies that several ranks hold, as in
            `open_checkpoint`.

    Raises:
        UsageError: a value that is not a path; a prefix that no tensor has.
        CheckpointError: a path that does not exist, or is not a checkpoint.
        FormatError: a file that is damaged, or not of its format.
        CoverageError: shards that do not cover whole tensors.
    """
    from reshard.checkpoint.formats.opening import open_checkpoint

    opened = open_checkpoint(
        path, mesh=mesh, rules=rules, recipe=recipe, check_copies=check_copies, allow=allow
    )
    return select_from(opened, TensorSelection(select=select))


def select_from(
    checkpoint: Checkpoint, selection: TensorSelection, *, is_expected: bool = True
) -> Checkpoint:
    """Return the selected part of a checkpoint.

    Args:
        checkpoint: the source.
        selection: the tensors, items and values to take, and their new names.
        is_expected: whether each pattern must match a name, and the selection must not be empty.

    Raises:
        UsageError: a pattern that does not match anything; an empty selection.
        RecipeError: two tensors, items or values with the same name.
    """
    if not selection:
        return checkpoint
    new = find_new_names(checkpoint, selection, is_expected=is_expected)
    values = checkpoint.values
    if selection.rename:
        moved = _follow_parameters(checkpoint, selection, new)
        values = {name: _rename_groups(name, value, moved) for name, value in values.items()}
    notes = checkpoint.notes
    dropped = [name for name in checkpoint.tensors if new[name] is None]
    if dropped:
        notes += (
            f"{count_text(len(dropped), 'tensor')} left out by {_name_options(selection)} "
            f"(first: {dropped[0]})",
        )
    return by_new_names(checkpoint.replace(values=values, notes=notes), new)


def _name_options(selection: TensorSelection) -> str:
    """Return the options that leave tensors out, for a note."""
    if selection.select is None:
        return "--include and --exclude"
    others = selection.include or selection.exclude
    return f"--select {selection.select}" + ", --include and --exclude" * bool(others)


def _follow_parameters(
    checkpoint: Checkpoint, selection: TensorSelection, new: dict[str, str | None]
) -> dict[str, str]:
    """Return the new names of parameters, by their names in optimizer state.

    Optimizer state that no pattern renames gets the new name of its parameter in `new`.
    """
    from reshard.checkpoint.training.model_sets import bare_name
    from reshard.checkpoint.training.state import find_training_state

    state = find_training_state(checkpoint)
    if state is None:
        return {}
    moved = {}
    for parameter, name in state.weights.items():
        stripped = selection.strip(name)
        renamed = selection.renamed(stripped)
        if renamed is not None and renamed != stripped:
            moved[parameter] = _find_parameter(stripped, renamed, state)
    for name, (parameter, key) in state.tensors.items():
        taken = new[name]
        # Another name shows that a pattern matches the state itself, which takes precedence.
        if key and parameter in moved and taken == selection.strip(name):
            new[name] = _replace_parameter(taken, parameter, moved[parameter])
    # The names of items and values in groups may contain a parameter.
    for name in (*checkpoint.items, *checkpoint.values):
        taken = new[name]
        begin, separator, rest = (taken or "").partition(f"{_GROUPS}.")
        if separator and taken == selection.strip(name):
            member = rest.rpartition(".")[0]
            if bare_name(member) in moved:
                new[name] = begin + separator + moved[bare_name(member)] + rest[len(member) :]
    return moved


def _find_parameter(weight: str, renamed: str, state: TrainingState) -> str:
    """Return the new name of the parameter whose weight `weight` becomes `renamed`."""
    # The longest first: `model.` begins `model.module.` too.
    for prefix in sorted(state.weight_prefixes, key=len, reverse=True):
        if prefix and weight.startswith(prefix) and renamed.startswith(prefix):
            return renamed.removeprefix(prefix)
    return renamed


def _replace_parameter(name: str, parameter: str, moved: str) -> str:
    """Return the name of optimizer state with another parameter in it.

    >>> _replace_parameter("optim.state.a.w.exp_avg", "a.w", "b")
    'optim.state.b.exp_avg'
    """
    at = name.rfind(f"state.{parameter}.")
    if at < 0:
        return name
    at += len("state.")
    return name[:at] + moved + name[at + len(parameter) :]


def _rename_groups(name: str, value: Any, moved: Mapping[str, str]) -> Any:
    """Return the groups of an optimizer with the new names of its parameters."""
    if not moved or name.rpartition(".")[2] != _GROUPS or not isinstance(value, list | tuple):
        return value
    from reshard.checkpoint.training.model_sets import bare_name

    groups = []
    for group in value:
        names = group.get("params") if isinstance(group, dict) else None
        if isinstance(names, list | tuple):
            new_names = [
                moved.get(bare_name(name), name) if isinstance(name, str) else name
                for name in names
            ]
            group = {**group, "params": new_names}
        groups.append(group)
    return groups
