"""Megatron's parameters, against the way Megatron itself shares a whole weight out to its ranks.

Rosters of a small model, made rank by rank from Megatron's definitions, and put together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from reshard.errors import LayoutError, RuleError, SpecError
from reshard.layout import Layout
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.parameters import LocalParameter, MegatronParameter, gather_parameters
from reshard.megatron.ranks import MegatronRanks

Shape = tuple[int, ...]


def held(parameter: MegatronParameter) -> dict[int, NDArray[np.int64]]:
    """What every rank has of a tensor whose elements are numbered."""
    shape = parameter.global_shape
    source = Layout.whole(shape, [0], 1)
    plan = reshard.plan(source, parameter.spec().layout(shape))
    plan.verify()
    return plan.run({0: np.arange(math.prod(shape)).reshape(shape)})


def by_stride(shape: Shape, dim: int, stride: int, parts: int) -> list[NDArray[np.int64]]:
    """A weight cut into stride x parts pieces, of which a rank has every `parts`-th."""
    pieces = np.split(np.arange(math.prod(shape)).reshape(shape), stride * parts, axis=dim)
    return [np.concatenate(pieces[rank::parts], axis=dim) for rank in range(parts)]


def by_blocks(
    shape: Shape, dim: int, rows: list[tuple[int, ...]], parts: int
) -> list[NDArray[np.int64]]:
    """A weight cut into blocks, each shared out by itself; `rows[rank]` are a rank's pieces."""
    cuts = np.cumsum([size for block in zip(*rows, strict=True) for size in block])[:-1]
    pieces = np.split(np.arange(math.prod(shape)).reshape(shape), cuts, axis=dim)
    return [np.concatenate(pieces[rank::parts], axis=dim) for rank in range(parts)]


def shape_with(length: int, dim: int) -> Shape:
    shape = [2, 3]
    shape[dim] = length
    return tuple(shape)


dims = st.integers(0, 1)
sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, dims, st.integers(1, 2))
def test_strides_interleave_the_blocks_of_ranks(
    unit: int, stride: int, tp: int, dim: int, dp: int
) -> None:
    parameter = MegatronParameter(
        MegatronRanks(tp=tp, dp=dp),
        shape_with(unit * stride, dim),
        True,
        partition_dim=dim,
        partition_stride=stride,
    )
    shape = shape_with(unit * stride * tp, dim)
    assert parameter.global_shape == shape
    expected = by_stride(shape, dim, stride, tp)
    found = held(parameter)
    assert sorted(found) == list(range(tp * dp))
    for rank, array in found.items():
        assert np.array_equal(array, expected[rank % tp])


blocks_of_ranks = st.integers(1, 4).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(0, 4), min_size=count, max_size=count).map(tuple),
        min_size=1,
        max_size=4,
    )
)


@given(blocks_of_ranks, dims)
def test_blocks_of_any_sizes(rows: list[tuple[int, ...]], dim: int) -> None:
    parts = len(rows)
    alike = len(set(rows)) == 1
    shapes = tuple(shape_with(sum(row), dim) for row in rows)
    parameter = MegatronParameter(
        MegatronRanks(tp=parts),
        shapes[0] if alike else shapes,
        True,
        partition_dim=dim,
        partition_sizes=rows[0] if alike else tuple(rows),
    )
    shape = shape_with(sum(map(sum, rows)), dim)
    assert parameter.global_shape == shape
    found = held(parameter)
    for rank, expected in enumerate(by_blocks(shape, dim, rows, parts)):
        assert np.array_equal(found[rank], expected)
    assert parameter.blocks == tuple(map(sum, zip(*rows, strict=True)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 3))
def test_uneven_lengths(lengths: list[int], stride: int) -> None:
    """With a stride, each of its blocks is as uneven as the whole."""
    shapes = tuple((length * stride, 2) for length in lengths)
    parameter = MegatronParameter(
        MegatronRanks(tp=len(lengths)), shapes, True, partition_stride=stride
    )
    rows = [(length,) * stride for length in lengths]
    found = held(parameter)
    for rank, expected in enumerate(by_blocks((sum(lengths) * stride, 2), 0, rows, len(lengths))):
        assert np.array_equal(found[rank], expected)


