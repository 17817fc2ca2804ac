"""The nested values of new files of DeepSpeed's: what is no tensor, in DeepSpeed's classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from reshard.checkpoint.formats.deepspeed.arrangements.training_parts import (
    CONFIG,
    TrainingParts,
)
from reshard.checkpoint.formats.deepspeed.parallel.experts import list_layers
from reshard.checkpoint.formats.deepspeed.values import SCALER_CLASS
from reshard.checkpoint.formats.torch_files.building import NewTensor
from reshard.checkpoint.formats.torch_files.nested_states import (
    StatePath,
    settle_paths,
    unflatten_state,
)
from reshard.checkpoint.formats.torch_files.optimizer_states import GROUPS
from reshard.checkpoint.formats.torch_files.pickles import Call, Global
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError

VERSION = "0.19.8"
_OPTIMIZER = "optimizer."
_SCALER = "loss_scaler"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
# Values that say how a source was cut, or what its reader added.
_OWN_VALUES = frozenset({"shared_params", "buffer_names", "frozen_params", GROUPS})
_CURRENT_SCALE = "cur_scale"
# What DeepSpeed's dynamic loss scaler begins with.
_NEW_SCALER: dict[str, Any] = {
    "cur_scale": 2.0**16,
    "dynamic": True,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 1,
    "cur_hysteresis": 1,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dtype": "torch.float16",
}

# What a file of weights has before a first step.
_FIRST: Mapping[str, Any] = {
    "lr_scheduler": None,
    "data_sampler": None,
    "random_ltd": None,
    "skipped_steps": 0,
    "global_steps": 0,
    "global_samples": 0,
}
_STAGE = f"{CONFIG}.zero_optimization.stage"
# The loss scaler of an optimizer that scales nothing.
_NO_SCALER: Mapping[str, Any] = {
    "optimizer.loss_scaler.class": "LossScaler",
    "optimizer.loss_scaler.cur_scale": 1.0,
    "optimizer.loss_scaler.dynamic": False,
    "optimizer.dynamic_loss_scale": False,
    "optimizer.overflow": False,
}


def is_own_value(name: str, value: Any) -> bool:
    """Whether a plain value is DeepSpeed's own: of the stage, or what files have by default.

    >>> is_own_value("global_steps", 0), is_own_value("global_steps", 7)
    (True, False)
    >>> is_own_value("ds_config.zero_optimization.stage", 3)
    True
    """
    defaults = {**_FIRST, **_NO_SCALER}
    is_default = name in defaults and repr(value) == repr(defaults[name])
    return is_default or name in (_STAGE, "ds_version") or name.split(".")[0] == "buffer_names"


def ordered(items: Mapping[str, Any]) -> Call:
    """An ordered dict."""
    return Call(Global("collections", "OrderedDict"), (), items=dict(items))


def size(shape: Iterable[int]) -> Call:
    """A `torch.Size`."""
    return Call(Global("torch", "Size"), (tuple(shape),))


def stage_member(stage: int) -> Call:
    """DeepSpeed's name for a stage of ZeRO."""
    return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def fragment(elements: int, start: int) -> Call:
    """Where a parameter's part lies in a flat partition."""
    address = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return Call(address, (elements, start), is_new=True)


