"""Models refitted between real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from live_processes import expect_all_end_well, free_port, run_ranks
from selection import keep_where

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "refit.md"


def test_models_are_refitted_between_four_ranks() -> None:
    expect_all_end_well(run_ranks("refit_process.py", 4))


@pytest.mark.parametrize(
    "ranks", keep_where(lambda ranks: ranks == 2, (2, 5), "the same models on more ranks")
)
def test_cached_listings_and_plans_are_not_stale(ranks: int) -> None:
    expect_all_end_well(run_ranks("refit_stale_process.py", ranks))


def test_modules_that_compute_with_other_forms_of_parameters_are_refitted() -> None:
    expect_all_end_well(run_ranks("refit_modules_process.py", 2))


def test_fused_parameters_are_refitted_between_four_ranks() -> None:
    expect_all_end_well(run_ranks("refit_fusion_process.py", 4))


def test_tensors_are_moved_by_programs() -> None:
    expect_all_end_well(run_ranks("refit_program_process.py", 4, "moves"))


def test_all_ranks_raise_if_a_rank_is_killed_between_steps_of_programs() -> None:
    ended = run_ranks("refit_program_process.py", 4, "killed", timeout_s=100)
    killed = ended.pop(1)
    assert killed.code == 7, killed.output
    expect_all_end_well(ended)


def test_recipes_refit_models_between_four_ranks() -> None:
    expect_all_end_well(run_ranks("refit_recipe_process.py", 4))


@pytest.mark.exhaustive(reason="twelve ranks; four ranks refit models of Megatron by default")
def test_pairs_of_megatron_are_refitted_between_twelve_ranks() -> None:
    expect_all_end_well(run_ranks("refit_pairs_process.py", 12))


def test_latent_attention_and_shared_experts_are_refitted() -> None:
    expect_all_end_well(run_ranks("refit_latent_process.py", 4))


def test_weights_are_quantized_before_they_are_sent() -> None:
    expect_all_end_well(run_ranks("quantize_process.py", 4))


def test_compiled_and_captured_modules_see_new_weights() -> None:
    expect_all_end_well(run_ranks("refit_compiled_process.py", 2))


@pytest.mark.parametrize(
    "ranks", keep_where(lambda ranks: ranks == 4, (4, 8), "the same models on more ranks")
)
def test_models_of_megatron_are_refitted(ranks: int) -> None:
    expect_all_end_well(run_ranks("refit_megatron_process.py", ranks))


def test_recorded_models_of_megatron_core_get_the_names_of_the_hub() -> None:
    expect_all_end_well(run_ranks("refit_recorded_process.py", 2))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("it is killed while it sends", 7),
        ("it is killed while it receives", 7),
        ("it raises and continues", 0),
        ("it ends before it prepares", 7),
    ],
)
def test_all_ranks_raise_if_a_rank_fails(fault: str, code: int) -> None:
    ended = run_ranks("refit_fault_process.py", 3, fault, timeout_s=100)
    faulty = ended.pop(1) if code else ended[1]
    assert faulty.code == code, faulty.output
    expect_all_end_well(ended)


EXAMPLES = [ROOT / "examples" / name for name in ("refit.py", "engine.py")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example: Path) -> None:
    expect_all_end_well(run_ranks(str(example), 4))


def test_the_page_contains_the_examples() -> None:
    shown = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    for example in EXAMPLES:
        assert any(block in example.read_text() for block in shown), example


def test_models_are_refitted_between_two_jobs() -> None:
    ports = [free_port() for _ in range(4)]
    ended = run_ranks("worlds_process.py", 4, *ports, timeout_s=100)
    killed = ended.pop(1)
    assert killed.code == 7, killed.output
    expect_all_end_well(ended)


def test_models_of_common_forms_are_refitted() -> None:
    expect_all_end_well(run_ranks("refit_sides_process.py", 4))
