"""Checkpoints converted to other element types, quantised and back, against torch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard.checkpoint
from reshard.checkpoint.blocks import grid
from reshard.errors import RecipeError, UsageError
from selection import keep_covering

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0."
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


def make_tensors() -> Tensors:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (301, 256),
        f"{LAYER}self_attn.q_proj.weight": (512, 256),
        f"{LAYER}self_attn.k_proj.weight": (256, 256),
        f"{LAYER}self_attn.o_proj.weight": (256, 512),
        f"{LAYER}mlp.up_proj.weight": (700, 256),
        f"{LAYER}mlp.down_proj.weight": (256, 700),
        f"{LAYER}input_layernorm.weight": (256,),
        "lm_head.weight": (301, 256),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["lm_head.weight"][:, 3] = 7e4
    tensors["lm_head.weight"][5, 5] = torch.nan
    return tensors


def write(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def read(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def expect_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in type and in every bit, but for those of what is no number."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


SPELLINGS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@pytest.fixture(params=[None, 30_000])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Blocks of the usual size, and such as cut rows of 128 anywhere."""
    if request.param is not None:
        monkeypatch.setattr(grid, "BLOCK_BYTES", request.param)
    size: int | None = request.param
    return size


@pytest.mark.parametrize(
    ("kind", "source", "block_bytes"),
    keep_covering(
        2,
        itertools.product(
            SPELLINGS,
            (torch.float32, torch.bfloat16, torch.float16, torch.float64),
            (None, 30_000),
        ),
        "another block size for a pair of types",
    ),
    indirect=["block_bytes"],
)
def test_a_cast_is_that_of_torch(
    tmp_path: Path, kind: torch.dtype, source: torch.dtype, block_bytes: int | None
) -> None:
    tensors = {n: value.to(source) for n, value in make_tensors().items()}
    tensors["positions"] = torch.arange(7)
    model = write(tmp_path / "model", tensors)
    report = reshard.checkpoint.convert(model, tmp_path / "new", to="tp=2", recipe="auto",
        dtype=SPELLINGS[kind], rules=["positions=..."], allow=["incomplete"])  # fmt: skip
    reshard.checkpoint.convert(tmp_path / "new", tmp_path / "whole", to="full")
    found = read(tmp_path / "whole")
    assert torch.equal(found.pop("positions"), torch.arange(7))
    for n, value in found.items():
        # torch rounds float64 twice on the way to 16 bits; what is random here never meets that.
        expect_equal(value, tensors[n].to(kind))
    said = " ".join(report.notes)
    assert ("301 elements were too great" in said) == (
        kind == torch.float16 and source != torch.float16
    )
    if source != kind:
        assert "no number (NaN)" in said


def test_float64_is_rounded_once(tmp_path: Path) -> None:
    """Half way between two bfloat16, and a little more than float32 can tell."""
    beyond = 1 + 2**-8 + 2**-40
    value = torch.tensor([beyond, 1 + 2**-8, -beyond], dtype=torch.float64)
    model = write(tmp_path / "model", {"w": value})
    reshard.checkpoint.convert(model, tmp_path / "new", to="full", dtype="bf16")
    assert read(tmp_path / "new")["w"].tolist() == [1 + 2**-7, 1, -(1 + 2**-7)]


def test_config_has_the_new_type(tmp_path: Path) -> None:
    model = write(tmp_path / "model", make_tensors(), torch_dtype="float32")
    reshard.checkpoint.convert(model, tmp_path / "new", to="full", dtype="bf16")
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == CONFIG | {
        "torch_dtype": "bfloat16"
    }


