"""The judge finds what is wrong, and its records are what it finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs RESHARD_ENGINE=transformers", allow_module_level=True)

from engines.judge.family import load_families
from engines.judge.records import load_records
from engines.judge.shards import CutModel, JudgeError, Piece
from engines.judge.verdicts import Case, judge, judge_family, make_case

FAMILIES = load_families()
QUERY = "model.layers.1.self_attn.q_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"
OUTPUT = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def llama() -> Case:
    family = FAMILIES["llama"]
    return make_case(family, family.configs()[0])


def change(cut: CutModel, name: str, rank: int, edit: Callable[[Any], Any]) -> None:
    """Change what a rank of tp holds of a tensor, on every stage that has it."""
    for (coordinate, stage), piece in [*cut.pieces[name].items()]:
        if coordinate == (rank,):
            array = np.ascontiguousarray(edit(piece.array.copy()))
            cut.pieces[name][coordinate, stage] = Piece(array, piece.indices)


def swap_heads(array: Any) -> Any:
    """Of two heads of six rows the one for the other."""
    array[:6], array[6:12] = array[6:12].copy(), array[:6].copy()
    return array


def give_to_next(cut: CutModel, name: str) -> None:
    """Every rank has what the one before it should have."""
    pieces = dict(cut.pieces[name])
    ranks = len(cut.coordinates)
    for (rank,), stage in pieces:
        cut.pieces[name][(rank,), stage] = pieces[((rank - 1) % ranks,), stage]


TAMPERING: dict[str, Callable[[CutModel], None]] = {
    "two query heads swapped": lambda cut: change(cut, QUERY, 0, swap_heads),
    "two key heads swapped": lambda cut: change(cut, KEY, 1, swap_heads),
    "columns of the output counted twice": lambda cut: change(cut, OUTPUT, 1, lambda a: 2 * a),
    "key heads of the rank before": lambda cut: give_to_next(cut, KEY),
    "a head's columns of the output lost": lambda cut: change(
        cut, OUTPUT, 0, lambda a: np.where(np.arange(a.shape[1]) < 6, 0, a)
    ),
    "key heads that are missing": lambda cut: change(cut, KEY, 0, lambda a: a[:6]),
    "a row too many of the vocabulary": lambda cut: change(
        cut, "lm_head.weight", 0, lambda a: np.concatenate([a, a[:1]])
    ),
    "columns in another order": lambda cut: change(
        cut, "model.layers.2.mlp.down_proj.weight", 1, lambda a: a[:, ::-1]
    ),
    "a tensor that is not there": lambda cut: cut.pieces.pop("model.norm.weight") and None,
    "a rank without a tensor": lambda cut: cut.pieces[QUERY].pop(((1,), 0)) and None,
    "a norm of another layer": lambda cut: cut.pieces.update(
        {"model.norm.weight": cut.pieces["model.layers.0.input_layernorm.weight"]}
    ),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_wrong_shards_are_found(llama: Case, what: str) -> None:
    assert "equal" in judge(llama, "tp=2")
    with pytest.raises(JudgeError):
        judge(llama, "tp=2", TAMPERING[what])


def test_a_tensor_on_another_stage_is_found(llama: Case) -> None:
    def move(name: str) -> Callable[[CutModel], None]:
        def tamper(cut: CutModel) -> None:
            cut.pieces[name] = {
                (coordinate, 1 - stage): piece
                for (coordinate, stage), piece in cut.pieces[name].items()
            }

        return tamper

    assert "equal" in judge(llama, "tp=2,pp=2")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", QUERY):
        with pytest.raises(JudgeError, match="stage"):
            judge(llama, "tp=2,pp=2", move(name))


def test_copies_that_differ_are_found(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of dp that hold other bytes: as if a layout gave them other rows."""
    from engines.judge import shards

    found = shards.local_indices

    def shift(layout: Any, rank: int) -> Any:
        indices = found(layout, rank)
        return [np.roll(one, rank) for one in indices] if indices else indices

    monkeypatch.setattr(shards, "local_indices", shift)
    with pytest.raises(JudgeError, match="copies of"):
        judge(llama, "dp=2")


def test_every_family_has_a_record_and_every_record_a_family() -> None:
    assert {*FAMILIES} == {*load_records()}


@pytest.mark.parametrize("name", FAMILIES)
def test_records_are_what_the_judge_finds(name: str) -> None:
    record, failures = judge_family(FAMILIES[name])
    assert not failures
    stored = load_records()[name]
    assert {**record, "versions": None} == {**stored, "versions": None}
