"""Layouts that are kept, and what is said without an engine. Traces: `tests/engines/vllm`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from reshard.errors import CheckpointError, UsageError
from reshard.plans.serialization import from_json
from reshard.torch.vllm import layouts
from reshard.torch.vllm.layouts import (
    VllmParallelism,
    cache_folder,
    cached_path,
    find_version,
    list_cached_versions,
    read_cached,
    request_digest,
    write_cached,
)


def test_ranks_and_mesh() -> None:
    both = VllmParallelism(tp=4, pp=2, dp=2, ep=8)
    assert both.ranks == 16
    assert both.mesh.text == "dp=2,pp=2,tp=4"
    assert both.text == "tp=4,pp=2,ep=8,dp=2"
    assert VllmParallelism().mesh.text == "tp=1"


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"tp": 4, "ep": 2}, {"dp": True}])
def test_sizes_that_vllm_lacks_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        VllmParallelism(**sizes)


GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "vllm"


def test_a_cached_layout_needs_no_engine(tmp_path: Path) -> None:
    record = json.loads((GOLDEN / "llama.json").read_text())
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(record["config"]))
    layout = from_json(json.dumps(record["layouts"]["tp=2"]))
    sources = {name: (kind.name, shape) for name, (kind, shape) in layout.sources.items()}
    request = {"config": record["config"], "sources": sources, "dtype": "auto"}
    digest = request_digest({**request, "tp": 2, "pp": 1, "ep": 1, "dp": 1})
    write_cached(tmp_path / "layouts", layout, digest)
    assert find_version(sys.executable) is None
    assert layouts(model, tp=2, sources=sources, cache=tmp_path) == layout
    # Of another parallelism, or of other tensors, there is none.
    with pytest.raises(UsageError, match=r"no layout of .* for tp=4 is cached"):
        layouts(model, tp=4, sources=sources, cache=tmp_path)
    with pytest.raises(UsageError, match="RESHARD_VLLM_PYTHON"):
        layouts(model, tp=2, sources={"w": ("float32", (2,))}, cache=tmp_path)


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        layouts(tmp_path, tp=2)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        layouts(tmp_path, tp=2)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="give its dtype and shape"):
        layouts(tmp_path, sources={"w": 3})
    with pytest.raises(UsageError, match="cannot be run as Python"):
        layouts(tmp_path, sources={"w": ("float32", (2,))}, python=tmp_path / "python")


def test_versions_are_sorted_and_unreadable_layouts_are_ignored(tmp_path: Path) -> None:
    for version in ("0.9.2", "0.32.0", "0.32.0rc1", "0.32.0.post1"):
        path = cached_path(tmp_path, version, "abc")
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    assert list_cached_versions(tmp_path, "abc") == ["0.9.2", "0.32.0rc1", "0.32.0", "0.32.0.post1"]
    assert read_cached(tmp_path, "0.32.0", "abc") is None


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("RESHARD_CACHE", raising=False)
    assert cache_folder() == Path("/cache/reshard")
    monkeypatch.setenv("RESHARD_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
