"""What DeepSpeed saves beside tensors: a user's state, schedulers, counters, loss scalers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reshard.checkpoint.formats.deepspeed.saved_states import ModelState
from reshard.checkpoint.formats.torch_files.nested_states import StatePath, flatten_state
from reshard.checkpoint.formats.torch_files.pickles import Call
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor

AddTensor = Callable[[str, str, ArchivedTensor], None]
_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
#: The part of a loss scaler that says its class.
SCALER_CLASS = "class"


class SavedValues:
    """The values of one checkpoint, where they stood, and what is not read."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.paths: dict[str, StatePath] = {}
        self.unread: list[tuple[str, str]] = []

    def add(self, name: str, value: Any, path: StatePath, file: str) -> None:
        """Add one value, where it is plain."""
        flat = flatten_state([value], file)
        if flat.unread:
            self.unread.append((name, next(iter(flat.unread.values()))))
            return
        self.values.setdefault(name, value)
        if path:
            self.paths.setdefault(name, path)

    def add_state(
        self, state: Mapping[str, Any], prefix: StatePath, file: str, add_tensor: AddTensor
    ) -> None:
        """Add the values and tensors of a nested state behind `prefix`."""
        flat = flatten_state(_plain_scalers(state), file)
        before = "".join(f"{part}." for part in prefix)
        for name, archived in flat.tensors.items():
            add_tensor(before + name, file, archived)
        for name, value in flat.values.items():
            self.values.setdefault(before + name, value)
        for name, path in flat.paths.items():
            self.paths.setdefault(before + name, (*prefix, *path))
        self.unread += [(before + name, why) for name, why in flat.unread.items()]

    def compare(self, first: Mapping[str, Any], other: Mapping[str, Any], file: str) -> None:
        """List what another rank's file has otherwise than the first one's."""
        one, two = flatten_state(first, file), flatten_state(other, file)
        differing = [
            name
            for name in {**one.values, **two.values}
            if repr(one.values.get(name)) != repr(two.values.get(name))
        ]
        for name in {**one.tensors, **two.tensors}:
            a, b = one.tensors.get(name), two.tensors.get(name)
            if a is None or b is None or a.crc32 is None or a.crc32 != b.crc32:
                differing.append(name)
        self.unread += [
            (f"{name} in {file}", "another than that of rank 0, which is taken")
            for name in differing
        ]


def _plain_scalers(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with loss scalers, which are objects, as dicts of what they hold."""
    found = dict(state)
    for key, value in state.items():
        is_scaler = isinstance(value, Call) and value.function.module == _LOSS_SCALERS
        if is_scaler and isinstance(value.state, dict):
            found[key] = {SCALER_CLASS: value.function.name, **value.state}
    return found


def add_model_values(values: SavedValues, model: ModelState, add_tensor: AddTensor) -> None:
    """Add what a file of weights says beside them."""
    values.add_state(model.rest, (), model.file, add_tensor)
    if model.shared:
        values.add("shared_params", dict(model.shared), (), model.file)
    # Empty too: it tells a user's tensors from buffers when the state is written again.
    if model.module is not None:
        values.add("buffer_names", [*model.buffers], (), model.file)
    frozen = [*model.frozen] or _find_frozen(model)
    if frozen:
        values.add("frozen_params", frozen, (), model.file)


def _find_frozen(model: ModelState) -> list[str]:
    """Parameters that no optimizer has, where the file does not list them."""
    if not model.groups:
        return []
    known = {*model.shapes, *model.buffers, *model.shared}
    return [name for name in model.module or {} if name not in known]
