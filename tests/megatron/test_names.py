"""Local names and global ones."""

from __future__ import annotations

import pytest

from reshard.errors import NotationError
from reshard.megatron.layers import PipelineLayers
from reshard.megatron.names import MegatronNames
from reshard.megatron.ranks import MegatronRanks

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
def test_names_beside_them(local: str, expected: str) -> None:
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


def test_what_is_not_there() -> None:
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


def test_models_that_cannot_be() -> None:
    with pytest.raises(NotationError, match="layers for 2 pipeline stages on ranks with pp=1"):
        MegatronNames(MegatronRanks(), PipelineLayers.windows([5, 7]))
    for count in (0, 3):
        with pytest.raises(NotationError, match=f"{count} experts over ep=2 ranks"):
            MegatronNames(MegatronRanks(dp=2, ep=2), num_experts=count)
