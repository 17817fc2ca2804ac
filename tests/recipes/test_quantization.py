"""Quantised weights found by the names, shapes and configurations of published checkpoints.

Tensors of codes, and the scales that they lack, by names and element types.
"""

from __future__ import annotations

import pytest

from reshard.errors import UncomputableError
from reshard.recipes.quantization import (
    describe_missing_scales,
    find_missing_scales,
    find_quantized,
    list_codes,
    quantization_config,
)

Shapes = dict[str, tuple[int, ...]]
X = "model.layers.0.mlp.down_proj"

# Names and shapes as in the named checkpoints; what is found, and the groups of [out, in].
FOUND: dict[str, tuple[Shapes, dict[str, object], str, tuple[int, ...], tuple[int, ...]]] = {
    "deepseek-ai/DeepSeek-V3": (
        {f"{X}.weight": (7168, 18432), f"{X}.weight_scale_inv": (56, 144)},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "FP8 in blocks",
        (7168, 18432),
        (128, 128),
    ),
    "blocks that do not divide": (
        {f"{X}.weight": (576, 7168), f"{X}.weight_scale_inv": (5, 56)},
        {},
        "FP8 in blocks",
        (576, 7168),
        (128, 128),
    ),
    "neuralmagic FP8-dynamic": (
        {f"{X}.weight": (4096, 14336), f"{X}.weight_scale": (4096, 1)},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "scaled 8-bit",
        (4096, 14336),
        (1, 1),
    ),
    "static FP8 of ModelOpt": (
        {f"{X}.weight": (4096, 14336), f"{X}.weight_scale": (), f"{X}.input_scale": ()},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "scaled 8-bit",
        (4096, 14336),
        (1, 1),
    ),
    "nvidia NVFP4": (
        {
            f"{X}.weight": (4096, 7168),
            f"{X}.weight_scale": (4096, 896),
            f"{X}.weight_scale_2": (),
            f"{X}.input_scale": (),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4 of ModelOpt",
        (4096, 14336),
        (1, 16),
    ),
    "w4a16 with zero points": (
        {
            f"{X}.weight_packed": (4096, 1792),
            f"{X}.weight_scale": (4096, 112),
            f"{X}.weight_zero_point": (512, 112),
            f"{X}.weight_shape": (2,),
        },
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
        },
        "packed compressed-tensors",
        (4096, 14336),
        (8, 128),
    ),
    "TheBloke GPTQ": (
        {
            f"{X}.qweight": (1792, 4096),
            f"{X}.qzeros": (112, 512),
            f"{X}.scales": (112, 4096),
            f"{X}.g_idx": (14336,),
        },
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        "GPTQ",
        (4096, 14336),
        (8, 128),
    ),
    "GPTQ of 3 bits": (
        {
            f"{X}.qweight": (1344, 4096),
            f"{X}.qzeros": (112, 384),
            f"{X}.scales": (112, 4096),
            f"{X}.g_idx": (14336,),
        },
        {"quant_method": "gptq", "bits": 3, "group_size": 128, "desc_act": False},
        "GPTQ",
        (4096, 14336),
        (32, 128),
    ),
    "TheBloke AWQ": (
        {f"{X}.qweight": (14336, 512), f"{X}.qzeros": (112, 512), f"{X}.scales": (112, 4096)},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        "AWQ",
        (4096, 14336),
        (8, 128),
    ),
    "int8 of bitsandbytes": (
        {f"{X}.weight": (4096, 14336), f"{X}.SCB": (4096,), f"{X}.weight_format": ()},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes 8-bit",
        (4096, 14336),
        (1, 1),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_published_names_and_shapes(name: str) -> None:
    stored, config, method, shape, groups = FOUND[name]
    for given in (
        {"quantization_config": config},
        {"text_config": {"quantization_config": config}},
    ):
        (found,) = find_quantized(stored, given).values()
        assert (found.name, found.method) == (f"{X}.weight", method)
        assert (found.shape, found.groups, found.uncut) == (shape, groups, {})
        assert set(found.members) == set(stored)


def test_experts_of_gpt_oss_are_stored_output_by_input() -> None:
    stored = {
        "e.gate_up_proj_blocks": (32, 5760, 90, 16),
        "e.gate_up_proj_scales": (32, 5760, 90),
        "e.gate_up_proj_bias": (32, 5760),
    }
    (found,) = find_quantized(stored).values()
    assert (found.name, found.shape) == ("e.gate_up_proj", (32, 2880, 5760))
    assert found.groups == (1, 32, 1)
    assert [one.dimension for one in found.members["e.gate_up_proj_blocks"]] == [0, 2, 1, None]


def test_scales_of_stacked_experts_follow_the_expert_dimension() -> None:
    stored = {"e.down_proj": (8, 4096, 1536), "e.down_proj_scale_inv": (8, 32, 12)}
    (found,) = find_quantized(stored).values()
    assert (found.shape, found.groups) == ((8, 4096, 1536), (1, 128, 128))


def test_flat_rows_are_whole_blocks() -> None:
    shapes = {
        f"{X}.weight": (4096 * 96 // 2, 1),
        f"{X}.weight.absmax": (4096 * 96 // 64,),
        f"{X}.weight.quant_map": (16,),
        f"{X}.weight.quant_state.bitsandbytes__nf4": (80,),
    }
    logical = {f"{X}.weight": (4096, 96)}
    (found,) = find_quantized(shapes, logical_shapes=logical).values()
    # 96 columns: two rows are three blocks of 64.
    assert (found.shape, found.groups, set(found.uncut)) == ((4096, 96), (2, 1), {1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm', of which it is not known"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' of awq"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
    ],
)
def test_unknown_methods_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(UncomputableError, match=message):
        find_quantized({"a.weight": (8, 8)}, {"quantization_config": config})
    shapes = {"a.weight": (8, 8)}
    assert find_quantized(shapes, {"quantization_config": config}, is_lenient=True) == {}


def test_an_unknown_tensor_of_a_quantised_module_is_refused() -> None:
    stored = {f"{X}.weight": (256, 256), f"{X}.weight_scale_inv": (2, 2), f"{X}.pre_scale": (256,)}
    with pytest.raises(UncomputableError, match="pre_scale' is next to the quantised weight"):
        find_quantized(stored)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({f"{X}.weight": (300, 256), f"{X}.weight_scale_inv": (7, 2)}, "7 groups of 300 elements"),
        ({f"{X}.qweight": (10, 7), f"{X}.scales": (3, 9), f"{X}.qzeros": (3, 1)}, "qweight"),
        ({f"{X}.weight": (8, 1), f"{X}.weight.absmax": (1,)}, "quant_state"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(stored: Shapes, message: str) -> None:
    with pytest.raises(UncomputableError, match=message):
        find_quantized(stored)


def test_ordinary_weights_are_not_quantised() -> None:
    assert find_quantized({"a.weight": (8, 8), "a.bias": (8,), "b.scale": ()}) == {}
    assert quantization_config(None) == {}


@pytest.mark.parametrize("published", FOUND)
def test_layers_alike_are_found_as_each_alone(published: str) -> None:
    shapes, config, *_ = FOUND[published]
    many = {
        name.replace(".0.", f".{layer}."): shape
        for layer in (0, 7, 12)
        for name, shape in shapes.items()
    }
    given = {"quantization_config": config}
    alone = {}
    for layer in (0, 7, 12):
        own = {name: shape for name, shape in many.items() if f".{layer}." in name}
        alone |= find_quantized(own, given)
    assert find_quantized(many, given) == alone
    assert len(alone) == 3


UP = "layers.0.up_proj"
FP8, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"


def lacking(types: dict[str, str], *, is_quantized: bool = True) -> dict[str, str]:
    """What is missing; scales have one dimension, others two."""
    dims = {name: 1 if "scale" in name else 2 for name in types}
    return find_missing_scales(list_codes(types, dims, is_quantized=is_quantized), types)


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


def test_missing_scales_are_described_by_the_first_and_their_number() -> None:
    assert "2 quantised weights in m lack their scales: 'a' has no 'a_scale' and 1 more" in (
        describe_missing_scales({"a": "a_scale", "b": "b_scale"}, "m")
    )
    assert "'a' has no scale of a name that is known" in describe_missing_scales({"a": ""}, "m")