def test_an_expert_is_cut_over_its_own_ranks() -> None:
    """Ranks 0-7: experts in turn over ep=2, each over etp=2, copies on edp=2."""
    ranks = MegatronRanks(tp=4, dp=2, ep=2, etp=2)
    parameter = MegatronParameter(ranks, (3, 2), True, is_expert=True, expert_ranks=(1,))
    assert parameter.global_shape == (6, 2)
    layout = parameter.spec().layout((6, 2))
    assert layout.holders == (2, 3, 6, 7)
    assert [layout.boxes(rank)[0].start[0] for rank in layout.holders] == [0, 3, 0, 3]


def test_a_layer_is_on_its_stage() -> None:
    parameter = MegatronParameter(MegatronRanks(tp=2, pp=3), (2,), True, stages=(1,))
    assert parameter.spec().layout((4,)).holders == (2, 3)


def test_heads_are_replicated_on_more_ranks_than_heads() -> None:
    """3 rows a head: with fewer ranks than heads whole heads, with more the same one on several."""
    few = MegatronParameter(MegatronRanks(tp=2), (6,), True, heads=4)
    many = MegatronParameter(MegatronRanks(tp=8), (3,), True, heads=4)
    assert few.global_shape == many.global_shape == (12,)
    assert [array.tolist() for array in held(few).values()] == [
        list(range(6)),
        list(range(6, 12)),
    ]
    assert [held(many)[rank][0] for rank in range(8)] == [0, 0, 3, 3, 6, 6, 9, 9]
    # 4 heads on 3 ranks: two, two and none.
    uneven = MegatronParameter(MegatronRanks(tp=3), ((4,), (4,), (0,)), True, heads=4)
    assert held(uneven)[1].tolist() == [4, 5, 6, 7]


def test_a_padded_vocabulary() -> None:
    parameter = MegatronParameter(MegatronRanks(tp=4), (4, 1), True, true_length=10)
    assert parameter.global_shape == (10, 1)
    found = [held(parameter)[rank].ravel().tolist() for rank in range(4)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0], [0, 0, 0, 0]]


def test_a_parameter_without_a_mark_is_whole() -> None:
    """Megatron's unmarked parameters say partition_dim=-1."""
    parameter = MegatronParameter(MegatronRanks(tp=2, pp=2), (3, 2), partition_dim=-1)
    assert parameter.global_shape == (3, 2)
    assert str(parameter.spec()) == "-, -"
    scalar = MegatronParameter(MegatronRanks(tp=2), ())
    assert (scalar.global_shape, scalar.spec().layout(()).holders) == ((), (0, 1))


TWO = MegatronRanks(tp=2)


