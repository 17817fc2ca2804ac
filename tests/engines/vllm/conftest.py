"""The package as vLLM finds it, without installing it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as vLLM finds it: by the entry point of its metadata."""
    import tomllib

    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    group = "vllm.general_plugins"
    metadata = tmp_path / "site" / "reshard-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: reshard\nVersion: 0.1.0\n")
    lines = [f"{name} = {target}" for name, target in points[group].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    paths = [str(ROOT / "src"), str(metadata.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
