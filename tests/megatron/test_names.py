"""Layers on pipeline stages, against lists entered by hand.

Local names and global ones.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cut_rules import Sizes
from reshard.errors import NotationError, RuleError, UsageError
from reshard.megatron.names import (
    LayerPlace,
    MegatronNames,
    PipelineLayers,
    find_source_name,
)
from reshard.megatron.ranks import MegatronRanks


def layers_of(layers: PipelineLayers, stage: int) -> list[int]:
    return [layer for chunk in range(layers.vpp) for layer in layers.layers_of(stage, chunk)]


@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        (PipelineLayers.even(12, pp=2), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (PipelineLayers.even(8, pp=2, vpp=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (PipelineLayers.windows([5, 7]), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11]]),
        (PipelineLayers.windows([2, 0, 1]), [[0, 1], [], [2]]),
        (PipelineLayers.uneven(8, pp=3, first=2), [[0, 1], [2, 3, 4], [5, 6, 7]]),
        (PipelineLayers.uneven(7, pp=3, last=1), [[0, 1, 2], [3, 4, 5], [6]]),
        (PipelineLayers.uneven(5, pp=2, first=2, last=3), [[0, 1], [2, 3, 4]]),
        # Chunks of 1 + 2 + 2 layers, twice: Megatron's offset of a chunk is all chunks before it.
        (
            PipelineLayers.uneven(10, pp=3, first=2, vpp=2),
            [[0, 5], [1, 2, 6, 7], [3, 4, 8, 9]],
        ),
    ],
)
def test_layers_of_stages(layers: PipelineLayers, stages: list[list[int]]) -> None:
    assert [layers_of(layers, stage) for stage in range(layers.pp)] == stages
    assert layers.layers == sum(map(len, stages))
    table = layers.rule.table(layers.layers, layers.pp)
    for stage, expected in enumerate(stages):
        runs = table.runs_of(stage)
        assert [layer for start, stop, _, _ in runs for layer in range(start, stop)] == expected


counts = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 3), min_size=width, max_size=width).map(tuple),
        min_size=1,
        max_size=3,
    )
)


@given(counts)
def test_every_layer_has_one_place(chunks: list[tuple[int, ...]]) -> None:
    layers = PipelineLayers(tuple(chunks))
    places = [layers.place(layer) for layer in range(layers.layers)]
    expected = [
        LayerPlace(stage, chunk, number)
        for chunk, row in enumerate(chunks)
        for stage, count in enumerate(row)
        for number in range(count)
    ]
    assert places == expected
    for layer, place in enumerate(places):
        assert layers.layers_of(place.stage, place.chunk)[place.number] == layer


def test_a_stage_of_one_chunk_is_sharded_by_sizes() -> None:
    assert PipelineLayers.windows([5, 7]).rule == Sizes((5, 7))


def test_layers_that_stages_cannot_share_are_errors() -> None:
    with pytest.raises(RuleError, match="13 layers cannot be cut evenly over pp 2 x vpp 1"):
        PipelineLayers.even(13, pp=2)
    with pytest.raises(RuleError, match="over pp 0"):
        PipelineLayers.even(12, pp=0)
    with pytest.raises(RuleError, match="7 layers are left for 2 stages"):
        PipelineLayers.uneven(10, pp=3, first=3)
    with pytest.raises(RuleError, match="-1 layers are left"):
        PipelineLayers.uneven(4, pp=3, first=3, last=2)
    with pytest.raises(RuleError, match="1 layers are left for 0 stages"):
        PipelineLayers.uneven(5, pp=2, first=2, last=2)
    with pytest.raises(RuleError, match="cannot be cut into 2 model chunks"):
        PipelineLayers.uneven(10, pp=2, first=5, last=5, vpp=2)
    for bad in ((), ((),), ((1, 2), (3,)), ((1, -1),)):
        with pytest.raises(RuleError, match="give for every model chunk one count"):
            PipelineLayers(bad)
    layers = PipelineLayers.windows([5, 7])
    for layer in (-1, 12):
        with pytest.raises(RuleError, match=f"layer {layer} of 12"):
            layers.place(layer)
    for stage, chunk in ((2, 0), (-1, 0), (0, 1)):
        with pytest.raises(RuleError, match=f"stage {stage}, chunk {chunk}"):
            layers.layers_of(stage, chunk)


# Ranks 4 to 11: 2 stages of 4 ranks, on each stage 2 expert ranks in turn.
RANKS = MegatronRanks(pp=2, dp=4, ep=2, offset=4)
NAMES = MegatronNames(RANKS, PipelineLayers(((1, 2), (3, 1))), num_experts=6)


@pytest.mark.parametrize(
    ("rank", "chunk", "name", "expected"),
    [
        (4, 0, "decoder.layers.0.mlp.experts.linear_fc1.weight2", "0 2"),
        (5, 0, "decoder.layers.0.mlp.experts.linear_fc1.weight2", "0 5"),
        (7, 1, "decoder.layers.2.mlp.experts.linear_fc2.bias0", "5 3"),
        (8, 0, "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight", "2 1"),
        (11, 1, "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", "6 4"),
    ],
)
def test_global_names(rank: int, chunk: int, name: str, expected: str) -> None:
    layer, expert = expected.split()
    found = NAMES.global_name(name, rank, chunk)
    assert found.split(".")[2] == layer
    assert (NAMES.layer(found), NAMES.expert(found)) == (int(layer), int(expert))
    assert NAMES.local_name(found) == name
    assert NAMES.stage(found) == (rank - 4) // 4
    assert NAMES.expert_rank(found) == rank % 2


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("module.decoder.layers.1.mlp.fc1.weight", "module.decoder.layers.2.mlp.fc1.weight"),
        # Neither of these is numbered by the pipeline or by experts.
        ("mtp.layers.0.final_layernorm.weight", "mtp.layers.0.final_layernorm.weight"),
        ("decoder.layers.0.mlp.experts.weight1", "decoder.layers.1.mlp.experts.weight1"),
        (
            "decoder.layers.0.mlp.shared_experts.weight",
            "decoder.layers.1.mlp.shared_experts.weight",
        ),
    ],
)
def test_only_layers_of_the_stack_are_renumbered(local: str, expected: str) -> None:
    assert NAMES.global_name(local, rank=9) == expected
    assert NAMES.local_name(expected) == local
    assert NAMES.expert_rank(expected) is None


def test_names_that_count_over_the_model_already() -> None:
    names = MegatronNames(MegatronRanks(dp=2))
    assert names.global_name("decoder.layers.7.linear_fc1.weight3", 1) == (
        "decoder.layers.7.linear_fc1.weight3"
    )
    assert (names.stage("decoder.layers.7.x"), names.layer("decoder.layers.7.x")) == (None, 7)
    assert names.expert("decoder.layers.7.linear_fc1.weight3") is None


def test_another_stack() -> None:
    names = MegatronNames(MegatronRanks(pp=2), PipelineLayers.windows([1, 2]), stack="layers")
    assert names.global_name("layers.1.weight", 1) == "layers.2.weight"
    assert names.global_name("my_layers.1.weight", 1) == "my_layers.1.weight"


def test_layers_experts_and_ranks_that_do_not_exist_are_errors() -> None:
    with pytest.raises(NotationError, match="names layer of chunk 0 1, but there are 1 on rank 4"):
        NAMES.global_name("decoder.layers.1.x", 4)
    with pytest.raises(NotationError, match="names expert 3, but there are 3 on rank 4"):
        NAMES.global_name("linear_fc1.weight3", 4)
    with pytest.raises(NotationError, match="rank 3 of the ranks 4 to 11"):
        NAMES.global_name("linear_fc1.weight0", 3)
    with pytest.raises(NotationError, match="names layer 7, but there are 7 in the model"):
        NAMES.local_name("decoder.layers.7.x")
    with pytest.raises(NotationError, match="names layer 7, but there are 7 in the model"):
        NAMES.stage("decoder.layers.7.x")
    for question in (NAMES.local_name, NAMES.expert_rank):
        with pytest.raises(NotationError, match="names expert 6, but there are 6 in the model"):
            question("linear_fc1.weight6")


def test_contradictory_models_are_errors() -> None:
    with pytest.raises(NotationError, match="layers for 2 pipeline stages on ranks with pp=1"):
        MegatronNames(MegatronRanks(), PipelineLayers.windows([5, 7]))
    for count in (0, 3):
        with pytest.raises(NotationError, match=f"{count} experts over ep=2 ranks"):
            MegatronNames(MegatronRanks(dp=2, ep=2), num_experts=count)


def test_ties_that_go_round_in_a_circle_are_refused() -> None:
    with pytest.raises(UsageError, match="circle: a -> b -> a"):
        find_source_name("a", {}, {"a": "b", "b": "a"})
