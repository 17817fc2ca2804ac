"""Conversions of every kind on a disk that reads and writes in part, fails, or is full."""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from checkpoint.any_conversion import plan_any
from checkpoint.campaigns.small_checkpoints import CONVERSIONS, SmallConversion
from checkpoint.campaigns.troubles import TROUBLES, Trouble, count_calls, try_in_trouble
from checkpoint.model_files import contents
from reshard.checkpoint import run_conversion
from reshard.checkpoint.blocks import grid as blocks
from selection import keep_where

BLOCK_BYTES = 512
BY_DEFAULT = (
    "shards to safetensors",
    "vLLM to vllm-sharded-state",
    "PyTorch to torch-dcp, dtype",
    "ZeRO 3 to rank-files",
    "for transformers",
)
# Where trouble begins, in parts of a run.
BEGINS = (0, 0.4, 0.9)
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize(
    "row",
    keep_where(
        lambda row: row.name in BY_DEFAULT,
        CONVERSIONS,
        "another conversion: troubles are of files, not of formats",
    ),
    ids=lambda one: one.name,
)
@pytest.mark.parametrize(
    "is_whole",
    keep_where(lambda is_whole: not is_whole, (False, True), "every trouble begins at each point"),
    ids=("one begin", "every begin"),
)
def test_trouble_of_every_kind(
    row: SmallConversion, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a trouble begins at one point of a run, at each in a third of the conversions."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
    # Syncing takes long and shows nothing here: a call to count, or to fail.
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)
    (tmp_path / "made").mkdir()
    source, options = row.make(tmp_path / "made")

    def run(target: Path, *, threads: int) -> None:
        run_conversion(
            plan_any(source, target, **options),
            overwrite=True,
            threads=threads,
            sync_bytes=2 * BLOCK_BYTES,
        )

    run(tmp_path / "expected", threads=1)
    expected = contents(tmp_path / "expected")
    hits = tries = 0
    for number, kind in enumerate(TROUBLES):
        run_so = partial(run, threads=1 + 2 * (number % 2))
        calls = count_calls(kind, run_so, tmp_path / "counted")
        shutil.rmtree(tmp_path / "counted")
        assert calls > 1
        turn = (number + CONVERSIONS.index(row)) % len(BEGINS)
        for begin in BEGINS if is_whole else (BEGINS[turn],):
            place = tmp_path / f"{number} {begin}"
            place.mkdir()
            trouble = Trouble(kind, random.Random(number), int(begin * calls))
            hits += try_in_trouble(trouble, run_so, place / "target", expected)
            shutil.rmtree(place)
            tries += 1
    assert hits > 0.66 * tries
