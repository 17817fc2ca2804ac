"""Conversions by several processes, started as `torchrun` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run(count: int, *arguments: object) -> list[tuple[int, str]]:
    """Exit code and output of each process of a conversion."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = Path(__file__).with_name("converting_process.py")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    running = [
        subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env={**os.environ, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(p.returncode, text) for p, text in zip(running, outputs, strict=True)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
