"""Translating training state to another program's names, kinds of weights, steps and groups.

1. `find_training_state` classifies each tensor, which gets its name in the target's style.
2. Some programs store 32-bit weights in addition to the model's own weights. If the target does and
   the source does not, both kinds are created from the source's weights. If only the source does,
   its 32-bit weights become the target's weights.
3. The number of steps of a parameter, of a group or of all parameters becomes a tensor for each
   parameter.
4. Groups of hyper-parameters become the target's groups, completed with the hyper-parameters that
   PyTorch's optimizers require.
5. Other tensors keep their names. Tensors without a counterpart are reported.

Elements are read from their files; only casts and steps are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.binding import Binding
from reshard.checkpoint.blocks.block_io import BlockReader, open_sources
from reshard.checkpoint.changes.computed_tensors import CastTensor, ComputedTensor, ConstantTensor
from reshard.checkpoint.changes.planning import ChangedElements
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.formats.optimizer_states import MASTER, STEP, complete_group
from reshard.checkpoint.training.model_sets import bare_name, expect_one_model, find_model_sets
from reshard.checkpoint.training.plain_state import (
    INJECTED,
    PARAMETERS,
    decode_items,
    find_groups,
    names_of_groups,
)
from reshard.checkpoint.training.state import TrainingState, TrainingStyle, find_training_state
from reshard.dtypes import DType, dtype
from reshard.elements import as_float32, is_castable
from reshard.errors import FormatError, UsageError
from reshard.layout import Layout
from reshard.text import count_text

_FLOAT32 = dtype("float32")

# The keys of SGD and Muon, which do not count steps.
_KEYS_WITHOUT_STEPS = frozenset({MASTER, STEP, "momentum_buffer"})
# Hyper-parameters whose defaults change what an optimizer computes.
_HYPER = ("lr", "betas", "eps", "weight_decay", "momentum", "alpha", "dampening", "nesterov")
# The maximum of the int32 in which Optax counts.
MAX_STEPS = 1 << 31


def translate(
    checkpoint: Checkpoint, style: TrainingStyle, *, has_items: bool, keeps_items: bool
) -> ChangedElements:
    """Return a checkpoint with its training state as another program keeps it.

    Args:
        checkpoint: a checkpoint with optimizer state.
        style: the style of the target.
        has_items: whether the target can store bytes that are not tensors.
        keeps_items: whether the target keeps the source's items as they are; otherwise those that
            contain plain values become values.

    Raises:
        UsageError: a checkpoint without optimizer state.
        RecipeError: several models that the optimizer state could be of.
        CheckpointError: a file that cannot be read.
    """
    state = find_training_state(checkpoint)
    if state is None:
        raise UsageError(
            f"{checkpoint.folder} has no optimizer state, by its names; leave --training out"
        )
    _expect_one_model(checkpoint, state)
    return _Translation(checkpoint, state, style).make(has_items, keeps_items)


def _expect_one_model(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Raise RecipeError if the optimizer state could belong to any of several models."""
    outside = [*state.weights.values(), *state.others]
    sets = find_model_sets({name: checkpoint.tensors[name].shape for name in outside})
    if not sets:
        return
    names = {*map(bare_name, outside)}
    fitting = {}
    for prefix, count in sets.items():
        called = [bare_name(f"{prefix}.{name}".removeprefix(".")) for name in state.optimizer]
        if state.unplaced or 2 * sum(name in names for name in called) >= len(called):
            fitting[prefix] = count
    if len(fitting) > 1:
        expect_one_model(checkpoint.folder, fitting)


