"""Adapters of PEFT that are merged into the checkpoint of their base.

    convert BASE OUT --adapter A --adapter B         W + A's change, then B's

1. An adapter is a folder with `adapter_config.json` and its tensors, in any format that is read.
2. Matrices A and B change the weight that their names begin with (`merged`); a tensor that was
   trained whole (`modules_to_save`) takes the place of the base's, in its type.
3. What would not give the weights that PEFT computes, is refused by name: other kinds of adapters,
   and those whose initialisation has changed the base.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.binding import Binding, FileRange
from reshard.checkpoint.changes.casts import CastTensor
from reshard.checkpoint.changes.computed import ComputedTensor
from reshard.checkpoint.changes.merged import LowRankChange, MergedBias, MergedWeight
from reshard.checkpoint.contents import Checkpoint, StoredTensor
from reshard.checkpoint.formats.opening import open_checkpoint, read_adapter_config
from reshard.elements import is_castable
from reshard.errors import UsageError
from reshard.recipes.adapters import LowRankAdapters
from reshard.text import count_text

_MERGED_TYPES = ("float32", "bfloat16", "float16")
# What PEFT saves of a module that it has wrapped, beside the change.
_BASE_LAYER = ".base_layer."
# Initialisations that change the base; the others only choose A and B.
_BASE_CHANGING = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Settings under which PEFT's merge is another sum, or none.
_UNKNOWN_SETTINGS = (
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
    "velora_config",
)


@dataclass
class _Merge:
    """A merge under way: the changes of each tensor of the base, in the order of the adapters."""

    base: Checkpoint
    weights: dict[str, list[LowRankChange]] = field(default_factory=dict)
    bases: dict[str, StoredTensor] = field(default_factory=dict)
    biases: dict[str, list[tuple[StoredTensor, float]]] = field(default_factory=dict)
    replaced: dict[str, StoredTensor] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    adapters: list[Checkpoint] = field(default_factory=list)

    def add(self, path: str | os.PathLike[str]) -> None:
        """Add an adapter. Raises UsageError for one that is not merged, by name."""
        checkpoint = open_checkpoint(path)
        config = read_adapter_config(checkpoint)
        if config is None:
            raise UsageError(
                f"the adapter {os.fspath(path)} has no adapter_config.json beside its tensors; "
                "give the folder that PEFT saved"
            )
        self._check_config(checkpoint, config)
        tensors = {
            name: _in_any_folder(checkpoint, tensor) for name, tensor in checkpoint.tensors.items()
        }
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        found = LowRankAdapters(shapes, {"adapter_config": config})
        saved = {name for name in tensors if _BASE_LAYER in name}
        for name in sorted(saved):
            self._take_base(checkpoint, found.base_name(name), tensors[name])
        for weight, members in found.members.items():
            self._add_matrices(checkpoint, config, weight, members, tensors)
        inside = saved | {n for members in found.members.values() for n in members.values()}
        for name, tensor in tensors.items():
            if name not in inside:
                if ".lora_" in name or "trainable_tokens" in name:
                    raise UsageError(
                        f"{checkpoint.folder} has {name!r}, a kind of change that is not merged "
                        "here; merge it with PEFT"
                    )
                self._replace(found.base_name(name), tensor)
        self.adapters.append(checkpoint)

    def _check_config(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        kind = config.get("peft_type")
        if kind != "LORA":
            raise UsageError(
                f"{checkpoint.folder} is an adapter of the type {kind!r}; LORA is merged here, the "
                "others by PEFT"
            )
        for key in _UNKNOWN_SETTINGS:
            if config.get(key):
                raise UsageError(
                    f"{checkpoint.folder} has {key} in adapter_config.json, with which a change is "
                    "another than scale * B @ A; merge it with PEFT"
                )
        how = str(config.get("init_lora_weights", True)).lower()
        if how.startswith(_BASE_CHANGING):
            raise UsageError(
                f"{checkpoint.folder} was initialised by {how!r}, which changes the base as well; "
                "save it with PEFT's path_initial_model_for_weight_conversion, or merge it with "
                "PEFT"
            )

    def _add_matrices(
        self,
        checkpoint: Checkpoint,
        config: Mapping[str, Any],
        weight: str,
        members: Mapping[str, str],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        """Add the change of one weight."""
        kind = "embedding " if "embedding A" in members else ""
        a, b = tensors[members[f"{kind}A"]], tensors[members[f"{kind}B"]]
        for one in (a, b):
            if not is_castable(one.dtype) or one.dtype.name == "float64":
                raise UsageError(
                    f"{one.name!r} of {checkpoint.folder} is of {one.dtype.name}; adapters of "
                    f"{', '.join(_MERGED_TYPES)} are merged"
                )
        name = self._find_base(checkpoint, weight)
        base = self.base.tensors[name]
        if base.dtype.name not in _MERGED_TYPES:
            raise UsageError(
                f"{name!r}, which {checkpoint.folder} changes, is of {base.dtype.name}; a change "
                f"is merged into {', '.join(_MERGED_TYPES)}: --dequantize it first"
            )
        is_swapped = _find_orientation(base, a, b, config, is_embedding=bool(kind))
        if is_swapped is None:
            raise UsageError(
                f"{members[f'{kind}A']!r} of shape {list(a.shape)} and its B of shape "
                f"{list(b.shape)} do not change a weight of shape {list(base.shape)}, which "
                f"{name!r} has; is it the adapter of another model?"
            )
        magnitude = tensors[members["vector"]] if "vector" in members else None
        if bool(config.get("use_dora")) != (magnitude is not None):
            raise UsageError(
                f"{checkpoint.folder} has {'a' if magnitude else 'no'} magnitude of {name!r}, "
                f"where its config says use_dora={bool(config.get('use_dora'))}; it is not whole"
            )
        module = weight.removesuffix(".weight")
        scale = _find_scale(config, module, a.shape[0], checkpoint.folder)
        change = LowRankChange(a, b, scale, is_swapped, magnitude, is_rounded=bool(kind))
        self.weights.setdefault(name, []).append(change)
        if "bias" in members:
            bias = self._find_base(checkpoint, f"{module}.bias")
            self.biases.setdefault(bias, []).append((tensors[members["bias"]], scale))

    def _find_base(self, checkpoint: Checkpoint, name: str) -> str:
        """The tensor of the base that an adapter means."""
        found = self._look_up(name)
        if found is not None:
            return found
        raise UsageError(
            f"{checkpoint.folder} changes {name!r}, which {self.base.folder} does not have; is it "
            "the adapter of another model?"
        )

    def _look_up(self, name: str) -> str | None:
        """The name in the base, whose model may have a word less; None where there is none."""
        candidates = (name, f"model.{name}", name.removeprefix("model."))
        return next((one for one in candidates if one in self.base.tensors), None)

    def _take_base(self, checkpoint: Checkpoint, name: str, tensor: StoredTensor) -> None:
        """Take a weight that was saved beside its change, as PEFT does embeddings, for the base's.

        What adapters before it made of the base's is gone then, as it is with PEFT.
        """
        found = self._find_base(checkpoint, name)
        base = self.base.tensors[found]
        if (base.shape, base.dtype) != (tensor.shape, tensor.dtype):
            raise UsageError(
                f"{tensor.name!r} of {checkpoint.folder} is {tensor.dtype.name} "
                f"{list(tensor.shape)} and stands for {found!r}, which is {base.dtype.name} "
                f"{list(base.shape)}; is it the adapter of another model?"
            )
        self.bases[found] = tensor
        self.weights.pop(found, None)

    def _replace(self, name: str, tensor: StoredTensor) -> None:
        found = self._look_up(name)
        if found is None:
            self.added.append(name)
            self.replaced[name] = tensor
            return
        base = self.base.tensors[found]
        if base.shape != tensor.shape:
            raise UsageError(
                f"{tensor.name!r} of shape {list(tensor.shape)} stands for {found!r} of shape "
                f"{list(base.shape)}; is it the adapter of another model?"
            )
        if base.dtype is not tensor.dtype and not (
            is_castable(base.dtype) and is_castable(tensor.dtype)
        ):
            raise UsageError(
                f"{tensor.name!r} is of {tensor.dtype.name} and stands for {found!r} of "
                f"{base.dtype.name}, to which it is not cast"
            )
        self.replaced[found] = tensor


def merge_adapters(
    checkpoint: Checkpoint, paths: Iterable[str | os.PathLike[str]]
) -> tuple[Checkpoint, dict[str, ComputedTensor]]:
    """A checkpoint with adapters merged into it, one after another.

    Args:
        checkpoint: the base.
        paths: of the adapters: folders with `adapter_config.json`.

    Returns:
        The checkpoint as it will be, and the tensors of it that are computed, by name.

    Raises:
        UsageError: what is no adapter of this base, or is not merged here.
        CheckpointError: an adapter that cannot be read.
    """
    merge = _Merge(checkpoint)
    for path in paths:
        merge.add(path)
    if not merge.adapters:
        return checkpoint, {}
    computed: dict[str, ComputedTensor] = {}
    tensors = dict(checkpoint.tensors)
    for name, tensor in merge.replaced.items():
        base = checkpoint.tensors.get(name)
        if base is None or base.dtype is tensor.dtype:
            tensors[name] = dataclasses.replace(tensor, name=name, digest=None)
        else:
            computed[name] = CastTensor(tensor, base.dtype)
    for name, changes in merge.weights.items():
        if name in merge.replaced:
            raise UsageError(f"{name!r} is changed by one adapter and replaced by another")
        weight = merge.bases.pop(name, checkpoint.tensors[name])
        computed[name] = MergedWeight(weight, tuple(changes))
    for name, tensor in merge.bases.items():
        tensors[name] = dataclasses.replace(tensor, name=name, digest=None)
    for name, sums in merge.biases.items():
        computed[name] = MergedBias(checkpoint.tensors[name], tuple(sums))
    for name, made in computed.items():
        base = checkpoint.tensors[name]
        tensors[name] = StoredTensor(name, made.dtype, base.binding, base.spec)
    return _finish(merge, tensors, computed), computed


def _finish(
    merge: _Merge, tensors: dict[str, StoredTensor], computed: Mapping[str, ComputedTensor]
) -> Checkpoint:
    """The base with other tensors, and with the files of the adapters beside its own."""
    base = merge.base
    files, identities = list(base.files), dict(base.identities)
    for adapter in merge.adapters:
        for file in adapter.files:
            name = os.fspath(adapter.path(file.name).resolve())
            if name not in identities:
                files.append(dataclasses.replace(file, name=name, rank=0))
                identities[name] = adapter.identities[file.name]
    read = {one.name for made in computed.values() for one in made.sources}
    notes = [
        f"{count_text(len(merge.weights), 'weight')} have the changes of "
        f"{count_text(len(merge.adapters), 'adapter')} merged in"
    ]
    if merge.replaced:
        notes.append(
            "trained whole, and taken in the place of the base's: "
            f"{count_text(len(merge.replaced), 'tensor')} (first: {next(iter(merge.replaced))})"
        )
    if merge.added:
        notes.append(f"not in the base, and added from an adapter: {', '.join(merge.added[:5])}")
    checksums = (
        dataclasses.replace(one, is_read_once=one.is_read_once and one.tensor not in read)
        for one in base.checksums
    )
    return dataclasses.replace(
        base,
        tensors=tensors,
        files=tuple(files),
        identities=identities,
        checksums=tuple(one for one in checksums if one.tensor not in merge.replaced),
        notes=(*base.notes, *notes),
    )


def _in_any_folder(checkpoint: Checkpoint, tensor: StoredTensor) -> StoredTensor:
    """A tensor that is bound to whole paths, so that it can be read beside another checkpoint."""
    if checkpoint.derived:
        raise UsageError(
            f"the adapter {checkpoint.folder} is compressed; convert it first (--to full)"
        )

    def whole(place: Any) -> FileRange:
        path = os.fspath(checkpoint.path(place.path).resolve())
        return FileRange(path, place.start_bytes)

    binding = tensor.binding
    addresses = {
        slot: tuple(map(whole, place)) if isinstance(place, tuple) else whole(place)
        for slot, place in binding.addresses.items()
    }
    return dataclasses.replace(
        tensor, binding=Binding(binding.layout, addresses, binding.views), spec=None
    )


def _find_orientation(
    base: StoredTensor,
    a: StoredTensor,
    b: StoredTensor,
    config: Mapping[str, Any],
    *,
    is_embedding: bool,
) -> bool | None:
    """Whether a weight has its inputs first; None where the matrices do not fit it at all."""
    if any(size != 1 for size in b.shape[2:]):
        return None
    plain = base.shape == (b.shape[0], *a.shape[1:])
    swapped = len(a.shape) == 2 and base.shape == (a.shape[1], b.shape[0])
    if is_embedding:
        return True if swapped else None
    if plain and swapped:
        return bool(config.get("fan_in_fan_out"))
    return swapped if plain or swapped else None


def _find_scale(config: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """The scale of the change of a module."""
    numbers = []
    for what, default in (("r", 8), ("lora_alpha", 8)):
        patterns = config.get("rank_pattern" if what == "r" else "alpha_pattern") or {}
        key = _find_pattern(patterns, module) if isinstance(patterns, Mapping) else None
        number = config.get(what, default) if key is None else patterns[key]
        if type(number) not in (int, float) or not math.isfinite(number):
            raise UsageError(f"{folder}: {what} of {module!r} is {number!r}, expected a number")
        numbers.append(number)
    if numbers[0] != rank:
        raise UsageError(
            f"{folder}: the matrices of {module!r} are of rank {rank}, its config says "
            f"{numbers[0]}; they belong to different saves"
        )
    return float(numbers[1] / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _find_pattern(patterns: Mapping[str, Any], module: str) -> str | None:
    """The first pattern that a module's name ends with, as PEFT looks for it."""
    for key in patterns:
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return key
        except re.error:
            continue
    return None
