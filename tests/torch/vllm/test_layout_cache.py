from __future__ import annotations

from pathlib import Path

import pytest

from reshard.torch.vllm.layout_cache import LayoutCache, cache_folder


def test_versions_are_in_order_and_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    kept = LayoutCache("vllm", tmp_path)
    for version in ("0.9.2", "0.32.0", "0.32.0rc1", "0.32.0.post1"):
        path = kept.path(version, "abc")
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    assert kept.versions("abc") == ["0.9.2", "0.32.0rc1", "0.32.0", "0.32.0.post1"]
    assert kept.read("0.32.0", "abc") is None


def test_where_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("RESHARD_CACHE", raising=False)
    assert cache_folder() == Path("/cache/reshard")
    monkeypatch.setenv("RESHARD_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