class _Translation:
    """A translation in progress."""

    def __init__(self, old: Checkpoint, state: TrainingState, style: TrainingStyle) -> None:
        self.old, self.state, self.style = old, state, style
        self.tensors: dict[str, StoredTensor] = {}
        self.computed: dict[str, ComputedTensor] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self.sources: Counter[str] = Counter()
        self.numbers: dict[str, str] = {}
        # Tensors with a hyper-parameter, which becomes a hyper-parameter of groups.
        self.injected: set[str] = set()
        self.files = open_sources(old)

    def make(self, has_items: bool, keeps_items: bool) -> ChangedElements:
        try:
            return self._make(has_items, keeps_items)
        finally:
            self.files.close()

    def _make(self, has_items: bool, keeps_items: bool) -> ChangedElements:
        items = self._read_values(has_items, keeps_items)
        # Optax has hyper-parameters as tensors instead of groups.
        groups = find_groups(self.values, self.state) or self._read_injected()
        groups = self._complete_groups(groups)
        self.numbers = self._number_parameters(groups)
        for name in names_of_groups([*self.values], self.state):
            del self.values[name]
        self._add_weights()
        self._add_state()
        self._add_steps(groups)
        others = [name for name in self.state.others if name not in self.injected]
        for name in (*others, *(name for name, _ in self.state.unplaced)):
            self._add(name, self.old.tensors[name], self.old.paths.get(name))
        self._add_groups(groups)
        for why in dict.fromkeys(why for _, why in self.state.unplaced):
            names = [name for name, item in self.state.unplaced if item == why]
            self.notes.append(
                f"{count_text(len(names), 'tensor')} of optimizer state keep their names (first: "
                f"{names[0]}): {why}"
            )
        checksums = (
            checksum.replace(is_read_once=checksum.is_read_once and times == 1)
            for checksum in self.old.checksums
            if (times := self.sources[checksum.tensor])
        )
        changed = self.old.replace(
            tensors=self.tensors,
            items={name: self.old.items[name] for name in items},
            values=self.values,
            paths=self.paths,
            checksums=tuple(checksums),
            notes=(*self.old.notes, *self.notes),
        )
        return ChangedElements(changed, self.computed)

    def _read_values(self, has_items: bool, keeps_items: bool) -> list[str]:
        """Read the plain values, and return the names of the items that are copied unchanged."""
        self.values |= self.old.values
        of_groups = set(names_of_groups(self.old.items, self.state))
        decoded = [name for name in self.old.items if not keeps_items or name in of_groups]
        values, unread = decode_items(self.old, decoded)
        self.values |= values
        self.paths |= {n: self.old.paths[n] for n in self.values if n in self.old.paths}
        if not has_items:
            self.notes += [f"not in the target: {name} ({why})" for name, why in unread.items()]
        copied = [n for n in self.old.items if n not in values and (has_items or n not in unread)]
        self.paths |= {name: self.old.paths[name] for name in copied if name in self.old.paths}
        return copied

    def _complete_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Complete the groups with the entries that the target's optimizers require."""
        if groups:
            self._describe_stateless(groups)
            groups = self._add_left(groups)
        is_megatron = self.style.has_group_steps and bool(self.state.optimizer)
        if not self.style.is_pytorch and not is_megatron:
            return groups
        if groups:
            return self._add_hyper(groups) if self.style.is_pytorch else groups
        defaults = complete_group({}, self.state.keys)
        hyper = ", ".join(
            f"{k} {defaults[k]}" for k in ("lr", "betas", "eps", "momentum") if k in defaults
        )
        self.notes.append(
            "the source has no groups of hyper-parameters: those of the target are PyTorch's "
            f"defaults ({hyper}), which the program that goes on has to set"
        )
        return [{**defaults, PARAMETERS: [*self.state.optimizer]}]

    def _describe_stateless(self, groups: Sequence[dict[str, Any]]) -> None:
        """Note the parameters that groups name and that have no optimizer state."""
        names = [n for group in groups for n in group.get(PARAMETERS) or () if type(n) is str]
        left = [n for n in names if n not in self.state.optimizer and n in self.state.weights]
        if left and self.state.optimizer:
            self.notes.append(
                f"{count_text(len(left), 'parameter')} (first: {left[0]}) are in a group of the "
                "source and have no optimizer state, as frozen ones have none: where they are "
                f"trained, {self.style.program} looks for state of them, which the target lacks"
            )

    def _add_left(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add a group of the parameters that have optimizer state and are in no group."""
        if not all(isinstance(group.get(PARAMETERS), list) for group in groups):
            return groups
        named = {name for group in groups for name in group[PARAMETERS]}
        left = [name for name in self.state.optimizer if name not in named]
        if not left:
            return groups
        self.notes.append(
            f"{count_text(len(left), 'parameter')} (first: {left[0]}) are in no group of the "
            "source: they become one more, with the hyper-parameters of the first"
        )
        # Leave out these marks, so that Megatron's writer divides the group by weight decay.
        marks = ("wd_mult", "pre_wd_mult") if self.style.has_group_steps else ()
        hyper = {key: value for key, value in groups[0].items() if key not in marks}
        return [*groups, {**hyper, PARAMETERS: left}]

    def _add_hyper(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Complete groups with the hyper-parameters that PyTorch's optimizers require."""
        completed = [complete_group(group, self._keys_of(group)) for group in groups]
        added = {
            key: complete[key]
            for group, complete in zip(groups, completed, strict=True)
            for key in _HYPER
            if key in complete and key not in group
        }
        if added:
            shown = ", ".join(f"{key} {value}" for key, value in added.items())
            self.notes.append(
                f"groups of the source have no {', '.join(added)}: those of the target have "
                f"PyTorch's defaults ({shown})"
            )
        return completed

    def _keys_of(self, group: Mapping[str, Any]) -> Iterable[str]:
        """Return the keys of the state of a group's parameters; of all if it does not list any."""
        state = self.state.optimizer
        named = [n for n in group.get(PARAMETERS) or () if isinstance(n, str) and n in state]
        return {key for name in named for key in state[name]} or self.state.keys

    def _read_injected(self) -> list[dict[str, Any]]:
        """Return hyper-parameters that Optax keeps as tensors (`inject_hyperparams`)."""
        if self.style.groups is None:
            return []
        by_place: dict[tuple[str | int, ...], dict[str, Any]] = {}
        for name in self.state.others:
            path = self.old.paths.get(name, ())
            key = INJECTED.get(str(path[-1])) if path[-2:-1] == ("hyperparams",) else None
            if key is not None and not self.old.tensors[name].shape:
                by_place.setdefault(path[:-2], {})[key] = self._read_scalar(self.old.tensors[name])
                self.injected.add(name)
        groups = []
        for place, hyper in by_place.items():
            of_place = [
                parameter
                for parameter, state in self.state.optimizer.items()
                if any(self.old.paths.get(n, ())[: len(place)] == place for n in state.values())
            ]
            betas = [hyper.pop(key, None) for key in ("beta1", "beta2")]
            if None not in betas:
                hyper["betas"] = tuple(betas)
            groups.append({**hyper, PARAMETERS: of_place})
        return groups

    def _number_parameters(self, groups: list[dict[str, Any]]) -> dict[str, str]:
        """Return the names of parameters in optimizer state that differ from their own."""
        if not self.style.are_numbered:
            return {}
        if not self.state.optimizer:
            # The parameters of numbered state are unknown, so groups keep the source's numbers.
            return {}
        for group in groups:
            own = group.get(PARAMETERS)
            group[PARAMETERS] = own = [part for part in own or () if type(part) is str]
        order = dict.fromkeys(name for group in groups for name in group[PARAMETERS])
        left = [name for name in self.state.optimizer if name not in order]
        if left:
            # Groups may not list their parameters.
            self.notes.append(
                f"{count_text(len(left), 'parameter')} (first: {left[0]}) are in no group of the "
                "source, and in the last one of the target"
            )
            groups[-1][PARAMETERS] += left
        numbers = {name: number for number, name in enumerate((*order, *left))}
        for group in groups:
            group[PARAMETERS] = [numbers[name] for name in group[PARAMETERS]]
        return {name: str(number) for name, number in numbers.items()}

    def _add(
        self, name: str, tensor: StoredTensor, path: tuple[str | int, ...] | None = None
    ) -> None:
        """Add a tensor of the source by another name."""
        self.sources[tensor.name] += 1
        self.tensors[name] = tensor.replace(name=name)
        if path is not None:
            self.paths[name] = path

    def _add_cast(self, name: str, tensor: StoredTensor) -> None:
        self._add(name, tensor)
        self.tensors[name] = self.tensors[name].replace(dtype=_FLOAT32, digest=None)
        self.computed[name] = CastTensor(tensor, _FLOAT32)
        # The inputs of a computation may be read several times, or in part.
        self.sources[tensor.name] += 1

    def _add_weights(self) -> None:
        """Translate weights, and 32-bit weights if the target has them."""
        style, replaced, widened = self.style, list[str](), list[str]()
        for bare, called in self.state.weights.items():
            weight = self.old.tensors[called]
            state = self.state.optimizer.get(bare)
            stored = None if state is None else state.get(MASTER)
            master = None if stored is None else self.old.tensors[stored]
            name, path = style.weight_name(bare), style.weight_path(bare)
            # The 32-bit weight is the more exact copy of the weight.
            if master is not None and not style.has_masters:
                self._add(name, master, path)
                replaced += [] if weight.dtype is master.dtype else [bare]
                continue
            self._add(name, weight, path)
            if not style.has_masters or state is None:
                continue
            master_name = style.state_name(bare, MASTER)
            if master is not None:
                self._add(master_name, master)
            elif weight.dtype is _FLOAT32 or not is_castable(weight.dtype):
                self._add(master_name, weight)
            else:
                self._add_cast(master_name, weight)
                widened.append(bare)
        for bare, state in self.state.optimizer.items():
            # ZeRO-3 stores 32-bit weights only.
            if MASTER in state and bare not in self.state.weights:
                name, path = style.weight_name(bare), style.weight_path(bare)
                self._add(name, self.old.tensors[state[MASTER]], path)
                if style.has_masters:
                    self._add(style.state_name(bare, MASTER), self.old.tensors[state[MASTER]])
                replaced.append(bare)
        if replaced:
            self.notes.append(
                f"the 32-bit weights of {count_text(len(replaced), 'parameter')} (first: "
                f"{replaced[0]}) are the weights of the target"
            )
        if widened:
            self.notes.append(
                f"{count_text(len(widened), 'parameter')} (first: {widened[0]}) have no 32-bit "
                "weights in the source: those of the target are made of narrower ones, exactly"
            )

    def _add_state(self) -> None:
        """Translate the optimizer state of each parameter, except masters and steps."""
        keys = self.style.keys
        foreign = [
            key
            for key in self.state.keys
            if keys is not None and key not in keys and key not in (MASTER, STEP)
        ]
        if foreign:
            self.notes.append(
                f"no optimizer of {self.style.program} keeps {', '.join(foreign)}: "
                "tensors of it have its name in the target, where nothing asks for them"
            )
        for bare, state in self.state.optimizer.items():
            for key, called in state.items():
                if key in (MASTER, STEP):
                    continue
                target_name = self.numbers.get(bare, bare)
                path = self.style.state_path(target_name, key)
                self._add(self.style.state_name(target_name, key), self.old.tensors[called], path)

    def _add_steps(self, groups: Sequence[dict[str, Any]]) -> None:
        """Translate the number of steps of each parameter."""
        stored = {p: state[STEP] for p, state in self.state.optimizer.items() if STEP in state}
        numbers = self._find_numbers(groups)
        missing, kind = [], dtype(self.style.step_type)
        counted = self._list_counted()
        if self.style.has_one_step and counted:
            number = self._find_one_number(counted, stored, numbers)
            numbers, stored = {} if number is None else dict.fromkeys(counted, number), {}
        for bare in counted:
            target_name = self.numbers.get(bare, bare)
            name, path = (
                self.style.state_name(target_name, STEP),
                self.style.state_path(target_name, STEP),
            )
            tensor = self.old.tensors[stored[bare]] if bare in stored else None
            if tensor is not None and not tensor.shape and tensor.dtype is kind:
                self._add(name, tensor, path)
            elif tensor is not None or bare in numbers:
                number = self._read_number(tensor) if tensor is not None else numbers[bare]
                self._add_number(name, number, kind)
                if path is not None:
                    self.paths[name] = path
            else:
                missing.append(bare)
        if missing and {*self.state.keys} - _KEYS_WITHOUT_STEPS:
            self.notes.append(
                f"the source has no number of steps for {count_text(len(missing), 'parameter')} "
                f"(first: {missing[0]}); an optimizer that wants one (PyTorch's RMSprop, Adagrad, "
                "Adadelta and Adam do) cannot go on before its state is given one"
            )
        if self.style.has_group_steps:
            for group in groups:
                names, whose = group.get(PARAMETERS) or (), "parameters of one group"
                number = self._find_one_number(names, stored, numbers, whose)
                if number is not None:
                    group[STEP] = round(number)

    def _list_counted(self) -> list[str]:
        """Return the parameters that have a number of steps in the target."""
        keys = self.style.step_keys
        state = self.state.optimizer
        result = [bare for bare, entries in state.items() if keys is None or keys & entries.keys()]
        left = [bare for bare in state if STEP in state[bare]] if not result else []
        if left:
            self.notes.append(
                f"not in the target: the number of steps of {count_text(len(left), 'parameter')} "
                f"(first: {left[0]}), since {self.style.program} counts none for such state"
            )
        return result

    def _find_one_number(
        self,
        names: Iterable[str],
        stored: Mapping[str, str],
        numbers: Mapping[str, float],
        whose: str = "parameters",
    ) -> float | None:
        """Return the number of steps that most of the named parameters have, or None."""
        counts: Counter[float] = Counter()
        for name in names:
            if name in stored:
                counts[self._read_number(self.old.tensors[stored[name]])] += 1
            elif name in numbers:
                counts[numbers[name]] += 1
        if not counts:
            return None
        ((number, times), *others) = counts.most_common()
        if others:
            self.notes.append(
                f"{whose} have {len(counts)} numbers of steps, and the target one for all: "
                f"{number:.0f}, which {times} of them have"
            )
        return number

    def _find_numbers(self, groups: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Return the steps that are plain values, of parameters or of groups."""
        result: dict[str, float] = {}
        for group in groups:
            number = group.get(STEP)
            # bool is a subclass of int.
            if isinstance(number, int | float) and not isinstance(number, bool):
                result |= {p: float(number) for p in group.get(PARAMETERS, ()) if type(p) is str}
        for container in self.state.containers:
            prefix = f"{container}.state." if container else "state."
            for name in [n for n in self.values if n.startswith(prefix) and n.endswith(".step")]:
                if type(self.values[name]) in (int, float):
                    result[name[len(prefix) : -len(".step")]] = self.values.pop(name)
        distinct = {*result.values()}
        if len(distinct) == 1:
            # There is a single number of steps, so parameters in unknown groups have it too.
            result = {**dict.fromkeys(self.state.optimizer, distinct.pop()), **result}
        return result

    def _read_scalar(self, tensor: StoredTensor) -> float | None:
        """Return the first element, or None for a tensor without elements."""
        reader = BlockReader(tensor, self.files)
        workspace = reader.workspace_size().new_workspace()
        try:
            content = bytes(reader.read_block(0, workspace))
        finally:
            workspace.close()
        if not content:
            return None
        if tensor.dtype.name == "bfloat16":
            return float(as_float32(np.frombuffer(content, np.uint16)[:1], tensor.dtype)[0])
        return float(np.frombuffer(content, tensor.dtype.numpy)[0])

    def _read_number(self, tensor: StoredTensor) -> float:
        scalar = self._read_scalar(tensor)
        number = -1.0 if scalar is None else scalar
        if not 0 <= number < MAX_STEPS:
            raise FormatError(
                f"{tensor.name!r} in {self.old.folder} should be a number of steps, and is "
                f"{number}; expected one from 0 to {MAX_STEPS - 1}. Leave it out with --exclude, "
                "or save again"
            )
        return number

    def _add_number(self, name: str, number: float, kind: DType) -> None:
        """Add a scalar. Planning needs a location, so bind it to bytes of another tensor."""
        first = next(iter(self.old.tensors.values()))
        slot = first.stored_slots[0]
        whole = Layout.whole((), [0], 1)
        self.computed[name] = ConstantTensor(kind, number)
        self.tensors[name] = StoredTensor(
            name, kind, Binding(whole, {0: first.file_range(slot)}, {})
        )

    def _add_groups(self, groups: list[dict[str, Any]]) -> None:
        """Translate the hyper-parameters."""
        style = self.style
        if not groups:
            if style.groups is not None:
                self.notes.append(
                    "the source has no groups of hyper-parameters (learning rate, betas, weight "
                    "decay): the program that goes on has to set them"
                )
            return
        if style.groups is None:
            names = ", ".join(dict.fromkeys(key for group in groups for key in group))
            self.notes.append(
                f"not in the target, since {style.name} has no groups of hyper-parameters: {names}"
            )
            return
        words = tuple(style.groups.split("."))
        if style.has_group_steps:
            decays = [group.get("weight_decay", 0) for group in groups]
            # Megatron distinguishes groups with and without weight decay by `wd_mult`.
            for group in groups if any(decays) and not all(decays) else ():
                group.setdefault("wd_mult", 1.0 if group.get("weight_decay", 0) else 0.0)
        if not style.are_groups_apart:
            self.values[style.groups] = groups
            self.paths[style.groups] = words
            return
        for number, group in enumerate(groups):
            for key, value in group.items():
                name = f"{style.groups}.{number}.{key}"
                self.values[name] = value
                self.paths[name] = (*words, number, key)
