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

COMBINED = (
    "engines_keep_their_weights_after_the_trainer_is_killed",
    "the_other_engine_gets_changes_after_one_is_killed",
)
KILLED = {
    "the_other_engine_continues_after_one_is_killed": {3},
    "the_other_engine_gets_changes_after_one_is_killed": {3},
    "engines_keep_their_weights_after_the_trainer_is_killed": {0, 1},
}
CASES = (
    "engines_get_the_weights_of_each_version",
    "runs_in_the_background_do_not_mix",
    "other_orders_of_models_are_refused",
    "tensors_are_complete_bucket_by_bucket",
    "each_rank_traces_to_its_own_file",
    "engines_follow_the_options_of_the_trainer",
    "models_that_do_not_fit_are_refused_on_both_sides",
    "an_engine_joins_while_the_trainer_runs",
    "the_other_engine_continues_after_one_is_killed",
    "engines_keep_their_weights_after_the_trainer_is_killed",
    "all_learn_why_a_rank_of_the_trainer_raised",
    "all_learn_why_the_first_rank_raised",
    "an_engine_with_another_secret_is_refused",
    "only_changes_are_sent",
    "only_changed_blocks_are_quantized_and_sent",
    "the_other_engine_gets_changes_after_one_is_killed",
)


@pytest.mark.parametrize(
    "case",
    keep_where(
        lambda case: case not in COMBINED,
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
    "the_trainer_sends_as_much_to_three_engines_as_to_one": set(),
    "relayed_models_arrive_in_the_background": set(),
    "engines_after_a_killed_relay_get_the_same_run": {3},
    "engines_have_one_version_or_report_a_mix_of_two": {0, 1},
    "an_engine_of_other_types_is_served_by_the_trainer": set(),
    "names_of_megatron_core_need_no_mapping": set(),
    "only_changes_are_relayed": set(),
    "quantized_weights_are_relayed_as_they_are": set(),
}


@pytest.mark.parametrize(
    "case",
    keep_where(
        lambda case: "only_changes" not in case and "quantized" not in case,
        RELAYS,
        "a default case without relays; one that counts bytes has relays",
    ),
)
def test_engines_relay_weights(case: str) -> None:
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


def test_an_engine_of_the_example_predicts_what_its_trainer_does() -> None:
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


def test_a_trainer_links_with_an_engine_after_one_that_failed() -> None:
    expect_all_end_well(run_ranks("link_endings_process.py", 2, free_port(), free_port()))
