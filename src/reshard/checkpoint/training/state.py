"""Classifying training state by names: weights, and the optimizer state of each weight.

`TrainingState` is the canonical form. Programs store the same state under their own names. The name
of optimizer state has a word for the optimizer, the parameter, and the key of the state::

    model.NAME              optim.state.NAME.exp_avg             DCP of `get_state_dict`
    NAME                    optimizer.state.NAME.exp_avg         torchtitan; reshard's own names
    state_dict.NAME         optimizer_states.0.state.7.exp_avg   Lightning: parameters by number
    model.module.NAME       state.NAME.step                      wrapped models

1. The text before `.state.` is an optimizer if its last word is a word for optimizers, or if keys
   of optimizers follow.
2. The weights' prefix is the prefix under which most of the parameters are found. Wrappers
   (`module`, `_orig_mod`, ...) may be in the names of weights or of optimizer state only.
3. The parameter is the longest name of a weight after `.state.`; without weights, the text before a
   known key.
4. Numbers are assigned in the order of the parameters, group by group: each group is a subsequence
   of the weights with the same shapes. If there are several such subsequences, nothing is guessed.
5. Tensors that are neither weights nor optimizer state, such as random states, are `others`.

`STYLES` is the table of programs that a state can be translated to (`translation`)::

    style     weights        optimizer state                  32-bit weights     steps
    fsdp2     model.NAME     optim.state.NAME.exp_avg         are the weights    float32
    torch     model.NAME     optimizer.state.7.exp_avg        are the weights    float32
    reshard   NAME           optimizer.state.NAME.exp_avg     separate, `master` float32
    megatron  NAME           optimizer.state.NAME.exp_avg     separate, `master` in groups
    optax     params.NAME    optimizer.state.NAME.exp_avg     are the weights    int32

`fsdp2` is the state of `torch.distributed.checkpoint.state_dict.get_state_dict`, saved under
`model` and `optim`. `torch` is `state_dict()` of a module and of an optimizer, saved under `model`
and `optimizer`, in which parameters have numbers, group by group. `reshard` is the form in which
DeepSpeed's formats, whose files have their own names, are read and written; `megatron` and `optax`
are the states of Megatron and Orbax.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from reshard._records import Record
from reshard.checkpoint.blocks.tensor_columns import shapes_of
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.optimizer_states import MASTER, OPTIMIZER_KEYS, STEP, match_groups
from reshard.checkpoint.training.model_sets import (
    MODEL_PREFIXES,
    bare_name,
    is_auxiliary,
    is_wrapper,
)
from reshard.errors import UsageError

Shape = tuple[int, ...]
Path = tuple[str | int, ...]

_MASTERS = frozenset(
    {MASTER, "fp32", "fp32_param", "master_param", "master_params", "master_weight"}
)
# Keys of optimizers of PyTorch, Transformers, bitsandbytes and Megatron. `step` is not evidence of
# an optimizer: models have it too.
_EVIDENCE = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg"),
        *("grad_avg", "acc_delta", "step_size", "exp_avg_sq_row", "exp_avg_sq_col", "row_var"),
        *("col_var", "fp32_param", "master_param", "state1", "state2", "absmax1", "absmax2"),
        *("qmap1", "qmap2", "mu_product", "exp_avg_diff", "neg_pre_grad"),
    }
)
_KEYS = _EVIDENCE | _MASTERS | {STEP, "sum", "prev", "eta", "mu", "ax", "variance", "RMS"}
_CONTAINER = re.compile(r"(?:opt|optim|optimizer)s?(?:_?states?|_state_dict)?(?:[._]\d+)*")


class TrainingState(Record):
    """The training state of a checkpoint, by the names of its tensors.

    Attributes:
        weights: the tensor of each parameter and buffer, by its bare name.
        optimizer: the tensor of each key of optimizer state, by parameter.
        others: tensors that are neither, such as random states.
        unplaced: optimizer state whose parameter is unknown, with the reason.
        containers: the prefixes of optimizer state, such as `optim`.
        weight_prefixes: the prefixes of the weights' names before bare names, such as `model.`.
        numbers: the parameters in the order of their numbers in the checkpoint, for each container
            in which parameters have numbers.

    >>> shapes = {"model.up": (4, 2), "optim.state.up.exp_avg": (4, 2), "optim.state.up.step": ()}
    >>> found = find_training_state(shapes)
    >>> found.weights, found.optimizer["up"]["step"]
    ({'up': 'model.up'}, 'optim.state.up.step')
    """

    weights: Mapping[str, str]
    optimizer: Mapping[str, Mapping[str, str]]
    others: tuple[str, ...] = ()
    unplaced: tuple[tuple[str, str], ...] = ()
    containers: tuple[str, ...] = ()
    weight_prefixes: tuple[str, ...] = ("",)
    numbers: Mapping[str, tuple[str, ...]] = {}

    @cached_property
    def tensors(self) -> Mapping[str, tuple[str, str]]:
        """The parameter and the optimizer's key of each tensor, without `others` and `unplaced`.

        The key of a weight is `""`.
        """
        result = {name: (bare, "") for bare, name in self.weights.items()}
        for parameter, state in self.optimizer.items():
            for key, name in state.items():
                result[name] = parameter, key
        return result

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        """The names of all optimizer state."""
        placed = [name for state in self.optimizer.values() for name in state.values()]
        return (*placed, *(name for name, _ in self.unplaced))

    def around(self, name: str) -> tuple[str, str]:
        """Return the text before and after the parameter in the name of a tensor.

        >>> find_training_state({"optim.state.module.up.exp_avg": (4,)}).around(
        ...     "optim.state.module.up.exp_avg")
        ('optim.state.module.', '.exp_avg')
        """
        bare, _ = self.tensors[name]
        at = name.rfind(bare)
        if at >= 0:
            return name[:at], name[at + len(bare) :]
        # The name may have wrappers inside the parameter's name, or a number instead of it.
        words = name.split(".")
        for start, stop in itertools.combinations(range(len(words) + 1), 2):
            if bare_name(".".join(words[start:stop])) == bare:
                before, after = ".".join(words[:start]), ".".join(words[stop:])
                return before + "." * bool(before), "." * bool(after) + after
        return name, ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the optimizer state, each once."""
        return tuple(dict.fromkeys(key for state in self.optimizer.values() for key in state))


