"""Files of vLLM's ranks that are not all there."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard.checkpoint import open_checkpoint
from reshard.errors import CheckpointError

WHOLE = {"w": tensor("float32", (2,), 1)}


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["rank-0-part-0", "rank-2-part-0"], "rank-1-part-0"),
        (["rank-1-part-0"], "rank-0-part-0"),
        (["rank-0-part-1", "rank-0-part-2"], "rank-0-part-0"),
        (["pp-0-tp-0-part-0", "pp-0-tp-1-part-0", "pp-1-tp-0-part-0"], "pp-1-tp-1-part-0"),
    ],
)
def test_a_rank_or_a_part_that_is_missing(tmp_path: Path, names: list[str], missing: str) -> None:
    for name in names:
        write_file(tmp_path / f"model-{name}.safetensors", {f"{name}.w": WHOLE["w"]})
    with pytest.raises(CheckpointError, match=f"model-{missing}.safetensors is missing"):
        open_checkpoint(tmp_path)
