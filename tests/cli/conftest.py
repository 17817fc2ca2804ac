"""Every test of the command works in a folder of its own that holds the checkpoint `model`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.command_runs import write_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RESHARD_DEBUG", raising=False)
    write_model(tmp_path / "model")
    return tmp_path
