"""Cases that Megatron's refit is tested by, and those it gets wrong.

Operations are written `source[from:to]→[from:to]` along the cut dimension, in the order of the
target's offset, and were worked out by hand.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import reshard
from conformance.checked_movement import check, same
from conformance.refits import cut, moved, operations, side, whole
from oracle import contents_of_spec, shards_of
from reshard.cut_rules import CutRule
from reshard.dtypes import dtype
from reshard.errors import SpecError
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.parameters import MegatronParameter
from reshard.megatron.ranks import MegatronRanks
from reshard.megatron.tensor_pairs import TensorPair, reconcile, reconcile_all
from reshard.sharding import DimSpec, Level, ShardingSpec

Shape = tuple[int, ...]


OPERATIONS = [
    (
        "TP2 to TP3, length 12",
        cut(2, 6),
        cut(3, 4),
        [["0[0:4]→[0:4]"], ["0[4:6]→[0:2]", "1[0:2]→[2:4]"], ["1[2:6]→[0:4]"]],
    ),
    (
        "GLU, TP2 to TP1",
        cut(2, 8, 3, partition_stride=2),
        cut(1, 16, 3, partition_stride=2),
        [["0[0:4]→[0:4]", "1[0:4]→[4:8]", "0[4:8]→[8:12]", "1[4:8]→[12:16]"]],
    ),
    (
        "GLU, TP1 to TP2",
        cut(1, 16, 3, partition_stride=2),
        cut(2, 8, 3, partition_stride=2),
        [["0[0:4]→[0:4]", "0[8:12]→[4:8]"], ["0[4:8]→[0:4]", "0[12:16]→[4:8]"]],
    ),
    (
        "GLU, unchanged",
        cut(2, 8, partition_stride=2),
        cut(2, 8, partition_stride=2),
        # Kept, as the two stretches of the tensor that they are.
        [["0[0:4]→[0:4]", "0[4:8]→[4:8]"], ["1[0:4]→[0:4]", "1[4:8]→[4:8]"]],
    ),
    (
        "sizes 4 and 2, TP2 to TP1",
        cut(2, 6, partition_sizes=(4, 2)),
        cut(1, 12, partition_sizes=(8, 4)),
        [["0[0:4]→[0:4]", "1[0:4]→[4:8]", "0[4:6]→[8:10]", "1[4:6]→[10:12]"]],
    ),
    (
        "sizes 16, 8 and 4, TP2 to TP4",
        cut(2, 28, partition_sizes=(16, 8, 4)),
        cut(4, 14, partition_sizes=(8, 4, 2)),
        [
            ["0[0:8]→[0:8]", "0[16:20]→[8:12]", "0[24:26]→[12:14]"],
            ["0[8:16]→[0:8]", "0[20:24]→[8:12]", "0[26:28]→[12:14]"],
            ["1[0:8]→[0:8]", "1[16:20]→[8:12]", "1[24:26]→[12:14]"],
            ["1[8:16]→[0:8]", "1[20:24]→[8:12]", "1[26:28]→[12:14]"],
        ],
    ),
    (
        "sizes on the source only",
        cut(2, 64, 48, partition_dim=1, partition_sizes=(32, 16)),
        whole(1, 64, 96),
        [["0[0:32]→[0:32]", "1[0:32]→[32:64]", "0[32:48]→[64:80]", "1[32:48]→[80:96]"]],
    ),
    (
        "sizes on the target only",
        whole(1, 64, 96),
        cut(2, 64, 48, partition_dim=1, partition_sizes=(32, 16)),
        [["0[0:32]→[0:32]", "0[64:80]→[32:48]"], ["0[32:64]→[0:32]", "0[80:96]→[32:48]"]],
    ),
]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [case[1:] for case in OPERATIONS],
    ids=[c[0] for c in OPERATIONS],
)
def test_operations(
    source: MegatronParameter, target: MegatronParameter, expected: list[list[str]]
) -> None:
    plan = moved(reconcile(source, target))
    dim = (target if target.tensor_model_parallel else source).partition_dim
    assert [operations(plan, rank, dim) for rank in range(len(expected))] == expected
    assert len(plan.target.holders) == len(expected)


def test_pieces_that_touch_are_one_and_an_unchanged_layout_moves_nothing() -> None:
    plan = moved(reconcile(cut(2, 6), cut(3, 4)))
    assert len(plan.transfers) == 4
    unchanged = moved(reconcile(*[cut(4, 8, partition_stride=2)] * 2))
    assert len(unchanged.transfers.moving) == 0


# A marked parameter whose ranks all hold the whole, on both sides.
def test_marked_but_whole_on_every_rank() -> None:
    pair = reconcile(cut(2, 8, 4), cut(4, 8, 4))
    assert pair.shape == (8, 4)
    plan = moved(pair)
    assert [operations(plan, rank) for rank in (0, 1)] == [["0[0:8]→[0:8]"], ["1[0:8]→[0:8]"]]
    assert plan.moved_elements == 2 * 32


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (cut(2, 64, 64, partition_dim=1), cut(1, 64, 100, partition_dim=1)),
        (cut(2, 8), cut(3, 5)),
        (cut(2, 8), cut(2, 16)),
        (cut(2, 8, partition_sizes=(6, 2)), cut(4, 5, partition_sizes=(4, 1))),
    ],
)
def test_where_no_reading_conserves_the_size(
    source: MegatronParameter, target: MegatronParameter
) -> None:
    with pytest.raises(SpecError, match="no reading gives both sides one length"):
        reconcile(source, target)


def expert(ranks: MegatronRanks, at: int, *shape: int) -> MegatronParameter:
    return MegatronParameter(ranks, shape, is_expert=True, expert_ranks=(at,))


def test_experts_to_other_ranks() -> None:
    before, after = MegatronRanks(dp=2, ep=2), MegatronRanks(dp=4, ep=4, offset=2)
    names = [MegatronNames(ranks, num_experts=4) for ranks in (before, after)]
    found = []
    for number in range(4):
        name = f"mlp.experts.linear_fc1.weight{number}"
        at = [of.expert_rank(name) or 0 for of in names]
        plan = moved(reconcile(expert(before, at[0], 4, 2), expert(after, at[1], 4, 2)))
        ((source, target),) = zip(
            plan.transfers.source_slot.tolist(), plan.transfers.target_slot.tolist(), strict=True
        )
        found.append(f"{source}.w{names[0].local_name(name)[-1]}→{target}")
        assert names[1].local_name(name).endswith("weight0")
    assert found == ["0.w0→2", "0.w1→3", "1.w0→4", "1.w1→5"]


# By local names, as ranks know them, and without the sharding: which experts has a rank?
def held_experts(ep: int, rank: int, experts: int) -> list[int]:
    """Data groups of all ranks contain the expert groups: ranks in turn, `ep` apart."""
    share = experts // ep
    return [rank % ep * share + number for number in range(share)]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 8), (8, 4), (4, 2), (2, 8)])
def test_experts_on_the_same_ranks_come_from_ranks_that_hold_them(before: int, after: int) -> None:
    """Megatron takes 50 to 88 % of these from a rank with another expert."""
    world, experts = 8, 8
    sides = [MegatronRanks.of_world(world, ep=ep) for ep in (before, after)]
    assert sides[0].groups("dp") == (tuple(range(8)),)
    names = [MegatronNames(ranks, num_experts=experts) for ranks in sides]
    memory = {
        rank: {
            f"experts.linear_fc1.weight{n}": e
            for n, e in enumerate(held_experts(before, rank, experts))
        }
        for rank in range(world)
    }
    found: dict[int, dict[str, int]] = {rank: {} for rank in range(world)}
    received = 0.0
    for number in range(experts):
        name = f"experts.linear_fc1.weight{number}"
        at = [of.expert_rank(name) or 0 for of in names]
        pair = reconcile(expert(sides[0], at[0], 2, 2), expert(sides[1], at[1], 2, 2))
        plan = moved(pair)
        # In whole experts of 2 x 2 elements, each of which may come in parts from several ranks.
        received += plan.moved_elements / 4
        for source in plan.transfers.source_slot.tolist():
            assert number in held_experts(before, source, experts)
        arrays = {
            rank: np.full((2, 2), memory[rank][names[0].local_name(name)])
            for rank in plan.source.holders
        }
        for rank, array in plan.run(arrays).items():
            found[rank][names[1].local_name(name)] = int(array[0, 0])
            assert (array == array[0, 0]).all()
            assert names[1].global_name(names[1].local_name(name), rank) == name
    for rank in range(world):
        expected = held_experts(after, rank, experts)
        assert found[rank] == {f"experts.linear_fc1.weight{n}": e for n, e in enumerate(expected)}
    lacking = [
        set(held_experts(after, rank, experts)) - set(held_experts(before, rank, experts))
        for rank in range(world)
    ]
    assert received == sum(map(len, lacking))


def test_copies_from_other_ranks() -> None:
    source = MegatronParameter(MegatronRanks(dp=2, offset=2), (8, 4))
    target = MegatronParameter(MegatronRanks(dp=2), (8, 4))
    plan = moved(reconcile(source, target))
    assert set(plan.transfers.source_slot.tolist()) <= {2, 3}
    assert plan.received_elements.tolist()[:2] == [32, 32]
    assert plan.moved_elements == 64


def test_ranks_with_nothing() -> None:
    ranks = MegatronRanks(tp=2, pp=2)
    source = MegatronParameter(ranks, (4,), True, stages=(0,))
    target = MegatronParameter(ranks, (4,), True, stages=(1,))
    plan = moved(reconcile(source, target))
    assert (plan.source.holders, plan.target.holders) == ((0, 1), (2, 3))
    assert [operations(plan, rank) for rank in range(4)] == [
        [],
        [],
        ["0[0:4]→[0:4]"],
        ["1[0:4]→[0:4]"],
    ]
    assert [len(plan.for_rank(rank)) for rank in range(5)] == [1, 1, 1, 1, 0]


# Names of a small model with everything in it, and each tensor's whole shape and cut.
def small_model(layers: int, experts: int) -> dict[str, tuple[Shape, dict[str, Any]]]:
    def cut_along(dim: int, **more: Any) -> dict[str, Any]:
        return {"tensor_model_parallel": True, "partition_dim": dim, **more}

    tensors: dict[str, tuple[Shape, dict[str, Any]]] = {
        "embedding.word_embeddings.weight": ((16, 4), cut_along(0)),
        "decoder.final_layernorm.weight": ((4,), {}),
        "output_layer.weight": ((16, 4), cut_along(0)),
    }
    for layer in range(layers):
        of = f"decoder.layers.{layer}."
        tensors |= {
            f"{of}input_layernorm.weight": ((4,), {}),
            f"{of}self_attention.linear_qkv.weight": ((24, 4), cut_along(0)),
            f"{of}self_attention.linear_proj.weight": ((4, 8), cut_along(1)),
            f"{of}mlp.router.weight": ((experts, 4), {}),
        }
        for number in range(experts):
            inside = f"{of}mlp.experts.linear_fc"
            tensors[f"{inside}1.weight{number}"] = (
                (16, 4),
                cut_along(0, partition_stride=2, is_expert=True),
            )
            tensors[f"{inside}2.weight{number}"] = ((4, 8), cut_along(1, is_expert=True))
    return tensors


def roster(
    ranks: MegatronRanks, layers: PipelineLayers, experts: int
) -> dict[str, MegatronParameter]:
    """What the ranks of a model say of its parameters, by global name."""
    names = MegatronNames(ranks, layers, experts)
    found = {}
    for name, (shape, attributes) in small_model(layers.layers, experts).items():
        local = list(shape)
        is_expert = attributes.get("is_expert", False)
        if attributes:
            local[attributes["partition_dim"]] //= ranks.expert_tp if is_expert else ranks.tp
        stage = names.stage(name)
        if stage is None:
            stage = 0 if name.startswith("embedding") else ranks.pp - 1
        at = names.expert_rank(name)
        found[name] = MegatronParameter(
            ranks,
            tuple(local),
            stages=(stage,),
            expert_ranks=None if at is None else (at,),
            **attributes,
        )
    return found


def numbered(shape: Shape, seed: int) -> NDArray[np.int64]:
    return np.arange(int(np.prod(shape))).reshape(shape) + 1000 * seed


@pytest.mark.parametrize("collocated", [True, False])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 1, 1), (1, 1, 1)),
        ((2, 1, 1), (4, 1, 1)),
        ((1, 2, 1), (2, 4, 1)),
        ((2, 1, 1), (1, 2, 1)),
        ((1, 1, 2), (1, 1, 4)),
        ((1, 1, 2), (1, 2, 2)),
        ((4, 1, 1), (1, 1, 4)),
        ((2, 1, 2), (4, 1, 1)),
    ],
)
def test_whole_models(before: Shape, after: Shape, collocated: bool) -> None:
    """Sizes are (TP, PP, EP)."""
    sides = []
    offset = 0
    for tp, pp, ep in (before, after):
        world = 8 if collocated else tp * pp * ep
        sides.append(MegatronRanks.of_world(world, tp=tp, pp=pp, ep=ep, offset=offset))
        offset += 0 if collocated else world
    refit(*sides)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "ep-dp-tp-cp-pp"])
def test_experts_with_a_tensor_parallel_size_of_their_own(order: str) -> None:
    before = MegatronRanks(tp=4, dp=2, pp=2, ep=4, etp=2, order=order)
    after = MegatronRanks(tp=2, cp=2, dp=4, ep=4, etp=1)
    assert (before.edp, after.edp) == (1, 4)
    refit(before, after)
    refit(after, before)


def refit(*sides: MegatronRanks) -> None:
    """A whole model from one set of ranks to another, checked, run, and taken as one job."""
    rosters = [roster(ranks, PipelineLayers.even(4, ranks.pp), 4) for ranks in sides]
    pairs = reconcile_all(*rosters)
    assert list(pairs) == list(small_model(4, 4))
    for name, pair in pairs.items():
        assert pair.shape == small_model(4, 4)[name][0]
    for pair in set(pairs.values()):
        moved(pair)
    kind = dtype("bfloat16")
    job = reshard.Job(
        reshard.JobItem.between_ranks(
            name, kind, pair.source.layout(pair.shape), pair.target.layout(pair.shape)
        )
        for name, pair in pairs.items()
    )
    job.verify()
    assert job.moved_bytes == job.lower_bound_bytes
    # Every rank of a side has a part, whatever its place.
    assert {rank for pair in pairs.values() for rank in pair.target.layout(pair.shape).holders} == (
        set(range(sides[1].offset, sides[1].offset + sides[1].world_size))
    )


def test_pipeline_windows() -> None:
    """5 + 7 layers on two stages, to even stages and to one."""
    windows = PipelineLayers.windows([5, 7])
    assert [len(windows.layers_of(stage)) for stage in (0, 1)] == [5, 7]
    ranks = MegatronRanks(pp=2)
    for other in (PipelineLayers.even(12, pp=2), PipelineLayers.even(12, pp=1)):
        pairs = reconcile_all(
            roster(ranks, windows, 1), roster(MegatronRanks(pp=other.pp), other, 1)
        )
        moves = {}
        for name, pair in pairs.items():
            if name.endswith("input_layernorm.weight"):
                plan = moved(pair)
                moves[name.split(".")[2]] = (plan.source.holders, plan.target.holders)
        assert [moves[str(layer)][0] for layer in range(12)] == [(0,)] * 5 + [(1,)] * 7
        half = [(0,)] * 6 + [(other.pp - 1,)] * 6
        assert [moves[str(layer)][1] for layer in range(12)] == half


KV_SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 3), (2, 3), (4, 2)]


def kv_cache(tp: int, pp: int, rule: CutRule | None = None) -> ShardingSpec:
    """12 layers x 8 heads x tokens x width: layers over pp, heads over tp."""
    rule = PipelineLayers.even(12, pp).rule if rule is None else rule
    layers = DimSpec([Level(["pp"], rule)])
    return ShardingSpec(MegatronRanks(tp=tp, pp=pp).dense, [layers, ["tp"], (), ()])


@pytest.mark.parametrize(("before", "after"), list(itertools.product(KV_SIZES, repeat=2)))
def test_key_value_caches(before: Shape, after: Shape) -> None:
    shape = (12, 8, 1, 2)
    check(side(kv_cache(*before), shape), side(kv_cache(*after), shape))


@pytest.mark.parametrize(
    ("before", "after", "elements"),
    [
        # Rank 0 has half of the heads, then all; the other way rank 1 lacks its half.
        ((2, 1), (1, 1), 12 * 4 * 2),
        ((1, 1), (2, 1), 12 * 4 * 2),
        # Layers 6 + 6 to 4 + 4 + 4: rank 1 lacks layers 4 and 5, rank 2 all of its four.
        ((1, 2), (1, 3), (2 + 4) * 8 * 2),
        # Rank 1 has heads 4-7 of all layers and needs layers 6-11: half of what it needs.
        ((2, 1), (1, 2), (6 * 4 + 6 * 4) * 2),
    ],
)
def test_key_value_caches_by_hand(before: Shape, after: Shape, elements: int) -> None:
    shape = (12, 8, 1, 2)
    check(side(kv_cache(*before), shape), side(kv_cache(*after), shape), moved=elements)


def test_a_key_value_cache_of_uneven_and_virtual_stages() -> None:
    shape = (12, 8, 1, 2)
    uneven = kv_cache(2, 2, PipelineLayers.windows([5, 7]).rule)
    virtual = kv_cache(1, 2, PipelineLayers.even(12, pp=2, vpp=3).rule)
    assert [box.start[0] for box in virtual.layout(shape).boxes(1)] == [2, 6, 10]
    check(side(uneven, shape), side(virtual, shape))
    check(side(virtual, shape), side(uneven, shape))


TIES = {"output_layer.weight": "embedding.word_embeddings.weight"}


def embedding(ranks: MegatronRanks, stage: int) -> MegatronParameter:
    return MegatronParameter(ranks, (16 // ranks.tp, 4), True, stages=(stage,))


def run_all(pairs: dict[str, TensorPair], served: dict[str, str]) -> None:
    """Every tensor moved from the data of the name that serves it."""
    data = {name: numbered((16, 4), seed) for seed, name in enumerate(set(served.values()))}
    for name, pair in pairs.items():
        dense = data[served[name]]
        contents = [contents_of_spec(spec, pair.shape) for spec in (pair.source, pair.target)]
        result = moved(pair).run(shards_of(contents[0], [dense]))
        assert same(result, shards_of(contents[1], [dense]))


def test_tied_embeddings_are_declared() -> None:
    """One stage has the embedding once; two stages need it at both ends."""
    word, out = TIES["output_layer.weight"], "output_layer.weight"
    one, two = MegatronRanks(tp=2), MegatronRanks(pp=2)
    source = {word: embedding(one, 0)}
    target = {word: embedding(two, 0), out: embedding(two, 1)}
    pairs = reconcile_all(source, target, ties=TIES)
    assert pairs[word].source is pairs[out].source
    run_all(pairs, dict.fromkeys(pairs, word))
    assert pairs[out].target.layout((16, 4)).holders == (1,)
    with pytest.raises(SpecError, match=r"the source has no 'output_layer.weight'.*ties"):
        reconcile_all(source, target)
    # And back: the copy at the end serves nothing, since it is the same tensor.
    back = reconcile_all(target, source, ties=TIES)
    assert list(back) == [word]
    run_all(back, {word: word})
    with pytest.raises(SpecError, match=r"the target has no 'output_layer.weight'.*ties"):
        reconcile_all(target, source)


def test_a_source_that_has_only_the_tied_name() -> None:
    word, out = TIES["output_layer.weight"], "output_layer.weight"
    ranks = MegatronRanks(pp=2)
    target = {word: embedding(MegatronRanks(), 0)}
    pairs = reconcile_all({out: embedding(ranks, 1)}, target, ties=TIES)
    assert pairs[word].source.layout((16, 4)).holders == (1,)
    run_all(pairs, {word: out})
