"""Operators on shards that lie one in each process."""

import pytest

from live_processes import expect_all_end_well, run_ranks
from selection import keep_where


# Of five ranks one has no place in the mesh of four.
@pytest.mark.parametrize("ranks", keep_where(lambda ranks: ranks == 5, (4, 5), "the same mesh"))
def test_every_operator_runs_over_processes(ranks: int) -> None:
    expect_all_end_well(run_ranks("spmd_process.py", ranks))


def test_errors_in_elements_of_one_rank_are_raised_on_all() -> None:
    expect_all_end_well(run_ranks("spmd_failure_process.py", 4))


@pytest.mark.parametrize(
    "ranks", keep_where(lambda ranks: ranks == 2, (2, 3, 4), "the same on a mesh of two")
)
def test_layers_of_networks_run_over_processes(ranks: int) -> None:
    expect_all_end_well(run_ranks("spmd_network_process.py", ranks))


def test_traps_of_other_systems_are_avoided_over_processes() -> None:
    expect_all_end_well(run_ranks("spmd_trap_process.py", 6))


def test_gradients_pass_through_shards_over_processes() -> None:
    expect_all_end_well(run_ranks("spmd_gradient_process.py", 4))


def test_networks_are_trained_over_processes() -> None:
    expect_all_end_well(run_ranks("spmd_training_process.py", 4))


def test_sharded_axes_are_sorted_over_processes() -> None:
    expect_all_end_well(run_ranks("spmd_sort_process.py", 4))


@pytest.mark.parametrize(
    "overlap", keep_where(lambda overlap: overlap > 0, (0, 2), "movements that begin when needed")
)
def test_the_ranks_of_a_program_agree_once(overlap: int) -> None:
    expect_all_end_well(run_ranks("spmd_program_process.py", 4, overlap))


def test_pipelines_run_with_stages_in_several_processes() -> None:
    expect_all_end_well(run_ranks("spmd_pipeline_process.py", 4))


def test_dtensors_become_arrays_and_arrays_dtensors() -> None:
    expect_all_end_well(run_ranks("dtensors_in_spmd_process.py", 4))


def test_checking_finds_ranks_that_differ() -> None:
    expect_all_end_well(run_ranks("spmd_checking_process.py", 4))
