"""Small tensors that become another type or are computed are made together, and are right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard.checkpoint
from reshard.checkpoint.blocks import grid
from reshard.checkpoint.blocks.block_io import BlockReader, BlockWriter
from reshard.checkpoint.blocks.grid import block_digest
from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.changes.computed_tensors import ComputedReader

Calls = dict[str, int]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """How often batches were read and written, and blocks computed one by one."""
    counted: Calls = {}

    def count(kind: type, name: str) -> None:
        method = getattr(kind, name)
        key = f"{kind.__name__}.{name}"
        counted[key] = 0

        def called(*args: object, **keywords: object) -> object:
            counted[key] += 1
            return method(*args, **keywords)

        monkeypatch.setattr(kind, name, called)

    count(BlockReader, "read")
    count(BlockWriter, "write")
    count(ComputedReader, "read_checked")
    return counted


def make_tensors(count: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes, some of which are no numbers or too great."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for n in range(count):
        tensors[f"{n:03}.up"] = torch.randn(6, 5) * 10.0 ** (n % 7)
        tensors[f"{n:03}.down"] = torch.randn(3, 4, 2).to(torch.bfloat16)
        tensors[f"{n:03}.scale"] = torch.randn(())
    tensors["wide"] = torch.randn(7, dtype=torch.float64)
    tensors["ids"] = torch.arange(11)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["000.up"][0, :3] = torch.tensor([torch.nan, torch.inf, 7e4])
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def expect_cast(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert found.keys() == tensors.keys()
    for name, before in tensors.items():
        expected = before.to(torch.float16) if before.is_floating_point() else before
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name].nan_to_num(1.5), expected.nan_to_num(1.5)), name


def test_small_tensors_of_several_types_are_cast_together(tmp_path: Path, calls: Calls) -> None:
    tensors = make_tensors(60)
    source = write(tmp_path / "source", tensors)
    report = reshard.checkpoint.convert(source, tmp_path / "target", to="full", dtype="fp16")
    assert calls["ComputedReader.read_checked"] == 0
    # What is cast and what is not are apart: a few batches, not one for each of 183.
    assert calls["BlockReader.read"] == calls["BlockWriter.write"] <= 6
    expect_cast(load_file(tmp_path / "target" / "model.safetensors"), tensors)
    floats = [one for one in tensors.values() if one.is_floating_point()]
    great = sum(int((one.half().isinf() & one.isfinite()).sum()) for one in floats)
    assert any(note.startswith(f"{great} elements were too great") for note in report.notes)
    assert any("2 elements read were infinite or no number" in note for note in report.notes)


def test_cast_tensors_are_sharded_with_digests_of_the_written_bytes(
    tmp_path: Path, calls: Calls
) -> None:
    tensors = make_tensors(20)
    source = write(tmp_path / "source", tensors)
    cut = tmp_path / "cut"
    reshard.checkpoint.convert(source, cut, to="tp=2", rules=["*.up=tp, -", "*=..."], dtype="fp16")
    assert calls["ComputedReader.read_checked"] == 0
    found = reshard.checkpoint.open(cut)
    for name in ("000.up", "017.up", "003.down", "wide", "ids"):
        tensor = found[name]
        array = reshard.checkpoint.read_tensor(found, name)
        assert tensor.digest is not None
        assert tensor.digest.blocks == (block_digest(array.tobytes()),)
    assert not reshard.checkpoint.check_digests(cut).damaged
    back = tmp_path / "back"
    reshard.checkpoint.convert(cut, back, to="full")
    expect_cast(load_file(back / "model.safetensors"), tensors)


def test_large_and_small_tensors_that_are_cast_come_in_any_order(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 a tensor may have several blocks that has one in float16."""
    monkeypatch.setattr(grid, "BLOCK_BYTES", 1 << 10)
    torch.manual_seed(1)
    # 256 elements are a block of float32, 512 one of float16.
    sizes = [40, 256, 257, 300, 512, 513, 40, 2000, 8, 8]
    tensors = {f"{n}": torch.randn(size) for n, size in enumerate(sizes)}
    source = write(tmp_path / "source", tensors)
    reshard.checkpoint.convert(source, tmp_path / "target", to="full", dtype="fp16")
    # 257, 300 and 512 elements in one block each, 513 in two, 2,000 in four.
    assert calls["ComputedReader.read_checked"] == 9
    expect_cast(load_file(tmp_path / "target" / "model.safetensors"), tensors)


def test_the_least_memory_is_enough_for_casts(tmp_path: Path) -> None:
    tensors = make_tensors(30)
    source = write(tmp_path / "source", tensors)
    conversion = reshard.checkpoint.plan_conversion(
        source, tmp_path / "target", to="full", dtype="fp16"
    )
    least = conversion.workspace_bytes
    assert conversion.extra_bytes(least) <= least
    reshard.checkpoint.run_conversion(conversion, extra_bytes=least)
    expect_cast(load_file(tmp_path / "target" / "model.safetensors"), tensors)


def test_tensors_kept_in_float32_are_copied_while_others_are_cast(tmp_path: Path) -> None:
    tensors = {f"{n}.a": torch.randn(4) for n in range(5)}
    tensors |= {f"{n}.b": torch.randn(4).to(torch.bfloat16) for n in range(5)}
    source = write(tmp_path / "source", tensors, dtype="bfloat16")
    report = reshard.checkpoint.convert(source, tmp_path / "target", to="full", dtype="fp16")
    found = load_file(tmp_path / "target" / "model.safetensors")
    for name, before in tensors.items():
        assert torch.equal(found[name], before if name.endswith("a") else before.half())
    assert any(
        note.startswith("5 tensors in float32 are not cast (first: 0.a)") for note in report.notes
    )


def test_small_quantised_weights_are_written_together(tmp_path: Path, calls: Calls) -> None:
    torch.manual_seed(2)
    weights = {f"model.layers.{n}.mlp.up_proj": torch.randn(3, 4) for n in range(30)}
    stored = {f"{name}.weight": one.to(torch.float8_e4m3fn) for name, one in weights.items()}
    scales = {f"{name}.weight_scale_inv": torch.full((1, 1), 0.5) for name in weights}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    source = write(tmp_path / "source", {**stored, **scales}, **config)
    reshard.checkpoint.convert(source, tmp_path / "target", to="full", dequantize=True)
    assert calls["ComputedReader.read_checked"] == 30
    assert calls["BlockWriter.write"] <= 2
    found = load_file(tmp_path / "target" / "model.safetensors")
    for name, one in stored.items():
        assert torch.equal(found[name], (one.float() * 0.5).to(torch.bfloat16))


def test_columns_of_casts_are_a_mapping_of_those_that_are_cast(tmp_path: Path) -> None:
    source = write(tmp_path / "source", make_tensors(3))
    conversion = reshard.checkpoint.plan_conversion(
        source, tmp_path / "target", to="full", dtype="fp16"
    )
    stored = TensorColumns.of(reshard.checkpoint.open(source).tensors)
    casts = conversion.computed
    assert [*casts] == [name for name in stored if name != "ids"]
    assert len(casts) == len(stored) - 1
    assert "ids" not in casts
    assert "none" not in casts
    assert casts["001.down"].dtype.name == "float16"
    assert casts["001.down"].sources[0] == stored["001.down"]
    with pytest.raises(KeyError):
        casts["ids"]
    assert np.array_equal(conversion.work_items.source_rows >= 0, np.ones(len(stored), bool))
