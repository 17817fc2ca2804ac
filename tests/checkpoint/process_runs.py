"""Conversions by several processes, started as `torchrun` starts them."""

from __future__ import annotations

from pathlib import Path

from live_processes import run_ranks

SCRIPT = Path(__file__).with_name("converting_process.py")


def run(count: int, *arguments: object) -> list[tuple[int, str]]:
    """Exit code and output of each process of a conversion."""
    return [(one.code, one.output) for one in run_ranks(str(SCRIPT), count, *arguments)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