def find_training_state(
    tensors: Checkpoint | Mapping[str, Shape],
    *,
    paths: Mapping[str, Path] | None = None,
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> TrainingState | None:
    """Return the training state in a checkpoint; None if it does not have optimizer state.

    Args:
        tensors: a checkpoint, or the shapes of its tensors by name.
        paths: the path of each name in a nested state, as in a checkpoint.
        groups: the numbers of the parameters in each group, by container; by default, those in the
            checkpoint's values. The numbered parameters of any other container form a group.

    >>> find_training_state({"model.norm.weight": (4,)}) is None
    True
    """
    if isinstance(tensors, Checkpoint):
        paths = tensors.paths if paths is None else paths
        shapes: Mapping[str, Shape] = shapes_of(tensors.tensors)
        groups = _find_numbered_groups(tensors.values) if groups is None else groups
    else:
        shapes, paths = tensors, paths or {}
    after = _find_containers(shapes)
    if not after:
        return None
    inside = {name for entries in after.values() for name in entries}
    outside = [name for name in shapes if name not in inside]
    return _StateBuilder(shapes, paths, outside, groups or {}).build(after)


def shapes_without_state(checkpoint: Checkpoint) -> Mapping[str, Shape]:
    """Return the shapes of a checkpoint's tensors that are not optimizer state."""
    shapes = shapes_of(checkpoint.tensors)
    inside = {name for entries in _find_containers(shapes).values() for name in entries}
    return {name: shape for name, shape in shapes.items() if name not in inside}


def is_optimizer_state(name: str) -> bool:
    """Return whether a name is the name of optimizer state, without looking at other names.

    >>> is_optimizer_state("optim.state.up.weight.exp_avg"), is_optimizer_state("up.weight")
    (True, False)
    """
    return bool(_find_containers([name]))


def _find_numbered_groups(values: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Return the numbers of the parameters of each group, by container, if there are any."""
    result: dict[str, list[list[int]]] = {}
    for name, groups in values.items():
        container, _, last = name.rpartition(".")
        if last != "param_groups" or not isinstance(groups, list):
            continue
        lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
        if all(isinstance(items, list) and all(type(n) is int for n in items) for items in lists):
            result[container] = [[*items] for items in lists if items is not None]
    return result


def _find_containers(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of each optimizer's tensors, with the text after `.state.`."""
    after: dict[str, dict[str, str]] = {}
    for name in names:
        at = 0 if name.startswith("state.") else name.find(".state.") + 1
        if at or name.startswith("state."):
            after.setdefault(name[: max(0, at - 1)], {})[name] = name[at + len("state.") :]
    return {
        container: entries
        for container, entries in after.items()
        if _is_optimizer_word(container)
        or any(rest.rpartition(".")[2] in _EVIDENCE for rest in entries.values())
    }


def _is_optimizer_word(container: str) -> bool:
    """Return whether the last word, before any numbers, is a word for optimizers."""
    words = container.split(".")
    while len(words) > 1 and words[-1].isdigit():
        words.pop()
    return _CONTAINER.fullmatch(words[-1]) is not None


class _StateBuilder:
    """A training state in progress."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        paths: Mapping[str, Path],
        outside: Sequence[str],
        groups: Mapping[str, Sequence[Sequence[int]]],
    ) -> None:
        self.shapes, self.paths, self.outside, self.groups = shapes, paths, outside, groups
        self.optimizer: dict[str, dict[str, str]] = {}
        self.unplaced: dict[str, str] = {}
        self.prefixes: list[str] = []
        self.numbers: dict[str, tuple[str, ...]] = {}
        # For each prefix, the tensors under it by bare name.
        self.by_prefix: dict[str, dict[str, str]] = {}

    def build(self, after: Mapping[str, Mapping[str, str]]) -> TrainingState:
        for container, named in after.items():
            if self._has_numbers(named):
                self._add_numbered(container, named)
            else:
                self._add_named(named)
        if not self.prefixes:
            self._choose_prefix([])
        weights: dict[str, str] = {}
        for prefix in self.prefixes:
            for bare, name in self._names_under(prefix).items():
                weights.setdefault(bare, name)
        placed = set(weights.values())
        return TrainingState(
            weights,
            self.optimizer,
            tuple(name for name in self.outside if name not in placed),
            tuple(self.unplaced.items()),
            tuple(after),
            tuple(self.prefixes),
            self.numbers,
        )

    def _has_numbers(self, entries: Mapping[str, str]) -> bool:
        """Return whether parameters have numbers: `7.exp_avg`, but not `0.weight.exp_avg`."""
        for name, rest in entries.items():
            number, _, key = rest.partition(".")
            path = self.paths.get(name, ())
            is_named = len(path) > 2 and path[-3] == "state" and not str(path[-2]).isdigit()
            if not number.isdigit() or is_named or key.rpartition(".")[2] in _KEYS - {key}:
                return False
        return True

    def _names_under(self, prefix: str) -> dict[str, str]:
        """Return the tensors with a prefix outside of optimizers, by bare names."""
        if prefix not in self.by_prefix:
            names: dict[str, str] = {}
            for name in self.outside:
                if not name.startswith(prefix) or is_auxiliary(name):
                    continue
                bare = bare_name(name[len(prefix) :])
                # If two names differ in wrappers only, the second keeps its wrappers.
                names[bare if bare not in names else name[len(prefix) :]] = name
            self.by_prefix[prefix] = names
        return self.by_prefix[prefix]

    def _choose_prefix(self, guesses: Sequence[str]) -> dict[str, str]:
        """Return the weights under the prefix with most of the guessed parameters."""
        candidates = [""]
        # A few parameters suffice to find the prefixes of weights.
        for guess in guesses[:4]:
            bare = bare_name(guess)
            for name in self.outside:
                candidate = bare_name(name)
                if candidate == bare or not candidate.endswith(f".{bare}"):
                    continue
                prefix = candidate[: -len(bare)]
                if _is_optimizer_word(prefix.partition(".")[0]):
                    continue
                # `prefix` lacks the wrappers that the name may have: add them again.
                candidates += [p for p in (_widen(name, prefix),) if p not in candidates]
        if len(candidates) == 1 and not guesses:
            candidates += _common_prefix(self.outside)
            chosen = candidates[-1]
        else:
            bare_guesses = {bare_name(guess) for guess in guesses}
            # Copies of the weights, such as moving averages, have other prefixes: among equals,
            # prefer the prefix of a model.
            chosen = max(
                candidates,
                key=lambda p: (
                    len(bare_guesses & self._names_under(p).keys()),
                    p in MODEL_PREFIXES,
                ),
            )
            if not bare_guesses & self._names_under(chosen).keys():
                # The checkpoint has the optimizer's state, but not its weights.
                return {}
        if chosen not in self.prefixes:
            self.prefixes.append(chosen)
        return self._names_under(chosen)

    def _add_named(self, entries: Mapping[str, str]) -> None:
        split = {
            name: _split_path(self.paths.get(name, ()), rest) for name, rest in entries.items()
        }
        guesses = dict.fromkeys(
            parameter for parameter, key in split.values() if key in _KEYS and parameter
        )
        weights = self._choose_prefix([*guesses])
        parameters = {**weights, **{bare_name(guess): guess for guess in guesses}}
        for name, (parameter, key) in split.items():
            bare = bare_name(parameter)
            if bare not in parameters:
                bare, key = _split_by_known(entries[name], parameters)
            if not bare and key not in _KEYS:
                self.unplaced[name] = "no parameter has the beginning of its name"
                continue
            self._add(name, bare or bare_name(parameter), key)

    def _add(self, name: str, parameter: str, key: str) -> None:
        state = self.optimizer.setdefault(parameter, {})
        key = MASTER if key in _MASTERS else key
        if key in state:
            self.unplaced[name] = f"{state[key]} is the same of the same parameter"
        else:
            state[key] = name

    def _add_numbered(self, container: str, entries: Mapping[str, str]) -> None:
        shapes: dict[int, Shape] = {}
        for name, rest in entries.items():
            number, _, key = rest.partition(".")
            shape = shapes.get(int(number), ())
            # The state with the most dimensions has the shape of the parameter.
            is_own = key in _EVIDENCE and len(self.shapes[name]) >= len(shape)
            shapes[int(number)] = self.shapes[name] if is_own else shape
        weights = self._choose_prefix([])
        groups = self.groups.get(container) or [sorted(shapes)]
        sizes = {bare: self.shapes[name] for bare, name in weights.items()}
        matched = match_groups(groups, shapes.get, [*sizes.items()])
        if matched is None:
            why = (
                "its parameter has a number, and the shapes of the weights, in their order, do not "
                "tell which one it is"
            )
            self.unplaced.update(dict.fromkeys(entries, why))
            return
        self.numbers[container] = tuple(matched[n] for n in sorted(matched))
        for name, rest in entries.items():
            number, _, key = rest.partition(".")
            if int(number) in matched:
                self._add(name, matched[int(number)], key)
            else:
                self.unplaced[name] = "no group of parameters has its number"


def _widen(name: str, prefix: str) -> str:
    """Return the beginning of a name that is equal to `prefix` except for wrappers."""
    at, bare = 0, ""
    for part in name.split("."):
        if bare == prefix:
            break
        at += len(part) + 1
        bare += "" if is_wrapper(part) else f"{part}."
    return name[:at]


def _common_prefix(names: Sequence[str]) -> list[str]:
    """Return the first word of most names, with a dot, if it is a word for models."""
    for word in MODEL_PREFIXES:
        if any(name.startswith(word) for name in names) and all(
            name.startswith(word)
            or is_auxiliary(name)
            or "." not in name
            or _is_optimizer_word(name.partition(".")[0])
            for name in names
        ):
            return [word]
    return []


def _split_path(path: Path, rest: str) -> tuple[str, str]:
    """Return the parameter and the key by the path in a nested state, or split at the last dot."""
    if len(path) > 2 and path[-3] == "state":
        return str(path[-2]), str(path[-1])
    first, _, last = rest.partition(".")
    # Megatron writes the key first.
    if first in _EVIDENCE and last.rpartition(".")[2] not in _KEYS:
        return last, first
    parameter, _, key = rest.rpartition(".")
    return parameter, key


def _split_by_known(rest: str, parameters: Mapping[str, str]) -> tuple[str, str]:
    """Return the longest known parameter that `rest` begins with, and the key after it."""
    # Try longer beginnings first: a parameter's name may begin with another parameter's name.
    at = rest.rfind(".")
    while at > 0:
        bare = bare_name(rest[:at])
        if bare in parameters:
            return bare, rest[at + 1 :]
        at = rest.rfind(".", 0, at)
    return "", rest.rpartition(".")[2]


# The keys that states of Optax can have (`reshard.checkpoint.formats.orbax.optax_states`).
_OPTAX_KEYS = frozenset(
    {"exp_avg", "exp_avg_sq", "square_avg", "grad_avg", "acc_delta", "sum", "momentum_buffer"}
)


class TrainingStyle(Record):
    """The form in which a program keeps training state.

    Attributes:
        name: the name on the command line.
        program: the program whose optimizers resume from it.
        weights: the prefix of the names of weights.
        optimizer: the prefix of the names of optimizer state.
        has_masters: whether 32-bit weights are stored in addition to the model's.
        step_type: the type of the number of steps of each parameter.
        has_one_step: whether all parameters share a number of steps.
        step_keys: a parameter with any of these keys has a number of steps; None for all.
        keys: the keys of the state of a parameter; None if they are not known.
        has_group_steps: whether groups have the number of steps, in addition to parameters.
        groups: the name of the list of groups; None if hyper-parameters are not saved.
        are_groups_apart: whether each hyper-parameter is a value by itself.
        are_numbered: whether parameters have numbers in optimizer state.
        are_names_nested: whether each word of a name is a level of the nested state.
    """

    name: str
    program: str
    weights: str
    optimizer: str
    has_masters: bool = True
    step_type: str = "float32"
    has_one_step: bool = False
    step_keys: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    has_group_steps: bool = False
    groups: str | None = None
    are_groups_apart: bool = False
    are_names_nested: bool = False
    are_numbered: bool = False

    def weight_name(self, parameter: str) -> str:
        """Return the name of a weight.

        >>> training_style("fsdp2").weight_name("up.weight")
        'model.up.weight'
        """
        return self.weights + parameter

    @property
    def is_pytorch(self) -> bool:
        """Whether PyTorch's optimizers load it, which require all their settings in groups."""
        return self.are_groups_apart or self.are_numbered

    def state_name(self, parameter: str, key: str) -> str:
        """Return the name of a parameter's optimizer state.

        >>> training_style("fsdp2").state_name("up.weight", "exp_avg")
        'optim.state.up.weight.exp_avg'
        """
        return f"{self.optimizer}{parameter}.{key}"

    def weight_path(self, parameter: str) -> tuple[str | int, ...]:
        """Return the path of a weight in the nested state."""
        words = tuple(parameter.split(".")) if self.are_names_nested else (parameter,)
        return (*_words(self.weights), *words)

    def state_path(self, parameter: str, key: str) -> tuple[str | int, ...] | None:
        """Return the path of a parameter's optimizer state, or None if the format determines it."""
        return None if self.are_names_nested else (*_words(self.optimizer), parameter, key)


def _words(prefix: str) -> tuple[str, ...]:
    return tuple(prefix.rstrip(".").split(".")) if prefix else ()


STYLES = {
    style.name: style
    for style in (
        TrainingStyle(
            "fsdp2",
            "PyTorch",
            "model.",
            "optim.state.",
            has_masters=False,
            keys=OPTIMIZER_KEYS,
            groups="optim.param_groups",
            are_groups_apart=True,
        ),
        TrainingStyle(
            "torch",
            "PyTorch",
            "model.",
            "optimizer.state.",
            has_masters=False,
            keys=OPTIMIZER_KEYS,
            groups="optimizer.param_groups",
            are_numbered=True,
        ),
        TrainingStyle(
            "reshard", "DeepSpeed", "", "optimizer.state.", groups="optimizer.param_groups"
        ),
        TrainingStyle(
            "megatron",
            "Megatron-core",
            "",
            "optimizer.state.",
            has_group_steps=True,
            groups="optimizer.param_groups",
        ),
        TrainingStyle(
            "optax",
            "Optax",
            "params.",
            "optimizer.state.",
            has_masters=False,
            step_type="int32",
            has_one_step=True,
            step_keys=frozenset({"exp_avg"}),
            keys=_OPTAX_KEYS,
            are_names_nested=True,
        ),
    )
}


def training_style(name: str) -> TrainingStyle:
    """Return the style with a name.

    Raises:
        UsageError: an unknown name; the message lists the known names.
    """
    if name not in STYLES:
        raise UsageError(f"training state as {name!r} keeps it; known are {', '.join(STYLES)}")
    return STYLES[name]