class NewValues:
    """The values of a new checkpoint, nested again.

    Args:
        values, paths: those of the source.
        low: the type that the model computes with.
    """

    def __init__(
        self, values: Mapping[str, Any], paths: Mapping[str, StatePath], low: DType
    ) -> None:
        own = {n: v for n, v in values.items() if n not in _OWN_VALUES}
        self._optimizer = {
            name.removeprefix(_OPTIMIZER): value
            for name, value in own.items()
            if name.startswith(_OPTIMIZER)
        }
        self._rest = {n: v for n, v in own.items() if not n.startswith(_OPTIMIZER)}
        self._paths = {name: path for name, path in paths.items() if name in self._rest}
        self.low = low

    @property
    def steps(self) -> int:
        """The number of steps, 0 where it is not known."""
        found = self._rest.get("global_steps")
        return found if type(found) is int and found >= 0 else 0

    def describe_missing(self) -> list[str]:
        """Describe the counters and the scheduler of DeepSpeed that the source does not have."""
        notes = []
        if "global_steps" not in self._rest:
            notes.append(
                "the source has no global_steps: DeepSpeed counts from 0, for names of saves and "
                "its logs; optimizers have steps of their own"
            )
        if all(name.partition(".")[0] != "lr_scheduler" for name in self._rest):
            notes.append(
                "the source has no state of a learning rate scheduler of DeepSpeed: an engine that "
                "has a scheduler loads this with load_lr_scheduler_states=False"
            )
        return notes

    @property
    def zero(self) -> Mapping[str, Any]:
        """The configuration of ZeRO, as far as the source says."""
        prefix = f"{CONFIG}.zero_optimization."
        return {n.removeprefix(prefix): v for n, v in self._rest.items() if n.startswith(prefix)}

    @property
    def is_data_first(self) -> bool:
        """Whether ranks with the same experts have numbers one behind the other."""
        return self._rest.get(f"{CONFIG}.use_data_before_expert_parallelism") is True

    def model_state(
        self,
        parts: TrainingParts,
        stage: int,
        ranks: int,
        groups: Iterable[Iterable[str]],
        module: Mapping[str, NewTensor],
        fragments: Mapping[str, NewTensor] | None,
        others: Mapping[str, NewTensor],
        paths: Mapping[str, StatePath],
    ) -> dict[str, Any]:
        """A file of weights; `groups` are the names of parameters in the order of flat buffers."""
        leaves = {**self._rest, **others}
        prefix = f"{CONFIG}."
        # Names without a path are read as paths where DeepSpeed wants dicts.
        found: dict[str, StatePath] = {
            name: tuple(name.split("."))
            for name in leaves
            if name.startswith((prefix, "lr_scheduler."))
        }
        found |= {name: path for name, path in {**self._paths, **paths}.items() if name in leaves}
        nested = unflatten_state(leaves, settle_paths(leaves, found))
        experts = list_layers(parts.experts)
        config = nested.get(CONFIG)
        config = dict(config) if isinstance(config, dict) else {}
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
        return {
            "module": ordered(module),
            "buffer_names": [*parts.buffers],
            "optimizer": None,
            "param_shapes": [
                ordered({name: size(parts.shapes[name]) for name in names}) for names in groups
            ],
            "frozen_param_shapes": (
                ordered({name: size(shape) for name, shape in parts.frozen.items()})
                if fragments is not None
                else None
            ),
            "shared_params": dict(parts.shared),
            "frozen_param_fragments": ordered(fragments) if fragments is not None else None,
            **_FIRST,
            "ds_version": VERSION,
            **({"num_experts": [*map(len, experts.values())]} if experts else {}),
            **nested,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            CONFIG: config,
        }

    def held(self, values: Mapping[str, Any], *, with_clipping: bool) -> dict[str, Any]:
        """Those of the values of a checkpoint that its new files have a place for."""
        has_scaler = any(name.startswith(f"{_SCALER}.") for name in self._optimizer)
        known = {"dynamic_loss_scale", "overflow", *(["clip_grad"] if with_clipping else [])}
        if not has_scaler and _CURRENT_SCALE in self._optimizer:
            known |= {*_NEW_SCALER}
        unheld = {
            f"{_OPTIMIZER}{name}"
            for name in self._optimizer
            if name not in known and not name.startswith((f"{_SCALER}.", "state."))
        }
        return {name: value for name, value in values.items() if name not in unheld}

    def optimizer_state(self, *, with_clipping: bool) -> dict[str, Any]:
        """The values of an optimizer: its loss scaler, and what else there is."""
        scaler = {
            name.removeprefix(f"{_SCALER}."): value
            for name, value in self._optimizer.items()
            if name.startswith(f"{_SCALER}.")
        }
        if not scaler and _CURRENT_SCALE in self._optimizer:
            # Optimizers without partitions have these beside the rest of their state.
            own = {key: self._optimizer[key] for key in _NEW_SCALER if key in self._optimizer}
            is_dynamic = bool(self._optimizer.get("dynamic_loss_scale", True))
            first = _NEW_SCALER if is_dynamic else {}
            scaler = {**first, **own, "dynamic": is_dynamic}
        is_half = self.low.name == "float16"
        if not scaler:
            scaler = dict(_NEW_SCALER) if is_half else {"cur_scale": 1.0, "dynamic": False}
        kind = scaler.pop(SCALER_CLASS, None)
        if kind not in ("LossScaler", "DynamicLossScaler"):
            kind = "DynamicLossScaler" if scaler.get("dynamic") else "LossScaler"
        if isinstance(scaler.get("dtype"), str):
            scaler["dtype"] = _as_type(scaler["dtype"], self.low)
        found = {
            _SCALER: Call(Global(_SCALERS, kind), (), scaler, is_new=True),
            "dynamic_loss_scale": self._optimizer.get("dynamic_loss_scale", kind != "LossScaler"),
            "overflow": bool(self._optimizer.get("overflow", False)),
        }
        if with_clipping and "clip_grad" in self._optimizer:
            found["clip_grad"] = self._optimizer["clip_grad"]
        return found


def _as_type(name: str, otherwise: DType) -> DType:
    try:
        return as_dtype(name.rpartition(".")[2])
    except ReshardError:
        return otherwise
