"""Conversions for vLLM by recorded layouts: files have what these say, element by element."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard.checkpoint as checkpoints
from checkpoint.checkpoint_files import build_header
from reshard.checkpoint.conversion.run import run_conversion
from reshard.checkpoint.engines.conversion import plan_for_vllm
from reshard.checkpoint.formats.vllm_sharded_state import rank_prefix
from reshard.checkpoint.loading.arrays import read_tensor
from reshard.errors import RecipeError, UsageError
from reshard.mesh import DeviceMesh
from reshard.plans.serialization import from_json
from reshard.recipes.engine_layouts import EngineLayout

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "vllm"


def recorded(family: str, text: str) -> EngineLayout:
    layouts = json.loads((GOLDEN / f"{family}.json").read_text())["layouts"]
    layout: EngineLayout = from_json(json.dumps(layouts[text]))
    return layout


def write_checkpoint(folder: Path, layout: EngineLayout) -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint of the layout's sources, with random values in one file."""
    random = np.random.default_rng(0)
    arrays = {
        name: random.normal(size=source.shape).astype(source.dtype.numpy)
        for name, source in layout.sources.items()
    }
    folder.mkdir(parents=True)
    header, _ = build_header([(n, s.dtype, s.shape) for n, s in layout.sources.items()])
    content = b"".join(array.tobytes() for array in arrays.values())
    (folder / "model.safetensors").write_bytes(header + content)
    (folder / "config.json").write_text("{}")
    return arrays


def expected(layout: EngineLayout, rank: int, name: str, arrays: dict[str, Any]) -> Any:
    """A parameter put together element by element."""
    parameter = layout.rank(rank)[name]
    found = np.zeros(parameter.shape, dtype=parameter.dtype.numpy)
    for piece in parameter.pieces:
        inside = tuple(slice(a, b) for a, b in zip(*piece.box, strict=True))
        flat = arrays[piece.source].reshape(-1)
        found[inside] = flat[piece.view.positions(piece.box.shape)].astype(found.dtype)
    for one in parameter.computed:
        inside = tuple(slice(a, b) for a, b in zip(*one.box, strict=True))
        assert one.view is not None
        assert one.operations == ("to float32", "exp", "neg")
        values = arrays[one.sources[0]].reshape(-1)[one.view.positions(one.box.shape)]
        found[inside] = -np.exp(values.astype(np.float32))
    for constant in parameter.constants:
        found[tuple(slice(a, b) for a, b in zip(*constant.box, strict=True))] = constant.value
    return found


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama-8", "tp=2"),
        ("qwen3-moe", "tp=2"),
        ("gpt-oss", "tp=2"),
        ("deepseek-v3", "tp=3"),
        ("mamba2", "tp=2"),
        ("granite-hybrid", "tp=2"),
    ],
)
def test_every_parameter_of_every_rank(family: str, text: str, tmp_path: Path) -> None:
    layout = recorded(family, text)
    arrays = write_checkpoint(tmp_path / "model", layout)
    conversion = plan_for_vllm(tmp_path / "model", tmp_path / "out", layout)
    run_conversion(conversion, extra_bytes=64 << 20)
    written = checkpoints.open(tmp_path / "out")
    sizes = dict(zip(layout.mesh.axis_names, layout.mesh.shape, strict=True))
    seen = 0
    for rank in layout.ranks:
        prefix = rank_prefix(rank.rank, sizes.get("tp", 1), sizes.get("pp", 1))
        tied = {name for group in rank.tied for name in sorted(group)[1:]}
        for name in rank.parameters:
            if name in tied:
                assert f"{prefix}/{name}" not in written.tensors
                continue
            got = read_tensor(written, f"{prefix}/{name}")
            right = expected(layout, rank.rank, name, arrays)
            assert got.dtype == right.dtype
            if layout.rank(rank.rank)[name].computed:
                # PyTorch's exp and NumPy's may differ in the last bit.
                assert np.allclose(got, right, rtol=2e-7, atol=0), name
            else:
                assert got.tobytes() == right.tobytes(), name
            seen += 1
    assert seen == len(written.tensors)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_sharded_source_is_bound_part_by_part(tmp_path: Path) -> None:
    layout = recorded("qwen3-moe", "tp=2")
    write_checkpoint(tmp_path / "model", layout)
    rules = ["*_proj.weight=tp, -", "*=..."]
    checkpoints.convert(tmp_path / "model", tmp_path / "cut", to="tp=3", rules=rules)
    for source, target in (("model", "by-whole"), ("cut", "by-cut")):
        run_conversion(plan_for_vllm(tmp_path / source, tmp_path / target, layout))
    first, second = (checkpoints.open(tmp_path / name) for name in ("by-whole", "by-cut"))
    assert list(first.tensors) == list(second.tensors)
    for name in first.tensors:
        assert read_tensor(first, name).tobytes() == read_tensor(second, name).tobytes()


def test_files_begin_anew_beyond_a_limit(tmp_path: Path) -> None:
    layout = recorded("qwen2", "tp=2")
    write_checkpoint(tmp_path / "model", layout)
    conversion = plan_for_vllm(
        tmp_path / "model", tmp_path / "out", layout, most_file_bytes=100_000
    )
    names = [file.stored.name for file in conversion.write_plan.files]
    assert "model-rank-0-part-1.safetensors" in names
    assert "model-rank-1-part-0.safetensors" in names


def test_refusals(tmp_path: Path) -> None:
    layout = recorded("qwen2", "tp=2")
    write_checkpoint(tmp_path / "model", layout)
    other = recorded("gemma2", "tp=2")
    with pytest.raises(RecipeError, match="of another checkpoint"):
        plan_for_vllm(tmp_path / "model", tmp_path / "out", other)
    replicas = EngineLayout("vllm", "0", DeviceMesh.of(dp=2), layout.sources, layout.ranks)
    with pytest.raises(UsageError, match="no names for replicas"):
        plan_for_vllm(tmp_path / "model", tmp_path / "out", replicas)
