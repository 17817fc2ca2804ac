"""Small blocks, so that small tensors have many of them; processes that are killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from checkpoint.faulty_process import FaultyProcesses
from reshard.checkpoint.blocks import grid as blocks


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 64 bytes; answers the number."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    return 64


@pytest.fixture(scope="module")
def processes() -> Iterator[FaultyProcesses]:
    """Processes that end at a call of the test's choice, started once for a module."""
    processes = FaultyProcesses()
    yield processes
    processes.close()
