"""The logger: silent by default, and what it tells a program that listens."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.log import LOGGER


def test_conversions_loads_and_failures_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "target"
    write_file(source, {"w": tensor("float32", (64, 64), 1)})
    with caplog.at_level(logging.DEBUG, logger="reshard"):
        checkpoint.convert(source, target, to="full")
        checkpoint.load(target)
        with pytest.raises(Exception, match="the target exists"):
            checkpoint.convert(source, target, to="full")
    told = [(one.levelname, one.getMessage()) for one in caplog.records]
    assert all(one.name == "reshard" for one in caplog.records)
    for level, text in (
        ("INFO", f"{target}: conversion of {tmp_path} begins"),
        ("DEBUG", f"{source}: opened for reading"),
        ("INFO", f"{target}: 0 bytes were done before"),
        ("INFO", f"{target}: all of it is done"),
        ("INFO", f"{target}: 16384 bytes loaded as rank 0"),
        ("INFO", f"{target}: loaded, 16384 bytes"),
    ):
        assert (level, text) in told
    assert any(level == "WARNING" and "not converted: the target" in text for level, text in told)


def test_silent_by_default() -> None:
    assert any(isinstance(one, logging.NullHandler) for one in LOGGER.handlers)
    code = "from reshard.log import LOGGER; LOGGER.warning('x'); LOGGER.error('y')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
