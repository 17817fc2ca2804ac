"""Quantised weights: the tensors that each method stores, and how to find them in a checkpoint.

A quantised weight is a single *logical* weight, `X.weight` of `[out, in]`, in several *stored*
tensors. A row of the table `METHODS` relates the dimensions of each stored tensor to the logical
dimensions::

    out, in              as the weight itself
    out, in/2            each index along the second holds 2 logical elements (packed)
    out/rows, in/columns an entry for each block, of sizes given by config.json or the shapes
    out~, in~            a scale: for each element, for each group, or (length 1) for all
    flat/2               a single dimension over all elements in row-major order, 2 per index
    *                    unrelated: the sixteen bytes of a block, a table of values
    (nothing)            a scalar

After `->` is the tensor's role in the values of the weight (`_ROLES`), and the coding of its
elements if they are not plain numbers: `e2m1`, `powers` of two, `integers`, `signed` (offset by
half of the range) or `awq`.

Leading dimensions, of stacked experts, precede these.

The first stored tensor of a row identifies the method, if those in `needs` are present too. To add
a method, add a row.

1. A name with the ending of a method, together with the tensors that it needs, is a quantised
   weight.
2. The lengths of the logical weight are derived from the stored shapes. Sizes of groups and blocks
   are those of `quantization_config` in config.json if they fit the shapes, else any that fit.
3. Unknown methods in `quantization_config` are errors, as are unknown tensors of a module with a
   quantised weight.

Elements of a stored tensor may be *codes*, which have no value without their scales. They are
recognised by element types and names::

    float8 matrices               X.weight with X.weight_scale_inv or X.weight_scale
    integers                      X.weight (int8, uint8) in a checkpoint that is quantised
    packed integers               X.qweight, X.weight_packed, X_blocks

FP8 files without any scale exist: their elements are the values themselves. A file does not
distinguish them from weights that lost their scales, so the user must.

Sources: the checkpoints and loaders of DeepSeek-V3, gpt-oss, compressed-tensors, NVIDIA ModelOpt,
GPTQ (`gptqmodel`), AutoAWQ and bitsandbytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from reshard.errors import UncomputableError
from reshard.text import count_text


class Method(NamedTuple):
    """A method of quantisation.

    Names of stored tensors are relative to the logical `X.weight`: `+_scale` is `X.weight_scale`,
    `+` is `X.weight` itself, and `.scales` is `X.scales`.

    Args:
        name: for people and messages.
        forms: the dimensions of each stored tensor, or alternatives of another rank, the first
            with the tensor's role in the weight's values, if any; the first tensor identifies the
            method.
        needs: tensors that must be present.
        lacks: tensors that must not.
        order: the logical dimensions in the order of the recipe's weight.
        uncut: tensors that tie a logical dimension together if they are present: a table of the
            group of each index, in any order.
    """

    name: str
    forms: Mapping[str, str | tuple[str, ...]]
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    order: tuple[str, str] = ("out", "in")
    uncut: Mapping[str, str] = {}

    @property
    def values(self) -> list[tuple[str, str, str]]:
        """The tensors from which values are computed: their ends of names, roles and codings.

        Empty for a method whose values cannot be computed.
        """
        parts = []
        for end, texts in self.forms.items():
            use = (texts if isinstance(texts, str) else texts[0]).partition("->")[2]
            role, _, coding = use.strip().partition(" as ")
            if role:
                parts.append((end, role, coding or "plain"))
        return sorted(parts, key=lambda part: _ROLES.index(part[1]))


# Roles of stored tensors: values less zeros, multiplied by scales. A multiplier or a divisor is for
# the scales.
_ROLES = ("values", "zeros", "scales", "multiplier", "divisor")
_SCALAR = ("", "*")
# Static scales of activations and of the key/value cache, a single number for each weight.
_ACTIVATION_SCALES = dict.fromkeys(
    (
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".input_scale_ub",
        ".activation_scale",
        ".k_scale",
        ".v_scale",
    ),
    _SCALAR,
)

_GPTQ = {
    ".qweight": "in/pack, out -> values as integers",
    ".scales": "in~, out -> scales",
    ".qzeros": "in~, out/pack -> zeros as integers",
}

#: In order of precedence: the first method whose tensors are all present applies.
METHODS: tuple[Method, ...] = (
    Method(
        "bitsandbytes 4-bit",
        {
            "+.absmax": "flat/block",
            "+": "flat/pack, *",
            "+.quant_map": "*",
            "+.nested_absmax": "flat/nested",
            "+.nested_quant_map": "*",
            "+.quant_state.bitsandbytes__nf4": "*",
            "+.quant_state.bitsandbytes__fp4": "*",
        },
        needs=("+",),
    ),
    Method(
        "bitsandbytes 8-bit",
        {".SCB": "out", "+": "out, in", ".weight_format": _SCALAR},
        needs=("+",),
    ),
    Method(
        "MXFP4 of gpt-oss",
        {
            "+_blocks": "out, in/32, * -> values as e2m1",
            "+_scales": "out, in/32 -> scales as powers",
        },
        needs=("+_scales",),
        order=("in", "out"),
    ),
    Method(
        "NVFP4 of ModelOpt",
        {
            "+_scale_2": ("-> multiplier", "*"),
            "+": "out, in/2 -> values as e2m1",
            "+_scale": "out, in/group -> scales",
            **_ACTIVATION_SCALES,
        },
        needs=("+", "+_scale"),
    ),
    Method(
        "NVFP4 of compressed-tensors",
        {
            "+_packed": "out, in/2 -> values as e2m1",
            "+_scale": "out, in/group -> scales",
            "+_global_scale": ("-> divisor", "*"),
            **_ACTIVATION_SCALES,
        },
        needs=("+_scale", "+_global_scale"),
    ),
    Method(
        "MXFP4 of compressed-tensors",
        {
            "+_packed": "out, in/2 -> values as e2m1",
            "+_scale": "out, in/group -> scales as powers",
            **_ACTIVATION_SCALES,
        },
        needs=("+_scale",),
        # Packed integers of compressed-tensors have the same names, and store their shape.
        lacks=("+_shape",),
    ),
    Method(
        "packed compressed-tensors",
        {
            "+_packed": "out, in/pack -> values as signed",
            "+_scale": "out~, in~ -> scales",
            "+_zero_point": "out/pack, in~ -> zeros as signed",
            "+_shape": "*",
            "+_g_idx": "in",
            **_ACTIVATION_SCALES,
        },
        needs=("+_scale", "+_shape"),
        uncut={"+_g_idx": "in"},
    ),
    Method(
        "GPTQ",
        {**_GPTQ, ".g_idx": "in"},
        needs=(".scales", ".g_idx"),
        uncut={".g_idx": "in"},
    ),
    Method(
        "AWQ",
        {
            ".qweight": "in, out/pack -> values as awq",
            ".scales": "in~, out -> scales",
            ".qzeros": "in~, out/pack -> zeros as awq",
        },
        needs=(".scales", ".qzeros"),
        # GPTQ's tensors have the same names; only GPTQ stores the group of each index.
        lacks=(".g_idx",),
    ),
    Method("GPTQ without g_idx", _GPTQ, needs=(".scales",), lacks=(".g_idx",)),
    Method(
        "FP8 in blocks",
        {
            "+_scale_inv": ("-> scales", "*", "out/rows, in/columns"),
            "+": "out, in -> values",
            **_ACTIVATION_SCALES,
        },
        needs=("+",),
    ),
    Method(
        "scaled 8-bit",
        {
            "+_scale": ("-> scales", "out~", "out~, in~", "out/rows, *, in/columns, *"),
            "+": "out, in -> values",
            "+_zero_point": ("-> zeros", "out~", "out~, in~"),
            **_ACTIVATION_SCALES,
        },
        needs=("+",),
    ),
)

#: `quant_method` of config.json, with the values of a key of it that are other formats.
KNOWN_QUANT_METHODS: dict[str, tuple[str, frozenset[str]]] = {
    "fp8": ("fmt", frozenset()),
    "fbgemm_fp8": ("", frozenset()),
    "mxfp4": ("", frozenset()),
    "compressed-tensors": (
        "format",
        frozenset({"marlin-24", "sparse-bitmask", "sparse-24-bitmask"}),
    ),
    "modelopt": ("quant_algo", frozenset({"W4A8_AWQ", "W4A16_AWQ"})),
    "modelopt_fp4": ("quant_algo", frozenset()),
    "gptq": ("checkpoint_format", frozenset({"marlin", "bitblas", "qqq", "gptq_pack"})),
    "awq": ("version", frozenset({"gemv", "gemv_fast", "marlin", "llm-awq"})),
    "auto-round": ("packing_format", frozenset()),
    "bitsandbytes": ("", frozenset()),
}


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

_CONFIG_KEYS = ("quantization_config", "compression_config")
_BIT_KEYS = ("bits", "num_bits", "w_bit")
_GROUP_KEYS = ("group_size", "q_group_size")
_BLOCK_KEYS = ("weight_block_size", "block_structure")
# Defaults: of a block of FP8, and of groups of packed weights.
_USUAL_GROUPS = (128, 64, 32, 16)
# bitsandbytes quantizes the scales of blocks again, in blocks of this size.
_BNB_NESTED = 256
_ACCEPTED = (
    "--allow uncomputable shards each stored tensor by the rule for its own name, in Python "
    "allow=['uncomputable']"
)


class StoredDimension(NamedTuple):
    """The part of the logical weight that a dimension of a stored tensor covers.

    `indices` of it hold `elements` of the logical `dimension`, which is None if it is
    never cut.
    """

    dimension: int | None
    elements: int = 1
    indices: int = 1

    def length_of(self, length: int) -> int:
        """Return the stored length for a logical length: whole groups."""
        return -(-length // self.elements) * self.indices


class QuantizedWeight(NamedTuple):
    """A weight in several stored tensors.

    Attributes:
        name: of the logical weight.
        shape: of it.
        method: for people.
        members: for each stored tensor, what its dimensions are.
        groups: for each logical dimension how many elements must stay together.
        grouped_by: for each, the stored tensor that asks for most of them.
        uncut: the dimensions that cannot be cut at all, with the stored tensor that is why.
    """

    name: str
    shape: Shape
    method: str
    members: Mapping[str, tuple[StoredDimension, ...]]
    groups: tuple[int, ...]
    grouped_by: tuple[str, ...]
    uncut: Mapping[int, str]

    def renamed(self, names: Mapping[str, str]) -> QuantizedWeight:
        """Return the same of other names, by those that it has."""
        return QuantizedWeight(
            names[self.name],
            self.shape,
            self.method,
            {names[name]: dims for name, dims in self.members.items()},
            self.groups,
            tuple(map(names.__getitem__, self.grouped_by)),
            {d: names[name] for d, name in self.uncut.items()},
        )


def quantization_config(config: Mapping[str, object] | None) -> Mapping[str, Any]:
    """Return the quantisation config in a config.json, or in the config of its language model.

    >>> quantization_config({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    {'quant_method': 'fp8'}
    """
    inside: list[Mapping[str, Any]] = [config or {}]
    # The list grows in the loop: outer configs are searched before those of their parts.
    for table in inside:
        for key in _CONFIG_KEYS:
            result = table.get(key)
            if isinstance(result, Mapping):
                return result
        inside += [value for value in table.values() if isinstance(value, Mapping)]
    return {}


def find_quantized(
    shapes: Shapes,
    config: Mapping[str, object] | None = None,
    itemsizes_bytes: Mapping[str, int] | None = None,
    logical_shapes: Shapes | None = None,
    *,
    is_lenient: bool = False,
) -> dict[str, QuantizedWeight]:
    """Return the quantised weights among stored tensors, by logical name.

    Args:
        shapes: of all stored tensors.
        config: the model's config.json.
        itemsizes_bytes: of a stored element, by tensor; 1 when None.
        logical_shapes: of weights whose stored tensors do not determine it (bitsandbytes 4-bit).
        is_lenient: leave out what is not known, instead of refusing it.

    Raises:
        UncomputableError: an unknown method, an unknown form of it, or an unknown tensor next to a
            quantised weight; shapes that do not fit together.

    >>> found = find_quantized({"up.weight": (300, 256), "up.weight_scale_inv": (3, 2)})
    >>> found["up.weight"].method, found["up.weight"].groups
    ('FP8 in blocks', (128, 128))
    """
    options = quantization_config(config)
    if not is_lenient:
        _expect_known_method(options)
    finder = _Finder(shapes, options, itemsizes_bytes or {}, logical_shapes or {})
    result: dict[str, QuantizedWeight] = {}
    failed: dict[str, str] = {}
    anchors = tuple(next(iter(method.forms)).removeprefix("+") for method in METHODS)
    anchored = [name for name in shapes if name.endswith(anchors)]
    # Method by method, so that an earlier method takes precedence for a weight.
    for method, anchor in zip(METHODS, anchors, strict=True):
        is_appended = f"+{anchor}" in method.forms
        for name in anchored:
            if not name.endswith(anchor):
                continue
            logical = name.removesuffix(anchor) + ("" if is_appended else ".weight")
            if logical in result or not finder.applies(method, logical):
                continue
            weight = finder.resolve(method, logical)
            # Another method may still fit, so reasons are raised only for weights without any.
            if isinstance(weight, QuantizedWeight):
                result[logical] = weight
            else:
                failed.setdefault(logical, f"{name!r}, of {method.name}: {weight}")
    if is_lenient:
        return result
    for logical, reason in failed.items():
        if logical not in result:
            raise UncomputableError(
                f"the quantised weight of {reason}. What is known: {known_methods()}. {_ACCEPTED}"
            )
    _expect_no_strangers(shapes, result)
    return result


def find_method(name: str) -> Method:
    """Return the method of a name, as in `QuantizedWeight.method`."""
    return next(method for method in METHODS if method.name == name)


def known_methods() -> str:
    """Return the methods of quantisation that are known, as text."""
    return ", ".join(dict.fromkeys(method.name for method in METHODS))


def _expect_known_method(options: Mapping[str, Any]) -> None:
    if not options:
        return
    name = options.get("quant_method")
    key, others = KNOWN_QUANT_METHODS.get(str(name), ("", frozenset()))
    if name is not None and str(name) not in KNOWN_QUANT_METHODS:
        raise UncomputableError(
            f"`quantization_config` of config.json has quant_method {name!r}, of which it is not "
            f"known how its tensors go together; known are {', '.join(KNOWN_QUANT_METHODS)}. "
            f"{_ACCEPTED}"
        )
    if options.get(key) in others:
        raise UncomputableError(
            f"`quantization_config` of config.json has {key} {options[key]!r} of {name}, whose "
            f"elements are permuted so that no sharding is known; known are {known_methods()}. "
            f"{_ACCEPTED}"
        )


def _expect_no_strangers(shapes: Shapes, weights: Mapping[str, QuantizedWeight]) -> None:
    """Raise an error for tensors next to a quantised weight that are not in the table."""
    members = {name for weight in weights.values() for name in weight.members}
    modules = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        # A tensor of an unknown scheme may belong to the codes, and would be sharded without them.
        if module in modules and name not in members and leaf not in ("weight", "bias"):
            weight = weights[f"{module}.weight"]
            raise UncomputableError(
                f"the tensor {name!r} is next to the quantised weight {weight.name!r} "
                f"({weight.method}), and it is not known how it goes with it; known there are "
                f"{', '.join(member.rpartition('.')[2] for member in weight.members)} and bias. "
                f"{_ACCEPTED}"
            )


class _Finder:
    """A search for the meaning of the dimensions of stored tensors."""

    def __init__(
        self,
        shapes: Shapes,
        options: Mapping[str, Any],
        itemsizes_bytes: Mapping[str, int],
        logical_shapes: Shapes,
    ) -> None:
        self.shapes = shapes
        self.itemsizes_bytes = itemsizes_bytes
        self.logical_shapes = logical_shapes
        self.bits = [bits for bits in _collect(options, _BIT_KEYS) if isinstance(bits, int)]
        groups = [size for size in _collect(options, _GROUP_KEYS) if isinstance(size, int)]
        # A group size of -1 in a config means a single scale for a whole row.
        self.groups = [*(size for size in groups if size > 0), *_USUAL_GROUPS]
        blocks = [pair for pair in _collect(options, _BLOCK_KEYS) if isinstance(pair, list | tuple)]
        self.blocks: list[tuple[int, ...]] = [tuple(pair) for pair in blocks if len(pair) == 2]
        # The blocks of DeepSeek-V3, for checkpoints without a config.
        self.blocks.append((128, 128))
        # Without `desc_act` GPTQ's groups are consecutive, whatever its table of groups has.
        self.keeps_order = options.get("desc_act") is False
        # Of each method and list of shapes the first weight, with the names of its tensors.
        self._known: dict[tuple[Any, ...], tuple[QuantizedWeight, tuple[str, ...]]] = {}

    def applies(self, method: Method, logical: str) -> bool:
        """Return whether all tensors that a method needs are present, and none that it lacks."""
        return all(make_stored_name(logical, end) in self.shapes for end in method.needs) and not (
            any(make_stored_name(logical, end) in self.shapes for end in method.lacks)
        )

    def resolve(self, method: Method, logical: str) -> QuantizedWeight | str:
        """Return the weight, or why its stored tensors do not fit together."""
        # Layers repeat: weights whose stored tensors have equal shapes differ in names only.
        ends = [*method.forms, *method.uncut]
        names = (logical, *(make_stored_name(logical, end) or "" for end in ends))
        key = (
            method.name,
            tuple(map(self.shapes.get, names)),
            tuple(map(self.itemsizes_bytes.get, names)),
            self.logical_shapes.get(logical),
        )
        cached = self._known.get(key)
        if cached is not None:
            weight, others = cached
            return weight.renamed(dict(zip(others, names, strict=True)))
        try:
            weight = self._resolve(method, logical)
        except UncomputableError as error:
            return str(error)
        self._known[key] = weight, names
        return weight

    def _resolve(self, method: Method, logical: str) -> QuantizedWeight:
        # 1. Which stored tensors there are, and which of the alternatives each is.
        stored = {}
        for end, forms in method.forms.items():
            name = make_stored_name(logical, end)
            if name is not None and name in self.shapes:
                alternatives = (forms,) if isinstance(forms, str) else forms
                stored[name] = tuple(text.partition("->")[0].strip() for text in alternatives)
        leading = self._count_leading(stored)
        items = {
            name: _choose_alternative(name, self.shapes[name], texts, leading)
            for name, texts in stored.items()
        }
        # 2. The lengths of the logical weight.
        if any(item.startswith("flat") for texts in items.values() for item in texts):
            lengths = self._flat_lengths(logical)
        else:
            lengths = {word: self._find_length(word, items) for word in method.order}
        # All stored tensors of stacked experts begin with the same dimensions.
        lead = next(
            (self.shapes[n][:leading] for n, texts in items.items() if texts and texts != ["*"]), ()
        )
        shape = (*lead, *(lengths[word] for word in method.order))
        # 3. The logical dimension of each stored dimension.
        members: dict[str, tuple[StoredDimension, ...]] = {}
        for name, texts in items.items():
            stored_shape = self.shapes[name]
            dimensions = [StoredDimension(d) for d in range(len(stored_shape) - len(texts))]
            for item, length in zip(texts, stored_shape[len(dimensions) :], strict=True):
                dimensions.append(self._read(name, item, length, lengths, method, leading))
            members[name] = tuple(dimensions)
            for d in range(len(stored_shape) - len(texts)):
                if stored_shape[d] != shape[d]:
                    raise UncomputableError(
                        f"{name!r} of shape {list(stored_shape)} for {list(shape)}"
                    )
        # 4. The groups that must stay together.
        groups, by = [1] * len(shape), [logical] * len(shape)
        for name, dims in members.items():
            for stored_dim in dims:
                if stored_dim.dimension is not None and stored_dim.elements > 1:
                    # Errors name the tensor whose groups make the common group larger.
                    if groups[stored_dim.dimension] % stored_dim.elements:
                        by[stored_dim.dimension] = name
                    groups[stored_dim.dimension] = math.lcm(
                        groups[stored_dim.dimension], stored_dim.elements
                    )
        uncut: dict[int, str] = {}
        for end, word in method.uncut.items():
            table = make_stored_name(logical, end)
            if table is not None and table in self.shapes and not self.keeps_order:
                uncut[leading + method.order.index(word)] = table
        if any(item.startswith("flat") for texts in items.values() for item in texts):
            # Rows are consecutive in a single dimension: columns cannot be sharded.
            uncut[len(shape) - 1] = logical
        return QuantizedWeight(
            logical, shape, method.name, members, tuple(groups), tuple(by), uncut
        )

    def _count_leading(self, stored: Mapping[str, tuple[str, ...]]) -> int:
        """Count the leading dimensions of stacked experts, by the first tensor of a single form."""
        for name, texts in stored.items():
            if len(texts) == 1 and texts[0] and texts[0] != "*":
                leading = len(self.shapes[name]) - len(_split(texts[0]))
                if leading < 0:
                    raise UncomputableError(
                        f"{name!r} has shape {list(self.shapes[name])}, expected `{texts[0]}`"
                    )
                return leading
        return 0

    def _flat_lengths(self, logical: str) -> dict[str, int]:
        if logical not in self.logical_shapes or len(self.logical_shapes[logical]) != 2:
            raise UncomputableError(
                f"the shape of {logical!r} is in its quant_state, which was not given; give it"
            )
        out, inner = self.logical_shapes[logical]
        return {"out": out, "in": inner}

    def _list_items(self, items: Mapping[str, list[str]]) -> Iterator[tuple[str, str, int]]:
        """List the text of each stored dimension after the leading ones, its tensor and length."""
        for name, texts in items.items():
            stored_shape = self.shapes[name]
            for item, size in zip(
                texts, stored_shape[len(stored_shape) - len(texts) :], strict=True
            ):
                yield item, name, size

    def _find_length(self, word: str, items: Mapping[str, list[str]]) -> int:
        """Return the logical length that a stored dimension has exactly, or in the smallest
        groups.
        """
        packed: list[tuple[int, int]] = []
        for item, _, size in self._list_items(items):
            if item == word:
                return size
            if item.startswith(f"{word}/") and item[len(word) + 1 :].isdigit():
                packed.append((int(item[len(word) + 1 :]), size))
        if packed:
            # The tensor with the fewest elements per index gives the length most precisely.
            elements, size = min(packed)
            return elements * size
        return self._find_packed_length(word, items)

    def _find_packed_length(self, word: str, items: Mapping[str, list[str]]) -> int:
        """Return the length that the bits of config.json give a packed dimension."""
        listed = list(self._list_items(items))
        sizes = [(name, size) for item, name, size in listed if item == f"{word}/pack"]
        scales = [size for item, _, size in listed if item == f"{word}~"]
        for name, size in sizes:
            for bits in self.bits:
                length = size * 32 // bits
                # For several methods in a config, choose the bits whose groups fit too.
                if all(s == 1 or any(-(-length // g) == s for g in self.groups) for s in scales):
                    return length
            raise UncomputableError(
                f"{name!r} of shape {list(self.shapes[name])} is packed, and "
                "`quantization_config` of config.json lacks a number of bits that fits"
            )
        raise UncomputableError(f"no stored tensor has its dimension {word!r}")

    def _read(
        self,
        name: str,
        item: str,
        size: int,
        lengths: Mapping[str, int],
        method: Method,
        leading: int,
    ) -> StoredDimension:
        """Return what a stored dimension of length `size` is, by its text."""
        if item in ("*", ""):
            return StoredDimension(None)
        word, _, per = item.rstrip("~").partition("/")
        if word == "flat":
            return self._read_flat(name, per, size, lengths)
        at, length = leading + method.order.index(word), lengths[word]
        if item.endswith("~"):
            # A scale for all elements is not divided with them.
            if size == 1:
                return StoredDimension(None)
            # A scale for each element is a group of 1, whatever config.json has.
            group = 1 if size == length else self._find_group(size, length, self._block(word))
            result = StoredDimension(at, group)
        elif per in ("group", "rows", "columns"):
            result = StoredDimension(at, self._find_group(size, length, self._block(word)))
        elif per == "pack":
            result = self._find_pack(at, size, length)
        else:
            result = StoredDimension(at, int(per or 1))
        if result.length_of(length) != size:
            raise UncomputableError(
                f"{name!r} has {size} indices for {length} of {word!r}, expected "
                f"{result.length_of(length)}"
            )
        return result

    def _block(self, word: str) -> list[int]:
        """Return the sizes of blocks in config.json, then those of groups."""
        return [*(pair[word == "in"] for pair in self.blocks), *self.groups]

    def _find_group(self, size: int, length: int, candidates: Iterable[int]) -> int:
        # Several sizes may fit a shape, so those of config.json are tried first.
        for group in candidates:
            if -(-length // group) == size:
                return group
        if size and length % size == 0:
            return length // size
        raise UncomputableError(f"{size} groups of {length} elements; they are not equally long")

    def _find_pack(self, at: int, size: int, length: int) -> StoredDimension:
        for bits in self.bits:
            # Elements may cross int32s: 3 bits pack 32 elements into 3 indices.
            shared = math.gcd(bits, 32)
            result = StoredDimension(at, 32 // shared, bits // shared)
            if result.length_of(length) == size:
                return result
        shared = math.gcd(length, size)
        if not size or length <= size or length // shared > 32:
            raise UncomputableError(f"{size} packed indices for {length} elements")
        return StoredDimension(at, length // shared, size // shared)

    def _read_flat(
        self, name: str, per: str, size: int, lengths: Mapping[str, int]
    ) -> StoredDimension:
        """Return a dimension over all elements: rows of the weight that are whole indices of it."""
        out, inner = lengths["out"], lengths["in"]
        total = out * inner
        if per == "pack":
            elements = 2 * self.itemsizes_bytes.get(name, 1)
        else:
            # Blocks are powers of two; nested ones are of so many blocks.
            elements = next((1 << n for n in range(32) if -(-total // (1 << n)) == size), 0)
            if per == "nested" and elements and elements < _BNB_NESTED:
                elements = 0
        if not elements or -(-total // elements) != size:
            raise UncomputableError(f"{name!r} has {size} indices for {total} elements")
        shared = math.gcd(inner, elements)
        return StoredDimension(0, elements // shared, inner // shared)


def _collect(config: object, keys: Collection[str]) -> list[Any]:
    """Return the values of keys anywhere in a config, outer ones first."""
    result: list[Any] = []
    if isinstance(config, Mapping):
        result += [value for key, value in config.items() if key in keys]
        for value in config.values():
            result += _collect(value, keys)
    return result


def make_stored_name(logical: str, end: str) -> str | None:
    """Return a stored tensor's name, or None if it replaces an ending that `logical` lacks."""
    if end.startswith("+"):
        return logical + end[1:]
    return logical.removesuffix(".weight") + end if logical.endswith(".weight") else None


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text else []


def _choose_alternative(name: str, shape: Shape, texts: tuple[str, ...], leading: int) -> list[str]:
    """Return the texts of the dimensions after the leading ones, by the alternative that fits."""
    for text in texts:
        items = _split(text)
        if len(items) + leading == len(shape):
            return items
    if all(size == 1 for size in shape) and "" in texts:
        # A scalar, whatever its rank.
        return ["*"] * len(shape)
    for text in texts:
        # A scalar for all experts, or a table.
        if len(_split(text)) == len(shape) and set(_split(text)) <= {"*"}:
            return _split(text)
    raise UncomputableError(
        f"{name!r} has shape {list(shape)}, expected `{'` or `'.join(texts)}`"
        + (f" after {leading} dimensions of experts" if leading else "")
    )


_SCALE = re.compile(r"(?:^|[._])(?:scales?|scale_inv|scale_\d|scale_\w+|\w*scale)$")
_INTEGERS = frozenset({"int8", "uint8"})
# Ends of names of codes, with those of their scales in that place.
_PACKED = {
    ".qweight": ".scales",
    "_packed": "_scale",
    "_blocks": "_scales",
    "_qdata": "_scale",
    "._data": "._scale",
}
_PACKED_ENDS = tuple(_PACKED)
# Scales of a plain name, after it and in the place of `.weight`.
_AFTER = ("_scale_inv", "_scale", "_scales", ".absmax")
_IN_PLACE = (".SCB", ".scale", ".scales", ".scale_weight", ".weight_scale", ".weight_scale_inv")


def list_codes(
    types: Mapping[str, str], dims: Mapping[str, int], *, is_quantized: bool
) -> list[str]:
    """Return the names of tensors of codes.

    Args:
        types: of elements, by tensor.
        dims: the number of dimensions of each tensor.
        is_quantized: whether the checkpoint has quantised weights, so that integers are codes.

    >>> list_codes({"up.weight": "float8_e4m3fn"}, {"up.weight": 2}, is_quantized=False)
    ['up.weight']
    """
    result = []
    for name, element in types.items():
        if element.startswith("float8"):
            is_code = dims[name] > 1 and element != "float8_e8m0fnu" and not _SCALE.search(name)
        elif name.endswith(_PACKED_ENDS):
            is_code = element in ("int32", *_INTEGERS)
        else:
            is_code = is_quantized and element in _INTEGERS and name.endswith(".weight")
            is_code = is_code and dims[name] > 1
        if is_code:
            result.append(name)
    return result


def find_missing_scales(names: Collection[str], types: Mapping[str, str]) -> dict[str, str]:
    """Return what is missing for each of some tensors of codes that lacks a scale.

    Args:
        names: of tensors of codes.
        types: of the elements of all tensors.

    >>> types = dict.fromkeys(["up.weight", "q.weight"], "float8_e4m3fn")
    >>> find_missing_scales([*types], {**types, "q.weight_scale": "float32"})
    {'up.weight': 'up.weight_scale'}
    """
    result: dict[str, str] = {}
    for name in names:
        if name + _AFTER[0] in types:
            continue
        end = None
        if name.endswith(_PACKED_ENDS):
            end = next(ending for ending in _PACKED if name.endswith(ending))
        if end is not None:
            scales = [name.removesuffix(end) + _PACKED[end]]
        else:
            bare = name.removesuffix(".weight")
            scales = [name + ending for ending in _AFTER]
            scales += [bare + ending for ending in _IN_PLACE] if bare != name else []
        scale = next((name_of_scale for name_of_scale in scales if name_of_scale in types), None)
        if scale is None:
            # The name of the scale that is missing is as those of other weights are.
            usual = 0 if types[name].startswith("float8") or end is not None else 1
            used = (
                number
                for number, ending in enumerate(_AFTER if end is None and not result else ())
                if any(other.endswith(ending) for other in types)
            )
            result[name] = scales[next(used, usual)]
            continue
        # Four-bit elements have scales of eight bits, and a scale of these.
        second = {"": "_scale_2", "_packed": "_global_scale"}.get(end or "")
        is_half = types[name] == "uint8" and types[scale].startswith("float8_e4m3")
        if second is not None and is_half and name.removesuffix(end or "") + second not in types:
            result[name] = name.removesuffix(end or "") + second
    return result


def describe_missing_scales(lacking: Mapping[str, Any], folder: object) -> str:
    """Describe codes without scales.

    >>> describe_missing_scales({"up.weight": "up.weight_scale_inv"}, "model")
    "1 quantised weight in model lacks its scale: 'up.weight' has no 'up.weight_scale_inv'"
    """
    name, scale = next(iter(lacking.items()))
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    lacks = "lacks its scale" if len(lacking) == 1 else "lack their scales"
    described = repr(scale) if scale else "scale of a name that is known"
    return (
        f"{count_text(len(lacking), 'quantised weight')} in {folder} {lacks}: {name!r} has no "
        f"{described}{more}"
    )
