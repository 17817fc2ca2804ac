"""Tensors of codes, and the scales that they lack, by names and element types."""

from __future__ import annotations

import pytest

from reshard.recipes.quantization.codes import describe_lacking, find_lacking, list_codes

UP = "layers.0.up_proj"
FP8, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"


def lacking(types: dict[str, str], *, is_quantized: bool = True) -> dict[str, str]:
    """What is missing; scales have one dimension, others two."""
    dims = {name: 1 if "scale" in name else 2 for name in types}
    return find_lacking(list_codes(types, dims, is_quantized=is_quantized), types)


@pytest.mark.parametrize(
    ("types", "name"),
    [
        ({f"{UP}.weight": FP8}, f"{UP}.weight_scale_inv"),
        ({f"{UP}.weight": "float8_e5m2"}, f"{UP}.weight_scale_inv"),
        ({f"{UP}.weight": FP8, "b.weight": FP8, "b.weight_scale": "float32"}, f"{UP}.weight_scale"),
        ({"experts.gate_up_proj": FP8}, "experts.gate_up_proj_scale_inv"),
        ({f"{UP}.weight": "int8"}, f"{UP}.weight_scale"),
        ({f"{UP}.qweight": "int32", f"{UP}.qzeros": "int32"}, f"{UP}.scales"),
        ({f"{UP}.weight_packed": "int32"}, f"{UP}.weight_scale"),
        ({"experts.up_proj_blocks": "uint8"}, "experts.up_proj_scales"),
        ({f"{UP}.weight": "uint8", f"{UP}.weight_scale": FP8}, f"{UP}.weight_scale_2"),
        (
            {f"{UP}.weight_packed": "uint8", f"{UP}.weight_scale": FP8},
            f"{UP}.weight_global_scale",
        ),
        ({f"{UP}._weight_qdata": FP8}, f"{UP}._weight_scale"),
        ({f"{UP}.weight._data": "int8"}, f"{UP}.weight._scale"),
    ],
)
def test_scales_that_are_missing(types: dict[str, str], name: str) -> None:
    assert [*lacking(types).values()] == [name]


@pytest.mark.parametrize(
    "types",
    [
        {f"{UP}.weight": FP8, f"{UP}.weight_scale_inv": "float32"},
        {f"{UP}.weight": FP8, f"{UP}.weight_scale": E8M0},
        {f"{UP}.weight": FP8, f"{UP}.scale_weight": "float32"},
        {f"{UP}.weight": FP8, f"{UP}.scale": "float32"},
        {f"{UP}.weight": "int8", f"{UP}.SCB": "float32"},
        {f"{UP}.weight": "uint8", f"{UP}.weight.absmax": "float32"},
        {f"{UP}.weight": "uint8", f"{UP}.weight_scale": FP8, f"{UP}.weight_scale_2": "float32"},
        {f"{UP}.weight_packed": "uint8", f"{UP}.weight_scale": "uint8"},
        {f"{UP}.weight_packed": "int32", f"{UP}.weight_scale": "bfloat16"},
        {f"{UP}.qweight": "int32", f"{UP}.scales": "float16"},
        {f"{UP}.weight": "bfloat16", "position_ids": "int32", "mask": "uint8"},
    ],
)
def test_weights_that_lack_nothing(types: dict[str, str]) -> None:
    assert lacking(types) == {}


def test_integers_are_codes_in_a_quantised_checkpoint_alone() -> None:
    assert lacking({f"{UP}.weight": "int8"}, is_quantized=False) == {}


def test_one_is_described() -> None:
    assert "2 quantised weights in m lack their scales: 'a' has no 'a_scale' and 1 more" in (
        describe_lacking({"a": "a_scale", "b": "b_scale"}, "m")
    )
    assert "'a' has no scale of a name that is known" in describe_lacking({"a": ""}, "m")
