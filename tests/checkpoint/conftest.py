"""Small blocks, so that small tensors have many of them."""

from __future__ import annotations

import pytest

from reshard.checkpoint.blocks import grid as blocks


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 64 bytes; answers the number."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64)
    return 64
