"""Layers on pipeline stages, against lists entered by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cut_rules import Sizes
from reshard.errors import RuleError
from reshard.megatron.layers import LayerPlace, PipelineLayers


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


def test_one_stretch_a_stage_is_a_cut_of_sizes() -> None:
    assert PipelineLayers.windows([5, 7]).rule == Sizes((5, 7))


def test_what_cannot_be() -> None:
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
