"""Methods of quantisation: the tensors that each stores for a weight, and their dimensions.

A quantised weight is one *logical* weight, `X.weight` of `[out, in]`, in several *stored* tensors.
A row of the table says of each stored tensor what its dimensions are of the logical ones::

    out, in              as the weight itself
    out, in/2            an index along the second stands for 2 logical elements (packed)
    out/rows, in/columns one for each block, of the sizes that config.json or the shapes give
    out~, in~            a scale: one for each element, for each group, or (length 1) for all
    flat/2               one dimension over all elements in row-major order, 2 to an index
    *                    as it is: the sixteen bytes of a block, a table of values
    (nothing)            a scalar

Leading dimensions, of stacked experts, come before these, one index an expert everywhere.

Names are those behind the logical name, or in its place: `.qweight` for `.weight`. The first
stored tensor of a row is the one by which the method is known; those that `needs` lists must be
there too.

Sources: the checkpoints and loaders of DeepSeek-V3, gpt-oss, compressed-tensors, NVIDIA ModelOpt,
GPTQ (`gptqmodel`), AutoAWQ and bitsandbytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A stored tensor of a method.

    Args:
        suffix: the end of its name.
        logical: the end of the logical weight's name in that place.
        dimensions: what its dimensions are; alternatives by their number.
    """

    suffix: str
    logical: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of quantisation.

    Args:
        name: for people and messages.
        forms: the stored tensors; the first is the one by which the method is known.
        needs: suffixes that must be there for the method to be this one.
        lacks: suffixes that must not.
        order: the logical dimensions in the order of the recipe's weight.
        uncut: suffixes that, where they are there, tie a logical dimension together: a table of
            which group each index belongs to in any order.
    """

    name: str
    forms: tuple[StoredForm, ...]
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    order: tuple[str, str] = ("out", "in")
    uncut: tuple[tuple[str, str], ...] = ()


def _make_form(suffix: str, *dimensions: str, logical: str = "") -> StoredForm:
    return StoredForm(suffix, logical, dimensions)


def _make_module_form(suffix: str, *dimensions: str) -> StoredForm:
    """A tensor of the module `X` that has the weight `X.weight`."""
    return StoredForm(suffix, ".weight", dimensions)


# Of activations, known in advance, and shared by all of the weight.
_ACTIVATION_SCALES = tuple(
    _make_module_form(suffix, "", "*")
    for suffix in (
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".input_scale_ub",
        ".activation_scale",
        ".k_scale",
        ".v_scale",
    )
)

#: In order: the first of which all that it needs is there.
METHODS: tuple[Method, ...] = (
    Method(
        "bitsandbytes 4-bit",
        (
            _make_form(".absmax", "flat/block"),
            _make_form("", "flat/pack, *"),
            _make_form(".quant_map", "*"),
            _make_form(".nested_absmax", "flat/nested"),
            _make_form(".nested_quant_map", "*"),
            _make_form(".quant_state.bitsandbytes__nf4", "*"),
            _make_form(".quant_state.bitsandbytes__fp4", "*"),
        ),
        needs=("",),
    ),
    Method(
        "bitsandbytes 8-bit",
        (
            _make_module_form(".SCB", "out"),
            _make_form("", "out, in"),
            _make_module_form(".weight_format", "", "*"),
        ),
        needs=("",),
    ),
    Method(
        "MXFP4 of gpt-oss",
        (_make_form("_blocks", "out, in/32, *"), _make_form("_scales", "out, in/32")),
        needs=("_scales",),
        order=("in", "out"),
    ),
    Method(
        "NVFP4 of ModelOpt",
        (
            _make_form("_scale_2", "", "*"),
            _make_form("", "out, in/2"),
            _make_form("_scale", "out, in/group"),
            *_ACTIVATION_SCALES,
        ),
        needs=("", "_scale"),
    ),
    Method(
        "NVFP4 of compressed-tensors",
        (
            _make_form("_packed", "out, in/2"),
            _make_form("_scale", "out, in/group"),
            _make_form("_global_scale", "", "*"),
            *_ACTIVATION_SCALES,
        ),
        needs=("_scale", "_global_scale"),
    ),
    Method(
        "MXFP4 of compressed-tensors",
        (
            _make_form("_packed", "out, in/2"),
            _make_form("_scale", "out, in/group"),
            *_ACTIVATION_SCALES,
        ),
        needs=("_scale",),
        lacks=("_shape",),
    ),
    Method(
        "packed compressed-tensors",
        (
            _make_form("_packed", "out, in/pack"),
            _make_form("_scale", "out~, in~"),
            _make_form("_zero_point", "out/pack, in~"),
            _make_form("_shape", "*"),
            _make_form("_g_idx", "in"),
            *_ACTIVATION_SCALES,
        ),
        needs=("_scale", "_shape"),
        uncut=(("_g_idx", "in"),),
    ),
    Method(
        "GPTQ",
        (
            _make_module_form(".qweight", "in/pack, out"),
            _make_module_form(".scales", "in~, out"),
            _make_module_form(".qzeros", "in~, out/pack"),
            _make_module_form(".g_idx", "in"),
        ),
        needs=(".scales", ".g_idx"),
        uncut=((".g_idx", "in"),),
    ),
    Method(
        "AWQ",
        (
            _make_module_form(".qweight", "in, out/pack"),
            _make_module_form(".scales", "in~, out"),
            _make_module_form(".qzeros", "in~, out/pack"),
        ),
        needs=(".scales", ".qzeros"),
        lacks=(".g_idx",),
    ),
    Method(
        "GPTQ without g_idx",
        (
            _make_module_form(".qweight", "in/pack, out"),
            _make_module_form(".scales", "in~, out"),
            _make_module_form(".qzeros", "in~, out/pack"),
        ),
        needs=(".scales",),
        lacks=(".g_idx",),
    ),
    Method(
        "FP8 in blocks",
        (
            _make_form("_scale_inv", "", "*", "out/rows, in/columns"),
            _make_form("", "out, in"),
            *_ACTIVATION_SCALES,
        ),
        needs=("",),
    ),
    Method(
        "scaled 8-bit",
        (
            _make_form("_scale", "", "out~", "out~, in~", "out/rows, *, in/columns, *"),
            _make_form("", "out, in"),
            _make_form("_zero_point", "", "out~", "out~, in~"),
            *_ACTIVATION_SCALES,
        ),
        needs=("",),
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
