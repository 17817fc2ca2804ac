"""Planning changes: the tensors that change, how they change, and the new config.json.

1. `dequantize`: every quantised weight becomes a tensor of its values; scales and zero points are
   dropped.
2. `quantize`: the matrices of layers become float8 with scales.
3. `dtype`: all other floating-point tensors are cast, except the tensors of a quantised weight.
   If config.json has a 16-bit type, float32 tensors are not cast either: such a model keeps a
   tensor in float32 because it needs the precision, such as the router biases of DeepSeek-V3.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from reshard._records import Record
from reshard._validation import check_used
from reshard.binding import Binding, FileRange
from reshard.checkpoint.blocks.tensor_columns import TensorColumns, shapes_of, types_of
from reshard.checkpoint.changes.computed_tensors import CastColumns, CastTensor, ComputedTensor
from reshard.checkpoint.changes.quantization import (
    BLOCK,
    DequantizedWeight,
    Float8Weight,
    read_flat_shapes,
)
from reshard.checkpoint.contents import Checkpoint, StoredTensor, read_again
from reshard.dtypes import DType, dtype
from reshard.elements import CAST_TYPES, cast_type, is_castable
from reshard.errors import CheckpointError, RecipeError, UsageError
from reshard.layout import Layout
from reshard.recipes.overrides import UNSCALED
from reshard.recipes.quantization import (
    QuantizedWeight,
    describe_missing_scales,
    find_missing_scales,
    find_quantized,
    list_codes,
    quantization_config,
)
from reshard.text import count_text

# Weights of layers that are matrices: projections, parts of experts, and the names of GPT-NeoX,
# BERT and others. Routers, norms and embeddings are not among them.
_MATRIX = r".*\.(\w*_proj\w*|w[123]|fc[12]?|c_fc|dense\w*|linear\w*|query\w*)\.weight"
# transformers renamed `torch_dtype` to `dtype`.
_DTYPE_KEYS = ("dtype", "torch_dtype")
# Codes are stored as 8-bit integers, or packed into int32, as by GPTQ and AWQ.
_CODE_TYPES = frozenset({"int8", "uint8", "int32"})
# The name in DeepSeek-V3, and of float8 weights in transformers.
_SCALE_SUFFIX = "_scale_inv"
# In addition to config.json, in checkpoints of ModelOpt.
_MODELOPT_CONFIG = "hf_quant_config.json"


class ChangedElements(Record):
    """A checkpoint with other elements.

    Attributes:
        checkpoint: the checkpoint with the new tensors; computed tensors have no stored bytes.
        computed: the computed tensors, by name.
        rewritten: other files with new content.
    """

    checkpoint: Checkpoint
    computed: Mapping[str, ComputedTensor] = field(default_factory=dict)
    rewritten: Mapping[str, bytes] = field(default_factory=dict)


def change_elements(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | None,
    *,
    dtype_name: str | None = None,
    dequantize: bool = False,
    quantize: str | None = None,
    kept: Collection[str] = (),
    made: Mapping[str, ComputedTensor] | None = None,
    allow: Iterable[str] = (),
) -> ChangedElements:
    """Return a checkpoint with the requested changes.

    Args:
        checkpoint: the checkpoint to read.
        config: its config.json.
        dtype_name: the type of floating-point tensors: bf16, fp16 or fp32.
        dequantize: compute the values of quantised weights, in that type or in config.json's.
        quantize: a name in `QUANTIZATIONS`.
        kept: names of optimizer state, which is not changed. The weights of such a checkpoint are
            cast even if config.json has a 16-bit type: training keeps them in 32 bits.
        made: tensors that are computed already, by name, such as merged weights.
        allow: `unscaled` to keep quantised weights without scales unchanged.

    Raises:
        UsageError: an unknown type or quantisation; nothing to dequantise, or values that cannot
            be computed; a checkpoint that is quantised already.
        RecipeError: an unknown method of quantisation; quantised weights without scales.
    """
    if dtype_name is None and not dequantize and quantize is None:
        return ChangedElements(checkpoint, made or {})
    change = _Change(checkpoint, config, dtype_name, kept, made or {})
    change.check_scales(allow)
    return change.make(dequantize, quantize)


def find_unscaled(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | None = None,
    kept: Collection[str] = (),
    *,
    is_quantized: bool = False,
) -> dict[str, str]:
    """Return the name of the missing scale for each quantised weight without a scale.

    Args:
        checkpoint: a checkpoint. Its names and element types are inspected; no bytes are read.
        config: its config.json.
        kept: names of optimizer state.
        is_quantized: whether 8-bit integers are codes, regardless of the config.
    """
    columns = TensorColumns.of(checkpoint.tensors)
    if not _may_have_codes(columns):
        return {}
    types = {name: element.name for name, element in types_of(columns).items() if name not in kept}
    dims = {name: len(shape) for name, shape in shapes_of(columns).items()}
    codes = list_codes(types, dims, is_quantized=is_quantized or bool(quantization_config(config)))
    return find_missing_scales(codes, types)


def check_scales(lacking: Mapping[str, str], folder: Path, allow: Iterable[str]) -> None:
    """Raise RecipeError for quantised weights without scales, unless `allow` has `unscaled`."""
    if lacking and UNSCALED not in allow:
        raise RecipeError(
            f"{describe_missing_scales(lacking, folder)}: their values are unknown. Complete "
            "the checkpoint, leave them out with --exclude, or keep them as they are: "
            f"--allow {UNSCALED}, in Python allow=['{UNSCALED}']"
        )


def _may_have_codes(columns: TensorColumns) -> bool:
    """Return whether there are tensors of an element type of codes."""
    kinds = {kind.dtype.name for kind in columns.kinds}
    return any(name.startswith("float8") or name in _CODE_TYPES for name in kinds)


def note_unscaled(
    checkpoint: Checkpoint, read_config: Callable[[Checkpoint], Mapping[str, Any] | None]
) -> Checkpoint:
    """Return the checkpoint with a note of quantised weights without scales, if there are any.

    Args:
        checkpoint: a checkpoint whose tensors are copied as they are.
        read_config: reads its config.json, called if there are tensors that may be codes. An
            unreadable file is not an error, since the copy does not depend on it, but then 8-bit
            integers may be codes.
    """
    if not _may_have_codes(TensorColumns.of(checkpoint.tensors)):
        return checkpoint
    try:
        config, is_quantized = read_config(checkpoint), False
    except CheckpointError:
        config, is_quantized = None, True
    lacking = find_unscaled(checkpoint, config, is_quantized=is_quantized)
    if not lacking:
        return checkpoint
    note = f"{describe_missing_scales(lacking, checkpoint.folder)}; they are copied as they are"
    return checkpoint.replace(notes=(*checkpoint.notes, note))


class _Change:
    """A change in progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Mapping[str, Any] | None,
        dtype_name: str | None,
        kept: Collection[str],
        made: Mapping[str, ComputedTensor],
    ) -> None:
        self.checkpoint, self.config, self.kept = checkpoint, config, {*kept}
        self.dtype = None if dtype_name is None else cast_type(dtype_name)
        types = types_of(checkpoint.tensors)
        self.weights = find_quantized(
            shapes_of(checkpoint.tensors),
            config,
            {name: element.itemsize_bytes for name, element in types.items()},
            read_flat_shapes(checkpoint),
        )
        self.member_of = {
            member: name for name, weight in self.weights.items() for member in weight.members
        }
        self.computed: dict[str, ComputedTensor] = {**made}
        self.tensors: dict[str, StoredTensor] = {}
        self.notes: list[str] = []
        # The missing scale of each quantised weight without a scale.
        self.lacking: dict[str, str] = {}

    def check_scales(self, allow: Iterable[str]) -> None:
        """Raise RecipeError for tensors of codes without scales."""
        self.lacking = find_unscaled(self.checkpoint, self.config, self.kept)
        types = {name: element.name for name, element in types_of(self.checkpoint.tensors).items()}
        dims = {name: len(shape) for name, shape in shapes_of(self.checkpoint.tensors).items()}
        codes = list_codes(types, dims, is_quantized=bool(self.weights))
        for name in codes:
            if name not in self.member_of and name not in self.kept:
                self.lacking.setdefault(name, "")
        check_scales(self.lacking, self.checkpoint.folder, allow)

    def make(self, dequantize: bool, quantize: str | None) -> ChangedElements:
        if dequantize and not self.weights:
            raise UsageError(
                f"nothing in {self.checkpoint.folder} is quantised, by its names and config.json; "
                "leave --dequantize out"
            )
        if quantize is not None and self.weights:
            name = next(iter(self.weights))
            raise UsageError(
                f"{self.checkpoint.folder} is quantised already: {name!r} is "
                f"{self.weights[name].method}; --dequantize it first"
            )
        is_other = dequantize or quantize is not None
        tensors: Mapping[str, StoredTensor] = self.tensors
        computed: Mapping[str, ComputedTensor] = self.computed
        if is_other or self.weights or self.computed:
            kept_wide = self._change_each(dequantize, quantize is not None)
            is_quantized = any(isinstance(t, Float8Weight) for t in self.computed.values())
            check_used(
                f"quantize={quantize!r}",
                quantize is None or is_quantized,
                f"nothing in {self.checkpoint.folder} is the matrix of a layer, such as "
                "'model.layers.0.mlp.up_proj.weight'",
            )
        else:
            computed, kept_wide = self._cast_all(self._expect_dtype())
            tensors = computed.tensors()
        if kept_wide:
            self.notes.append(
                f"{count_text(len(kept_wide), 'tensor')} in float32 are not cast (first: "
                f"{kept_wide[0]}), since config.json has a 16-bit type: they were kept in float32 "
                "on purpose"
            )
        config = self._make_config(quantize) if is_other else self._make_plain_config()
        return self._finish(config, tensors, computed)

    def _cast_all(self, to: DType) -> tuple[CastColumns, list[str]]:
        """Cast kind by kind; return the casts and the names of tensors kept wide on purpose."""
        stored = TensorColumns.of(self.checkpoint.tensors)
        types = [kind.dtype for kind in stored.kinds]
        may_be = stored.by_kind([self._is_cast(element) for element in types]).astype(bool)
        may_be[stored.rows([name for name in self.kept if name in stored])] = False
        stays = stored.by_kind([self._stays_wide(element) for element in types]).astype(bool)
        kept_wide = list(itertools.compress(stored.names, (may_be & stays).tolist()))
        return CastColumns(stored, may_be & ~stays, to), kept_wide

    def _change_each(self, dequantize: bool, quantize: bool) -> list[str]:
        """Change tensor by tensor, and return the names of tensors kept wide on purpose."""
        kept_wide: list[str] = []
        for name, tensor in self.checkpoint.tensors.items():
            weight = self.weights.get(self.member_of.get(name, ""))
            if weight is not None:
                if not dequantize or {*weight.members} & self.lacking.keys():
                    self.tensors[name] = tensor
                elif weight.name not in self.tensors:
                    self._dequantize(weight)
            elif quantize and _is_matrix(tensor):
                self._quantize(tensor)
            elif name not in self.kept and self._is_cast(tensor.dtype):
                if self._stays_wide(tensor.dtype):
                    kept_wide.append(name)
                    self.tensors[name] = tensor
                else:
                    self._add(name, self._cast(tensor, self._expect_dtype()), tensor.binding)
            else:
                self.tensors[name] = tensor
        return kept_wide

    def _is_cast(self, element: DType) -> bool:
        return self.dtype is not None and is_castable(element) and element is not self.dtype

    def _cast(self, tensor: StoredTensor, to: DType) -> ComputedTensor:
        return CastTensor(self.computed.get(tensor.name, tensor), to)

    def _expect_dtype(self) -> DType:
        if self.dtype is None:
            raise UsageError("no dtype was given: expected bf16, fp16 or fp32")
        return self.dtype

    def _own_dtype(self) -> DType | None:
        """Return the type of the model in config.json, or None."""
        # Configurations of multimodal models have a section for the language model.
        texts = (self.config or {}).get("text_config")
        for section in (self.config or {}, texts if isinstance(texts, Mapping) else {}):
            for key in _DTYPE_KEYS:
                name = str(section.get(key, "")).removeprefix("torch.")
                if name in CAST_TYPES.values():
                    return dtype(name)
        return None

    def _stays_wide(self, element: DType) -> bool:
        own = None if self.kept else self._own_dtype()
        # A float32 tensor in a 16-bit model was kept wide on purpose.
        is_half = own is not None and own.itemsize_bytes == 2
        return is_half and element.name == "float32"

    def _add(self, name: str, computed: ComputedTensor, binding: Binding | None = None) -> None:
        """Add a computed tensor; for planning it is bound to the bytes of its first source."""
        self.computed[name] = computed
        first = computed.sources[0]
        if binding is None or binding.layout.shape != computed.shape:
            place = first.file_range(first.stored_slots[0])
            whole = Layout.whole(computed.shape, [0], 1)
            binding = Binding(whole, {0: FileRange(place.path, place.start_bytes)}, {})
        self.tensors[name] = StoredTensor(name, computed.dtype, binding)

    def _dequantize(self, weight: QuantizedWeight) -> None:
        stored = {name: self.checkpoint.tensors[name] for name in weight.members}
        quantization = quantization_config(self.config)
        bits = quantization.get("bits")
        computed = DequantizedWeight(
            weight,
            stored,
            self.dtype or self._own_dtype() or dtype("bfloat16"),
            bits if isinstance(bits, int) else _find_bits(weight),
            weight.method.startswith("GPTQ") and quantization.get("checkpoint_format") != "gptq_v2",
        )
        self._add(
            weight.name, computed, stored[weight.name].binding if weight.name in stored else None
        )

    def _quantize(self, tensor: StoredTensor) -> None:
        self._add(tensor.name, Float8Weight(tensor, is_scales=False), tensor.binding)
        self._add(tensor.name + _SCALE_SUFFIX, Float8Weight(tensor, is_scales=True))

    def _make_plain_config(self) -> dict[str, Any] | None:
        """Return config.json with the new type."""
        if self.config is None:
            return None
        config = dict(self.config)
        texts = config.get("text_config")
        if isinstance(texts, Mapping):
            config["text_config"] = self._with_dtype(texts)
        return self._with_dtype(config)

    def _with_dtype(self, config: Mapping[str, Any]) -> dict[str, Any]:
        name = self.dtype.name if self.dtype else None
        return {key: name if key in _DTYPE_KEYS and name else v for key, v in config.items()}

    def _make_config(self, quantize: str | None) -> dict[str, Any] | None:
        """Return config.json with or without `quantization_config`."""
        config = self._make_plain_config()
        if config is None:
            return None
        # It describes the codes that remain, if any do.
        if not self.lacking:
            config = _without_quantization(config)
        if quantize is not None:
            others = [
                name.removesuffix(".weight")
                for name, tensor in self.checkpoint.tensors.items()
                if name.endswith(".weight") and len(tensor.shape) == 2 and not _is_matrix(tensor)
            ]
            config["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": others,
            }
        return config

    def _finish(
        self,
        config: dict[str, Any] | None,
        tensors: Mapping[str, StoredTensor],
        computed: Mapping[str, ComputedTensor],
    ) -> ChangedElements:
        old = self.checkpoint
        read: Collection[str] = computed.keys()
        if not isinstance(computed, CastColumns):
            read = {source.name for tensor in computed.values() for source in tensor.sources}
        rewritten, carried = {}, old.carried
        # A config that is not copied, because it is a foreign link, is not written either.
        is_copied = "config.json" not in dict(old.left_out)
        if config is not None and config != self.config and is_copied:
            rewritten["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
        if config is not None and "quantization_config" not in config and self.weights:
            carried = tuple(name for name in carried if name != _MODELOPT_CONFIG)
        # Boxes of the sources of computed tensors may be read repeatedly, or in part.
        changed = old.replace(
            tensors=tensors,
            checksums=read_again(old.checksums, read),
            carried=carried,
            paths={name: path for name, path in old.paths.items() if name in tensors},
            notes=(*old.notes, *self.notes),
        )
        return ChangedElements(changed, computed, rewritten)


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without its entries about quantisation, at any depth."""
    return {
        key: _without_quantization(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }


def _is_matrix(tensor: StoredTensor) -> bool:
    """Return whether `quantize` applies to a tensor."""
    return (
        len(tensor.shape) == 2
        and is_castable(tensor.dtype)
        and re.fullmatch(_MATRIX, tensor.name) is not None
        # The names of layers have a number; those of other matrices, such as projections of images,
        # do not.
        and re.search(r"\.\d+\.", tensor.name) is not None
    )


def _find_bits(weight: QuantizedWeight) -> int:
    """Return the bits of a packed integer, from the number of them in an int32."""
    packs = [
        32 * dim.indices // dim.elements
        for name, dims in weight.members.items()
        for dim in dims
        if dim.elements > 1 and name.endswith(("_packed", ".qweight"))
    ]
    return packs[0] if packs and packs[0] else 4


def add_copies(
    changed: ChangedElements, copies: Mapping[str, tuple[str, DType]]
) -> ChangedElements:
    """Return a checkpoint with additional copies of tensors, such as 16-bit weights of a format.

    `copies` has the source and the type of each copy, by name. A copy of another type is computed;
    a copy of the same type is read again.

    Raises:
        UsageError: a copy of a computed tensor.
    """
    if not copies:
        return changed
    old = changed.checkpoint
    tensors, computed = dict(old.tensors), dict(changed.computed)
    copied = set()
    for name, (source, element) in copies.items():
        if source in changed.computed:
            raise UsageError(
                f"{name!r} would be a copy of {source!r}, which is computed itself; convert in two "
                "steps, first without the new element type"
            )
        tensor = old.tensors[source]
        copied.add(source)
        tensors[name] = tensor.replace(name=name, dtype=element, digest=None)
        if element is not tensor.dtype:
            computed[name] = CastTensor(tensor, element)
    # Copied tensors are read more than once.
    checksums = read_again(old.checksums, copied)
    checkpoint = old.replace(tensors=tensors, checksums=checksums)
    return changed.replace(checkpoint=checkpoint, computed=computed)
