"""Rosters of a small model, made rank by rank from Megatron's definitions, and put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.errors import SpecError
from reshard.layout import Layout
from reshard.megatron.layers import PipelineLayers
from reshard.megatron.names import MegatronNames
from reshard.megatron.parameters import MegatronParameter
from reshard.megatron.ranks import MegatronRanks
from reshard.megatron.rosters import LocalParameter, gather_parameters

# Ranks 2 to 9, tp fastest: 2 stages of 4 ranks. Experts over ep=2 (etp=2, no copies).
RANKS = MegatronRanks(tp=2, dp=2, pp=2, ep=2, offset=2)
# Stage 0 has layers 0 and 2, stage 1 has layer 1 and 3-4.
LAYERS = PipelineLayers(((1, 1), (1, 2)))
NAMES = MegatronNames(RANKS, LAYERS, num_experts=4)

PROJECTION = LocalParameter((3, 4), True)
GATED = LocalParameter((4, 4), True, partition_stride=2, is_expert=True)
NORM = LocalParameter((4,))
Rosters = dict[int, list[dict[str, LocalParameter]]]


def roster(rank: int) -> list[dict[str, LocalParameter]]:
    """One list a chunk: what Megatron builds on a rank."""
    stage = (rank - 2) // 4
    chunks: list[dict[str, LocalParameter]] = []
    for count in ([1, 1], [1, 2])[stage]:
        chunk: dict[str, LocalParameter] = {}
        for layer in range(count):
            chunk[f"decoder.layers.{layer}.linear_proj.weight"] = PROJECTION
            for expert in range(2):
                chunk[f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}"] = GATED
        chunks.append(chunk)
    if stage == 0:
        chunks[0]["embedding.weight"] = PROJECTION
    chunks[0]["norm.weight"] = NORM
    return chunks


def rosters() -> Rosters:
    return {rank: roster(rank) for rank in range(2, 10)}


def test_parameters_of_the_whole_model() -> None:
    found = gather_parameters(NAMES, rosters())
    expected: dict[str, MegatronParameter] = {
        "embedding.weight": MegatronParameter(RANKS, (3, 4), True, stages=(0,)),
        "norm.weight": MegatronParameter(RANKS, (4,)),
    }
    for layer, stage in enumerate([0, 1, 0, 1, 1]):
        of = f"decoder.layers.{layer}"
        expected[f"{of}.linear_proj.weight"] = MegatronParameter(
            RANKS, (3, 4), True, stages=(stage,)
        )
        for expert in range(4):
            expected[f"{of}.mlp.experts.linear_fc1.weight{expert}"] = MegatronParameter(
                RANKS,
                (4, 4),
                True,
                partition_stride=2,
                is_expert=True,
                stages=(stage,),
                expert_ranks=(expert // 2,),
            )
    assert found == expected
    layout = found["decoder.layers.1.mlp.experts.linear_fc1.weight2"].spec().layout((8, 4))
    assert layout.holders == (8, 9)
    # Every rank holds, of the tensors that it lists, what it says.
    for rank, chunks in rosters().items():
        for chunk, listed in enumerate(chunks):
            for name, local in listed.items():
                parameter = found[NAMES.global_name(name, rank, chunk)]
                of_rank = parameter.spec().layout(parameter.global_shape)
                assert of_rank.local_shape(rank) == local.shape


def test_shapes_may_differ_between_tensor_parallel_ranks() -> None:
    names = MegatronNames(MegatronRanks(tp=2, dp=2))
    said = {
        rank: [{"w": LocalParameter((3 - rank % 2,), True, partition_sizes=(2 - rank % 2, 1))}]
        for rank in range(4)
    }
    parameter = gather_parameters(names, said)["w"]
    assert parameter.shape == ((3,), (2,))
    assert parameter.partition_sizes == ((2, 1), (1, 1))
    layout = parameter.spec().layout((5,))
    source = Layout.whole((5,), [0], 1)
    held = reshard.plan(source, layout).run({0: np.arange(5)})
    assert [held[rank].tolist() for rank in range(4)] == [[0, 1, 3], [2, 4]] * 2


def test_live_parameters() -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(6, 2, dtype=torch.bfloat16))
    assert LocalParameter.of(weight) == LocalParameter((6, 2), dtype="bfloat16")
    weight.tensor_model_parallel = True
    weight.partition_dim, weight.partition_stride = 1, 2
    weight.partition_sizes = [4, 2]
    weight.allreduce = False
    assert LocalParameter.of(weight) == LocalParameter(
        (6, 2), True, 1, 2, (4, 2), is_expert=True, dtype="bfloat16"
    )


def changed(rank: int, chunk: int, name: str, local: LocalParameter | None) -> Rosters:
    """The rosters with one entry changed, or without it."""
    said = rosters()
    if local is None:
        del said[rank][chunk][name]
    else:
        said[rank][chunk][name] = local
    return said


EXPERT = "decoder.layers.0.mlp.experts.linear_fc1.weight1"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({rank: roster(rank) for rank in range(2, 9)}, "no roster of rank 9; .* ranks 2 to 9"),
        ({**rosters(), 0: []}, "a roster of rank 0; the ranks are 2 to 9"),
        (changed(5, 0, "embedding.weight", None), "rank 5 has no 'embedding.weight', which rank 2"),
        (changed(9, 1, EXPERT, None), "rank 9 has no 'decoder.layers.3.*weight3', which rank 8 of"),
        (
            changed(3, 0, "norm.weight", replace(NORM, dtype="float32")),
            "ranks 2 and 3 disagree on 'norm.weight'",
        ),
        (
            changed(4, 0, "norm.weight", replace(NORM, shape=(5,))),
            r"ranks 2 and 4 hold the same part of 'norm.weight', but one has \[4\] .* \[5\]",
        ),
        (
            changed(2, 0, "experts.weight1", replace(NORM, is_expert=True)),
            "'experts.weight1' belongs to experts, but its name has no expert number",
        ),
    ],
)
def test_rosters_that_do_not_fit(said: Rosters, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        gather_parameters(NAMES, said)


def test_a_name_twice_on_a_rank() -> None:
    pairs = {rank: [[("w", NORM), ("w", NORM)]] for rank in range(2)}
    with pytest.raises(SpecError, match="rank 0 lists 'w' twice"):
        gather_parameters(MegatronNames(MegatronRanks(tp=2)), pairs)
    chunks = {rank: [{"decoder.layers.0.w": NORM}] * 2 for rank in range(2)}
    with pytest.raises(SpecError, match=r"rank 0 lists 'decoder.layers.0.w' twice, .*chunk 1"):
        gather_parameters(MegatronNames(MegatronRanks(pp=2)), chunks)


def test_layers_of_several_stages_under_one_name() -> None:
    """Local names, taken for global ones, would make one tensor of two."""
    said = {rank: [{"decoder.layers.0.w": NORM}] for rank in range(2)}
    with pytest.raises(SpecError, match=r"is on stages \[0, 1\], but a layer is on one"):
        gather_parameters(MegatronNames(MegatronRanks(pp=2)), said)
    named = MegatronNames(MegatronRanks(pp=2), PipelineLayers.even(2, 2))
    assert list(gather_parameters(named, said)) == ["decoder.layers.0.w", "decoder.layers.1.w"]
