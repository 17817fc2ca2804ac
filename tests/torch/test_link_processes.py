"""Links between jobs, as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from live_processes import TESTS, expect_all_end_well, free_port, run_ranks
from selection import keep_where

pytest.importorskip("torch")

KILLED = {"engine_dies": {3}, "dies_among_changes": {3}, "trainer_dies": {0, 1}}
CASES = (
    "steps",
    "beside",
    "other_orders",
    "buckets",
    "traced",
    "options",
    "misfits",
    "later",
    "engine_dies",
    "trainer_dies",
    "trainer_raises",
    "first_rank_raises",
    "secrets",
    "changes",
    "quantised",
    "dies_among_changes",
)


@pytest.mark.parametrize(
    "case",
    keep_where(
        lambda case: case not in ("trainer_dies", "dies_among_changes"),
        CASES,
        "a default case of engines that hand on weights, or of deaths and of changes apart",
    ),
)
def test_a_trainer_and_two_engines(case: str, tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    ended = run_ranks("link_process.py", 5, case, *ports, tmp_path, timeout_s=120)
    killed = KILLED.get(case, set())
    assert {rank for rank, one in enumerate(ended) if one.code == 9} == killed
    expect_all_end_well([one for rank, one in enumerate(ended) if rank not in killed])


RELAYS = {
    "fan_out": set(),
    "hand_ons": set(),
    "relay_dies": {3},
    "trainer_dies": {0, 1},
    "others": set(),
    "named": set(),
    "changes": set(),
    "quantised": set(),
}


@pytest.mark.parametrize(
    "case",
    keep_where(
        lambda case: case not in ("changes", "quantised"),
        RELAYS,
        "a default case without relays; fan_out has relays",
    ),
)
def test_engines_hand_on_weights(case: str) -> None:
    ports = [free_port() for _ in range(4)]
    ended = run_ranks("relay_process.py", 7, case, *ports, timeout_s=300)
    assert {rank for rank, one in enumerate(ended) if one.code == 9} == RELAYS[case]
    expect_all_end_well([one for rank, one in enumerate(ended) if rank not in RELAYS[case]])


def expect_equal_predictions(trainer: str, engine: str) -> None:
    """Fail unless after each step the engine predicts what the trainer does."""
    of_side = [
        [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{side} ")]
        for side, text in (("trainer", trainer), ("engine", engine))
    ]
    assert len(of_side[0]) == 3 and of_side[0] == of_side[1]
    assert "still has version 2" in engine


def test_the_example_runs() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ended = run_ranks("link_example_process.py", 4, url, free_port(), free_port())
    expect_all_end_well(ended)
    expect_equal_predictions(ended[0].output, ended[2].output)


@pytest.mark.exhaustive(reason="forked ranks run the example by default")
def test_the_example_runs_by_torchrun() -> None:
    """The commands of the example's docstring, whose two jobs end by themselves."""
    url, ports = f"tcp://127.0.0.1:{free_port()}", [free_port(), free_port()]
    example = str(TESTS.parent / "examples" / "link.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [*launch, "--master-addr=127.0.0.1", f"--master-port={port}", example, side, url],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for side, port in zip(("trainer", "engine"), ports, strict=True)
    ]
    outputs = [job.communicate(timeout=150)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(outputs)
    expect_equal_predictions(*outputs)


def test_an_engine_that_fails_within_connect_and_a_trainer_that_ends() -> None:
    expect_all_end_well(run_ranks("link_endings_process.py", 2, free_port(), free_port()))
