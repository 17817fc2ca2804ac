"""What tensors are computed from is compared with recorded digests, however it is read."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard import checkpoint
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.blocks.block_io import open_sources
from reshard.checkpoint.blocks.grid import BlockGrid
from reshard.checkpoint.changes import source_digests
from reshard.checkpoint.changes.source_digests import SourceDigests
from reshard.errors import DigestError
from reshard.layout import Box

SHAPE = (7, 10, 6)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 bytes, so that small tensors have many."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 128)


@pytest.fixture
def written(tmp_path: Path, small_blocks: None) -> Path:
    """A checkpoint with a manifest."""
    random = np.random.default_rng(0)
    tensors = {
        "model.layers.0.up_proj.weight": random.standard_normal(SHAPE, np.float32),
        "small": np.arange(6, dtype=np.float32),
    }
    (tmp_path / "plain").mkdir()
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps({"model_type": "x"}))
    checkpoint.convert(tmp_path / "plain", tmp_path / "written", to="full")
    return tmp_path / "written"


def damage(folder: Path, name: str, at: int = 0) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[checkpoint.open(folder)[name].file_range(0).start_bytes + at] ^= 255
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["model.layers.0.up_proj.weight", "small"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_cast_refuses_damaged_bytes(written: Path, name: str, threads: int) -> None:
    narrow = written.with_name("narrow")
    checkpoint.convert(written, narrow, to="full", dtype="fp16", threads=threads)
    checkpoint.convert(narrow, written.with_name("wide"), to="full", dtype="fp32", threads=threads)
    for folder, dtype in ((written, "fp16"), (narrow, "fp32")):
        for at in (0, 7) if name == "small" else (0, 500, 830):
            damage(folder, name, at)
            with pytest.raises(DigestError, match=f"tensor '{name}', is not what was written"):
                checkpoint.convert(
                    folder, written.with_name("out"), to="full", dtype=dtype, threads=threads
                )
            assert not written.with_name("out").exists()
            damage(folder, name, at)


def part_of(whole: Any, box: Box) -> Any:
    return whole[tuple(map(slice, box.start, box.stop))]


def list_boxes(step: int) -> list[Box]:
    grid = BlockGrid.of(SHAPE, step)
    return [grid.box(number) for number in range(grid.count)]


@pytest.mark.parametrize("step", [1, 2, 8, 16])
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_blocks_are_compared_in_any_pieces(written: Path, step: int, order: str) -> None:
    opened = checkpoint.open(written)
    tensor = opened["model.layers.0.up_proj.weight"]
    whole = checkpoint.read_tensor(opened, tensor.name)
    boxes = list_boxes(step)
    if order != "forward":
        boxes = boxes[::-1] if order == "backward" else random.Random(0).sample(boxes, len(boxes))
    with_damage = whole.copy()
    with_damage[3, 3, 3] += 1
    files = open_sources(opened)
    try:
        digests = SourceDigests(files)
        for box in boxes:
            digests.add(tensor, box, part_of(whole, box))
        # Every block was compared as its last piece came: none is read again.
        assert digests._complete == {tensor.name}
        damaged = SourceDigests(files)
        with pytest.raises(DigestError):
            [damaged.add(tensor, box, part_of(with_damage, box)) for box in boxes]
    finally:
        files.close()


def test_blocks_read_in_part_are_read_again(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = checkpoint.open(written)
    tensor = opened["model.layers.0.up_proj.weight"]
    whole = checkpoint.read_tensor(opened, tensor.name)
    parts = [Box((0, 0, 0), (1, 1, 3)), Box((0, 0, 2), (7, 10, 3)), Box((6, 9, 5), (7, 10, 6))]
    for kept, part in itertools.product((0, 1 << 20), parts):
        monkeypatch.setattr(source_digests, "MAX_KEPT_BYTES", kept)
        files = open_sources(opened)
        digests = SourceDigests(files)
        digests.add(tensor, part, part_of(whole, part))
        assert not digests._complete
        digests.verify_rest(2)
        digests.verify_rest(1)
        files.close()
    damage(written, tensor.name, 4 * 419)
    opened = checkpoint.open(written)
    files = open_sources(opened)
    for part, is_read in zip(parts, (False, True, True), strict=True):
        digests = SourceDigests(files)
        digests.add(opened[tensor.name], part, part_of(whole, part))
        if is_read:
            with pytest.raises(DigestError, match="is not what was written"):
                digests.verify_rest(1)
        else:
            digests.verify_rest(1)
    files.close()


def test_other_changes_refuse_damaged_bytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    name = "model.layers.0.up_proj.weight"
    folder = tmp_path / "plain"
    folder.mkdir()
    weight = random.standard_normal((200, 160), np.float32)
    save_file({name: weight}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "x"}')
    written, quantized = tmp_path / "written", tmp_path / "quantized"
    checkpoint.convert(folder, written, to="full")
    checkpoint.convert(written, quantized, to="full", quantize="fp8-block128")
    cases: list[tuple[Path, dict[str, Any]]] = [
        (written, {"quantize": "fp8-block128"}),
        (quantized, {"dequantize": True, "dtype": "fp32"}),
    ]
    for source, arguments in cases:
        damage(source, name, 77)
        with pytest.raises(DigestError, match=f"tensor '{name}', is not what was written"):
            checkpoint.convert(source, tmp_path / "out", to="full", **arguments)


def write_small_llama(folder: Path) -> Path:
    """A Llama of one layer with a manifest."""
    shapes = {
        "model.embed_tokens.weight": (32, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (32, 8),
        **{f"model.layers.0.self_attn.{one}_proj.weight": (8, 8) for one in "qo"},
        **{f"model.layers.0.self_attn.{one}_proj.weight": (4, 8) for one in "kv"},
        **{f"model.layers.0.mlp.{one}_proj.weight": (16, 8) for one in ("gate", "up")},
        "model.layers.0.mlp.down_proj.weight": (8, 16),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.post_attention_layernorm.weight": (8,),
    }
    random = np.random.default_rng(1)
    folder.mkdir()
    tensors = {name: random.standard_normal(one, np.float32) for name, one in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint.convert(folder, folder.with_name("written"), to="full")
    return folder.with_name("written")


@pytest.mark.parametrize("change", [{}, {"dtype": "bf16"}])
@pytest.mark.parametrize("cut", [None, "*=tp, ...", "*=..., tp"])
def test_parts_of_fused_tensors_are_compared(
    tmp_path: Path, change: dict[str, Any], cut: str | None, small_blocks: None
) -> None:
    source = write_small_llama(tmp_path / "plain")
    if cut is not None:
        checkpoint.convert(source, tmp_path / "cut", to="tp=2", rules=["*norm*=...", cut])
        source = tmp_path / "cut"
    names: dict[str, Any] = {"to": "full", "recipe": "llama", "target_names": "megatron"}
    planned = checkpoint.plan_conversion(source, tmp_path / "fused", **names, **change)
    assert {one.name.split(".")[-2] for one in planned.apart} == {
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }
    checkpoint.run_conversion(planned)
    for name in ("self_attn.k_proj", "self_attn.q_proj", "mlp.up_proj"):
        tensor = checkpoint.open(source)[f"model.layers.0.{name}.weight"]
        place = tensor.file_range(tensor.stored_slots[-1])
        content = bytearray((source / place.path).read_bytes())
        content[place.start_bytes + 17] ^= 255
        before = (source / place.path).read_bytes()
        (source / place.path).write_bytes(bytes(content))
        with pytest.raises(DigestError, match=f"{name}.weight', is not what was written"):
            checkpoint.convert(source, tmp_path / "out", **names, **change)
        (source / place.path).write_bytes(before)
    back = {"to": "full", "recipe": "llama", "source_names": "megatron"}
    checkpoint.convert(tmp_path / "fused", tmp_path / "back", **back)
    damage(tmp_path / "fused", "decoder.layers.0.self_attention.linear_qkv.weight", 50)
    with pytest.raises(DigestError, match=r"linear_qkv\.weight', is not what was written"):
        checkpoint.convert(tmp_path / "fused", tmp_path / "out", **back)
