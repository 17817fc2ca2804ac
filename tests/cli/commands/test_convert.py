"""`reshard convert --for vllm`, by a recorded layout: no engine is needed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.command_runs import run_here
from reshard.checkpoint.formats.safetensors.header import build_header
from reshard.plans.documents.serialization import from_json

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "vllm"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of random bytes, and beside it the layout of vLLM's two ranks."""
    document = json.dumps(json.loads((GOLDEN / "qwen2.json").read_text())["layouts"]["tp=2"])
    layout = from_json(document)
    folder = tmp_path / "qwen2"
    folder.mkdir()
    header, _ = build_header([(n, s.dtype, s.shape) for n, s in layout.sources.items()])
    size = sum(int(np.prod(s.shape)) * s.dtype.itemsize_bytes for s in layout.sources.values())
    content = np.random.default_rng(0).bytes(size)
    (folder / "model.safetensors").write_bytes(header + content)
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "layout.json").write_text(document)
    return folder


def test_what_ranks_load_is_written_for_them(model: Path, tmp_path: Path) -> None:
    layout, target = str(tmp_path / "layout.json"), tmp_path / "out"
    arguments = ("convert", str(model), str(target), "--for", "vllm", "--layout", layout)
    done = run_here(*arguments, "--json")
    assert done.code == 0
    assert done.json["to"] == "tp=2"
    assert done.json["format"] == "vllm-sharded-state"
    assert {path.name for path in target.iterdir()} >= {
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
        "tokenizer.json",
    }
    shown = run_here("inspect", str(target))
    assert shown.code == 0
    assert "vllm-sharded-state" in shown.output
    assert run_here(*arguments).code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--to tp=8"),
        (("--to", "tp=2", "--layout", "layout.json"), "give one of them"),
        (("--to", "tp=2", "--recipe", "qwen2"), "--for vllm with --recipe"),
        (("--to", "tp=2", "--rule", "*=..."), "--for vllm with --rule"),
        (("--to", "tp=2", "--replicas", "every"), "--for vllm with --replica"),
        (("--to", "fsdp=2"), "the axis 'fsdp' of a layout of vllm"),
        (("--to", "tp=2,ep=3"), "vLLM deals experts to all ranks"),
    ],
)
def test_mistakes_are_answered(model: Path, options: tuple[str, ...], message: str) -> None:
    (model / "config.json").write_text("{}")
    found = run_here("convert", str(model), str(model.parent / "out"), "--for", "vllm", *options)
    assert found.code == 2
    assert message in found.errors