def test_float32_of_a_model_of_16_bits_stays(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors = {n: v.bfloat16() for n, v in tensors.items()} | {"router.bias": torch.randn(3)}
    model = write(tmp_path / "model", tensors, dtype="bfloat16")
    report = reshard.checkpoint.convert(model, tmp_path / "new", to="full", dtype="fp16")
    found = read(tmp_path / "new")
    assert found["router.bias"].dtype == torch.float32
    assert found["lm_head.weight"].dtype == torch.float16
    assert any("1 tensor in float32 are not cast (first: router.bias)" in n for n in report.notes)


def quantize(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 and scales of blocks of 128 by 128, by torch."""
    rows, columns = (-(-size // 128) for size in value.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: value.shape[0], : value.shape[1]] = value.float()
    scales = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
    return (value.float() / widen(scales, value)).to(torch.float8_e4m3fn), scales


def widen(scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide[: like.shape[0], : like.shape[1]]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_blocks_of_float8_there_and_back(
    tmp_path: Path, kind: torch.dtype, block_bytes: int | None
) -> None:
    tensors = {name: value.to(kind) for name, value in make_tensors().items()}
    model = write(tmp_path / "model", tensors)
    quantized, cut, back = (tmp_path / name for name in ("quantized", "cut", "back"))
    reshard.checkpoint.convert(model, quantized, to="full", quantize="fp8-block128")
    found = read(quantized)
    matrices = [n for n, v in tensors.items() if n.startswith(LAYER) and v.ndim == 2]
    for name in matrices:
        values, scales = quantize(tensors[name])
        assert torch.equal(found[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(found[f"{name}_scale_inv"], scales)
    assert set(found) == {*tensors, *(f"{name}_scale_inv" for name in matrices)}
    config = json.loads((quantized / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    # What was quantised here is cut as any other such model, and comes back from its shards.
    reshard.checkpoint.convert(quantized, cut, to="tp=2", recipe="auto", allow=["incomplete"])
    reshard.checkpoint.convert(cut, back, to="full", dequantize=True, dtype="fp32")
    for name, value in read(back).items():
        if name in matrices:
            expected = found[name].float() * widen(found[f"{name}_scale_inv"], value)
            assert torch.equal(value, expected)
        else:
            expect_equal(value, tensors[name].float())
    assert json.loads((back / "config.json").read_text()) == CONFIG


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def make_lacking() -> Tensors:
    """Two weights of FP8, one of which has no scale."""
    codes = torch.ones(256, 128).to(torch.float8_e4m3fn)
    up, down = f"{LAYER}mlp.up_proj.weight", f"{LAYER}mlp.down_proj.weight"
    return {up: codes, down: codes.clone(), f"{down}_scale_inv": torch.full((2, 1), 2.0)}


@pytest.mark.parametrize(
    "arguments",
    [{"dequantize": True}, {"dtype": "bf16"}, {"quantize": "fp8-block128"}],
)
def test_a_weight_without_its_scale_is_refused(tmp_path: Path, arguments: Any) -> None:
    model = write(tmp_path / "model", make_lacking(), quantization_config=FP8_CONFIG)
    says = r"1 quantised weight in .*'model.layers.0.mlp.up_proj.weight' has no .*_scale_inv'"
    with pytest.raises(RecipeError, match=says):
        reshard.checkpoint.convert(model, tmp_path / "new", to="full", **arguments)
    assert not (tmp_path / "new").exists()


def test_the_note_does_not_need_a_config_that_can_be_read(tmp_path: Path) -> None:
    model = write(tmp_path / "model", make_lacking())
    (model / "config.json").write_text("{")
    plan = reshard.checkpoint.plan_conversion(model, tmp_path / "new", to="full")
    assert any("lacks its scale" in note for note in plan.source.notes)
    codes = {f"{LAYER}mlp.up_proj.weight": torch.ones(4, 4, dtype=torch.int8)}
    save_file(codes, model / "model.safetensors")
    plan = reshard.checkpoint.plan_conversion(model, tmp_path / "new", to="full")
    assert any("1 quantised weight" in note for note in plan.source.notes)
    (model / "config.json").write_text("{}")
    assert not reshard.checkpoint.plan_conversion(model, tmp_path / "new", to="full").source.notes


def test_a_weight_without_its_scale_is_copied_with_a_note(tmp_path: Path) -> None:
    model = write(tmp_path / "model", make_lacking(), quantization_config=FP8_CONFIG)
    plan = reshard.checkpoint.plan_conversion(model, tmp_path / "new", to="full")
    assert any("lacks its scale" in note for note in plan.source.notes)
    # Accepted, it stays as it is, and so does what config.json says of it.
    reshard.checkpoint.convert(
        model, tmp_path / "new", to="full", dequantize=True, allow=["unscaled"]
    )
    found = read(tmp_path / "new")
    assert found[f"{LAYER}mlp.up_proj.weight"].dtype is torch.float8_e4m3fn
    assert (found[f"{LAYER}mlp.down_proj.weight"] == 2).all()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["quantization_config"] == FP8_CONFIG
    # Left out, nothing is lacking.
    reshard.checkpoint.convert(
        model, tmp_path / "rest", to="full", dequantize=True, exclude=["*.up_proj.*"]
    )
    assert "quantization_config" not in (tmp_path / "rest" / "config.json").read_text()


def test_quantisation_is_removed_from_nested_configs(tmp_path: Path) -> None:
    tensors = make_lacking()
    del tensors[f"{LAYER}mlp.up_proj.weight"]
    deep = {"text_config": {"quantization_config": FP8_CONFIG, "hidden_size": 1}}
    model = write(tmp_path / "model", tensors, thinker_config=deep)
    reshard.checkpoint.convert(model, tmp_path / "new", to="full", dequantize=True)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["thinker_config"] == {"text_config": {"hidden_size": 1}}


@pytest.mark.parametrize("experts", [(), (3,)])
def test_scales_of_four_dimensions(experts: tuple[int, ...], tmp_path: Path) -> None:
    """As ModelOpt writes those of blocks: [rows, 1, columns, 1]."""
    name = f"{LAYER}mlp.up_proj.weight" if not experts else f"{LAYER}mlp.experts.up_proj"
    codes = torch.randn(*experts, 384, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(*experts, 3, 1, 2, 1)
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    tensors = {name: codes, f"{name}_scale": scales}
    model = write(tmp_path / "model", tensors, quantization_config=quantization)
    reshard.checkpoint.convert(model, tmp_path / "new", to="full", dequantize=True, dtype="fp32")
    wide = scales.squeeze(-1).squeeze(-2).repeat_interleave(128, -2).repeat_interleave(128, -1)
    expected = codes.float() * wide[..., :384, :200]
    assert torch.equal(read(tmp_path / "new")[name], expected)


def test_an_interrupted_cast_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "BLOCK_BYTES", 30_000)
    model = write(tmp_path / "model", make_tensors())
    arguments = {"to": "tp=2", "recipe": "auto", "dtype": "bf16", "allow": ["incomplete"]}

    def stop(progress: object) -> None:
        if getattr(progress, "done_bytes", 0) > 200_000:
            raise KeyboardInterrupt

    with pytest.raises(reshard.errors.InterruptedRunError):
        reshard.checkpoint.convert(model, tmp_path / "new", progress=stop, **arguments)
    report = reshard.checkpoint.convert(model, tmp_path / "new", **arguments)
    assert 0 < report.resumed_bytes < report.size_bytes
    again = reshard.checkpoint.convert(model, tmp_path / "other", **(arguments | {"dtype": "fp16"}))
    assert again.resumed_bytes == 0
    reshard.checkpoint.convert(tmp_path / "new", tmp_path / "whole", to="full")
    for name, value in read(tmp_path / "whole").items():
        expect_equal(value, make_tensors()[name].bfloat16())


def test_members_are_cast_and_fused_at_once(tmp_path: Path) -> None:
    tensors = make_tensors() | {
        f"{LAYER}self_attn.v_proj.weight": torch.randn(256, 256),
        f"{LAYER}mlp.gate_proj.weight": torch.randn(700, 256),
    }
    model = write(tmp_path / "model", tensors)
    names = {"target_names": "vllm", "recipe": "auto", "dtype": "bf16", "allow": ["incomplete"]}
    reshard.checkpoint.convert(model, tmp_path / "new", to="full", **names)
    found = read(tmp_path / "new")[f"{LAYER}self_attn.qkv_proj.weight"]
    fused = torch.cat([tensors[f"{LAYER}self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(found, fused.bfloat16())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "'int8'; elements are cast to bf16, fp16 or fp32"),
        ({"dequantize": True}, "is quantised, by its names"),
        ({"quantize": "int4"}, "'int4'; expected one of fp8-block128"),
        ({"quantize": "fp8-block128", "dequantize": True}, "in two steps"),
        ({"dequantize": True, "target_names": {"a": "b"}}, "cannot go together"),
    ],
)
def test_impossible_changes_are_refused(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    model = write(tmp_path / "model", make_tensors())
    with pytest.raises(UsageError, match=message):
        reshard.checkpoint.convert(model, tmp_path / "new", to="full", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("is_given", [False, True])
def test_load_casts_as_convert_does(tmp_path: Path, is_given: bool) -> None:
    tensors = make_tensors() | {"positions": torch.arange(7)}
    model = write(tmp_path / "model", tensors)
    mesh = reshard.DeviceMesh.of(tp=2)
    layouts = {
        name: reshard.spec(mesh, "tp, ...", ndim=value.ndim).layout(tuple(value.shape))
        for name, value in tensors.items()
    }
    out = None
    if is_given:
        out = {
            name: np.empty(
                layout.local_shape(1) or (), np.int64 if name == "positions" else np.uint16
            )
            for name, layout in layouts.items()
        }
    found = reshard.checkpoint.load(model, layouts, 1, out=out, dtype="bf16")
    for name, array in found.items():
        whole = tensors[name] if name == "positions" else tensors[name].bfloat16()
        expected = whole.chunk(2)[1]
        if name == "positions":
            assert array.tolist() == expected.tolist()
            continue
        own = torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        expect_equal(own, expected)
