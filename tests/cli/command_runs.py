"""Running the command, in this process or in one of its own, and small checkpoints for it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from reshard.cli import main

COMMAND = [sys.executable, "-m", "reshard"]


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of the command came to."""

    code: int
    output: str
    errors: str

    @property
    def json(self) -> dict[str, Any]:
        content = json.loads(self.output)
        assert isinstance(content, dict)
        return content


class Utf8Output(io.StringIO):
    """A stream with an encoding, in which the command draws boxes."""

    encoding = "utf-8"  # type: ignore[assignment]


def run_here(*arguments: str, draws_boxes: bool = False) -> Run:
    """Run the command in this process."""
    output, errors = Utf8Output() if draws_boxes else io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main([str(argument) for argument in arguments])
    return Run(code, output.getvalue(), errors.getvalue())


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what changes how a terminal is treated."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "RESHARD_DEBUG", "TERM")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def run_alone(*arguments: str, cwd: Path, code: str | None = None, **environment: str) -> Run:
    """Run the command in a process of its own, or Python `code` with these arguments."""
    command = COMMAND if code is None else [sys.executable, "-c", code]
    done = subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


def write_model(folder: Path, **tensors: np.ndarray[Any, Any]) -> Path:
    """A small model as Hugging Face writes it, with its config and weights of another format."""
    folder.mkdir()
    contents = tensors or {
        "embed.weight": np.arange(240, dtype=np.float32).reshape(30, 8),
        "mlp.down.weight": np.arange(128, dtype=np.float32).reshape(8, 16),
        "mlp.up.weight": -np.arange(128, dtype=np.float32).reshape(16, 8),
        "norm": np.ones(8, np.float32),
        "step": np.array(3),
    }
    save_file(contents, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    (folder / "pytorch_model.bin").write_text("pickled")
    return folder


def entries(folder: Path) -> set[str]:
    """The names in a folder, hidden ones included."""
    return {path.name for path in folder.iterdir()}


def mask_measurements(text: str) -> str:
    """Replace times, rates and memory, which differ in every run."""
    text = re.sub(r'("seconds_s"|"bytes_per_s"): [\d.e-]+', r"\1: NUMBER", text)
    text = re.sub(r'("peak_bytes"): \d+', r"\1: NUMBER", text)
    text = re.sub(r"(?<=peak memory: about )[\d.]+ [kMG]?B", "MEMORY", text)
    text = re.sub(r"[\d.]+ ([kMGT]?B)/s", "RATE", text)
    return re.sub(r"(?<= in )[\d.]+ (µs|ms|s)\b", "TIME", text)
