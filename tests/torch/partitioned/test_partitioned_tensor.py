"""Tensors of partitions between real processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks
from selection import keep_where


@pytest.mark.parametrize(
    "ranks", keep_where(lambda ranks: ranks == 3, (2, 3, 4), "the same on other ranks")
)
def test_conversions(ranks: int) -> None:
    expect_all_end_well(run_ranks("partitioned_process.py", ranks))


@pytest.mark.parametrize("when", ["splits", "pieces"])
def test_a_rank_that_is_killed(when: str) -> None:
    """The others raise before their group's timeout ends, and none hangs."""
    ended = run_ranks("partitioned_process.py", 3, when, timeout_s=60)
    told = "\n".join(one.output for one in ended)
    assert [one.code for one in ended] == [0, -signal.SIGKILL, 0], told


ROOT = Path(__file__).parents[3]


def test_the_example_in_the_documents() -> None:
    example = ROOT / "examples" / "experts.py"
    document = (ROOT / "docs" / "partitioned-tensors.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```", document, flags=re.MULTILINE | re.DOTALL)
    assert shown in example.read_text()
    expect_all_end_well(ended := run_ranks(str(example), 4))
    assert [one.output.split(":")[1] for one in ended] == [
        f" {count} tokens went to their experts and back\n" for count in (6, 9, 12, 15)
    ]