def test_plain_values_become_tuples() -> None:
    given_lists: dict[str, Any] = {
        "shape": [4, 2],
        "partition_sizes": [3, 1],
        "stages": [np.int64(0)],
    }
    parameter = MegatronParameter(TWO, tensor_model_parallel=True, **given_lists)
    same: dict[str, Any] = {"shape": (4, 2), "partition_sizes": (3, 1), "stages": (0,)}
    assert parameter == MegatronParameter(TWO, tensor_model_parallel=True, **same)
    assert hash(parameter) == hash(MegatronParameter(TWO, tensor_model_parallel=True, **same))
    assert MegatronParameter(TWO, (4,), dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"shape": ((4, 2),) * 3}, SpecError, "for 2 tensor-parallel ranks; give one shape"),
        ({"shape": ((4, 2), (4,))}, SpecError, "one of as many dimensions for each"),
        ({"shape": (4, -2)}, SpecError, "has a negative size"),
        ({"shape": (4, 2.5)}, SpecError, "shape has 2.5, where a whole number was expected"),
        ({"shape": 4}, SpecError, "shape=4, where a list of numbers was expected"),
        ({"shape": (4,), "stages": 0}, SpecError, "stages=0, where a list"),
        ({"shape": (4,), "heads": [4]}, SpecError, r"heads=\[4\], where one number was expected"),
        ({"shape": (4,), "partition_dim": None}, SpecError, "partition_dim has None"),
        ({"shape": ((4,), 3)}, SpecError, "give one shape of whole numbers, or one for each rank"),
        ({"shape": (4, (3,))}, SpecError, "give one shape of whole numbers"),
        ({"shape": "ab"}, SpecError, "shape has 'ab'"),
        ({"shape": (4,), "partition_dim": "0"}, SpecError, "partition_dim has '0'"),
        ({"shape": (4,), "partition_sizes": ((3, 1), (None, 4))}, SpecError, "sizes has None"),
        ({"shape": ((4, 2), (4, 3))}, SpecError, r"\[2, 3\] of dimension 1, which is not cut"),
        ({"shape": (4, 2), "partition_dim": 2}, SpecError, "partition_dim=2 of a parameter of 2"),
        ({"shape": (4, 2), "partition_dim": -1}, SpecError, "it is one of 0 to 1"),
        ({"shape": (), "partition_dim": 0}, SpecError, "has no dimension to cut"),
        ({"shape": (4,), "partition_stride": 0}, RuleError, "partition_stride=0"),
        (
            {"shape": (4,), "partition_stride": 2, "heads": 2},
            SpecError,
            "partition_stride and heads of one parameter",
        ),
        (
            {"shape": (4,), "partition_sizes": (3, 2)},
            RuleError,
            r"\[3, 2\] add up to 5, but tensor-parallel rank 0 has 4",
        ),
        (
            {"shape": (4,), "partition_sizes": ((3, 1), (3, 2))},
            RuleError,
            r"\[3, 2\] add up to 5, but tensor-parallel rank 1 has 4",
        ),
        (
            {"shape": (4,), "partition_sizes": ((3, 1), (4,))},
            SpecError,
            "one of as many blocks for each rank",
        ),
        ({"shape": (4,), "expert_ranks": (0,)}, SpecError, "say is_expert=True"),
        ({"shape": (4,), "heads": 0}, RuleError, "heads=0"),
        ({"shape": (4,), "true_length": -1}, RuleError, "true_length=-1"),
    ],
)
def test_contradictory_attributes_are_errors(
    attributes: dict[str, Any], error: type[LayoutError], message: str
) -> None:
    with pytest.raises(error, match=message):
        MegatronParameter(TWO, tensor_model_parallel=True, **attributes)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        # 6 rows in two blocks of 3: ranks would have 2 + 2 and 1 + 1.
        ({"shape": (3,), "partition_stride": 2}, r"local lengths \[3, 3\] of stride 2"),
        ({"shape": ((3,), (4,)), "partition_stride": 2}, r"local lengths \[3, 4\] of stride 2"),
        ({"shape": (4,), "heads": 3}, "not made of 3 equal heads"),
        ({"shape": ((2,), (4,)), "heads": 3}, r"into \[4, 2\], but the ranks have \[2, 4\]"),
        ({"shape": (4,), "true_length": 9}, r"into \[8, 8\], but the ranks have \[4, 4\]"),
        ({"shape": ((4,), (3,)), "true_length": 6}, r"into \[4, 4\], but the ranks have \[4, 3\]"),
    ],
)
def test_cuts_that_do_not_give_the_local_shapes_are_errors(
    attributes: dict[str, Any], message: str
) -> None:
    parameter = MegatronParameter(TWO, tensor_model_parallel=True, **attributes)
    with pytest.raises(RuleError, match=message):
        parameter.spec()


def test_stages_and_expert_ranks_that_do_not_exist_are_errors() -> None:
    with pytest.raises(SpecError, match=r"only coordinates \[2\] of axis pp"):
        MegatronParameter(MegatronRanks(pp=2), (4,), stages=(2,)).spec()


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
def test_rosters_that_do_not_fit_are_errors(said: Rosters, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        gather_parameters(NAMES, said)


def test_a_name_that_a_rank_lists_twice_is_an_error() -> None:
    pairs = {rank: [[("w", NORM), ("w", NORM)]] for rank in range(2)}
    with pytest.raises(SpecError, match="rank 0 lists 'w' twice"):
        gather_parameters(MegatronNames(MegatronRanks(tp=2)), pairs)
    chunks = {rank: [{"decoder.layers.0.w": NORM}] * 2 for rank in range(2)}
    with pytest.raises(SpecError, match=r"rank 0 lists 'decoder.layers.0.w' twice, .*chunk 1"):
        gather_parameters(MegatronNames(MegatronRanks(pp=2)), chunks)


def test_layers_of_several_stages_under_one_name_are_an_error() -> None:
    """Local names, taken for global ones, would make one tensor of two."""
    said = {rank: [{"decoder.layers.0.w": NORM}] for rank in range(2)}
    with pytest.raises(SpecError, match=r"is on stages \[0, 1\], but a layer is on one"):
        gather_parameters(MegatronNames(MegatronRanks(pp=2)), said)
    named = MegatronNames(MegatronRanks(pp=2), PipelineLayers.even(2, 2))
    assert list(gather_parameters(named, said)) == ["decoder.layers.0.w", "decoder.layers.1.w"]
