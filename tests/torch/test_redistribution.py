"""Tensors between the ranks of jobs of two to eight real processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks
from selection import keep_where


@pytest.mark.parametrize(
    "ranks",
    keep_where(
        lambda ranks: ranks in (2, 6), (2, 3, 4, 6, 8), "one and two axes are default cases"
    ),
)
def test_every_tensor_is_what_the_oracle_and_dtensor_say(ranks: int) -> None:
    expect_all_end_well(run_ranks("redistribution_process.py", ranks))


@pytest.mark.parametrize(
    "ranks", keep_where(lambda ranks: ranks == 3, (3, 6), "the same kinds on more ranks")
)
def test_layouts_of_every_kind_become_one_another(ranks: int) -> None:
    expect_all_end_well(run_ranks("random_redistribution_process.py", ranks))


@pytest.mark.parametrize(
    "fault",
    [
        "arguments_differ_or_cannot_be_used",
        "methods_differ_or_cannot_be_used",
        "ranks_outside_the_group_call",
        "a_rank_raises_before_it_calls",
        "a_rank_calls_alone",
        "a_rank_raises_before_it_sends",
        "a_rank_raises_while_it_sends",
        "a_rank_raises_in_a_program",
    ],
)
def test_all_ranks_raise_if(fault: str) -> None:
    expect_all_end_well(run_ranks("faulty_redistribution_process.py", 3, fault))


@pytest.mark.parametrize(
    "fault",
    [
        "a_rank_is_killed_while_it_moves",
        "a_rank_is_killed_while_it_sends",
        "a_rank_is_killed_while_it_receives",
        "a_rank_is_killed_while_it_is_read",
        "a_rank_is_killed_while_it_sends_to_all",
        "a_rank_is_killed_while_another_is_late",
        "a_rank_is_killed_in_a_program",
        "a_rank_is_killed_that_another_does_not_need",
    ],
)
def test_all_other_ranks_raise_if(fault: str) -> None:
    ended = run_ranks("faulty_redistribution_process.py", 3, fault)
    assert ended.pop(1).code == -signal.SIGKILL
    expect_all_end_well(ended)


ROOT = Path(__file__).parent.parent.parent


def test_the_example_runs_and_has_every_snippet_of_its_page() -> None:
    example = ROOT / "examples" / "redistribution.py"
    expect_all_end_well(run_ranks(str(example), 4))
    snippets = re.findall(
        r"^```py\n(.*?)^```", (ROOT / "docs" / "live.md").read_text(), re.M | re.S
    )
    assert len(snippets) == 4
    for snippet in snippets:
        assert snippet in example.read_text()


def test_compiled_functions_run_and_fakes_are_refused() -> None:
    expect_all_end_well(run_ranks("graph_breaks_process.py", 2))
