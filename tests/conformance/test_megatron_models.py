"""Whole models, rank by rank: what every rank has and calls by its local names, moved and compared.

Nothing of the ranks' memory comes from the notation. A rank's places are computed from its number,
its shards cut from whole weights by NumPy, its names counted as Megatron counts them. The notation
sees only what the ranks list: names, local shapes and attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.parameters import LocalParameter, MegatronParameter, gather_parameters
from reshard.megatron.ranks import MegatronRanks
from reshard.megatron.tensor_pairs import reconcile_all
from selection import choose

Array = NDArray[np.int64]
LAYERS, EXPERTS = 4, 4


def whole(*shape: int, seed: int) -> Array:
    return np.arange(math.prod(shape)).reshape(shape) + 1000 * seed


def column(weight: Array, stride: int, rank: int, size: int) -> Array:
    """Rows in stride x size pieces, of which a rank has every `size`-th."""
    return np.concatenate(np.split(weight, stride * size)[rank::size])


def row(weight: Array, rank: int, size: int) -> Array:
    return np.split(weight, size, axis=1)[rank]


@dataclass(frozen=True)
class Model:
    """One way to run the model: sizes of its groups, and chunks a stage."""

    tp: int
    pp: int
    dp: int
    ep: int
    etp: int
    vpp: int
    offset: int

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def entries(self, rank: int) -> Iterator[tuple[int, str, Array, dict[str, Any]]]:
        """A rank's chunk, local name, array and attributes of everything that it has."""
        own = rank - self.offset
        stage = own // (self.world // self.pp)
        tp, etp, ep = own % self.tp, own % self.etp, own // self.etp % self.ep
        share, experts = LAYERS // (self.pp * self.vpp), EXPERTS // self.ep
        cut = {"tensor_model_parallel": True}
        for chunk in range(self.vpp):
            for number in range(share):
                seed = 10 * ((chunk * self.pp + stage) * share + number + 1)
                of = f"decoder.layers.{number}"
                attention = whole(24, 2, seed=seed)
                yield chunk, f"{of}.qkv.weight", column(attention, 1, tp, self.tp), cut
                mlp = whole(2, 12, seed=seed + 1)
                yield chunk, f"{of}.fc2.weight", row(mlp, tp, self.tp), cut | {"partition_dim": 1}
                gated = whole(24, 1, seed=seed + 2)
                yield (
                    chunk,
                    f"{of}.fc1.weight",
                    column(gated, 2, tp, self.tp),
                    cut | {"partition_stride": 2},
                )
                yield chunk, f"{of}.norm.weight", whole(3, seed=seed + 3), {}
                for local in range(experts):
                    expert = ep * experts + local
                    weight = whole(24, 1, seed=seed + 4 + expert)
                    yield (
                        chunk,
                        f"{of}.mlp.experts.linear_fc1.weight{local}",
                        column(weight, 2, etp, self.etp),
                        cut | {"partition_stride": 2, "is_expert": True},
                    )
        if stage == 0:
            yield 0, "embedding.weight", column(whole(24, 2, seed=1), 1, tp, self.tp), cut
        if stage == self.pp - 1:
            yield self.vpp - 1, "final_norm.weight", whole(3, seed=2), {}

    def parameters(self) -> dict[str, MegatronParameter]:
        rosters: dict[int, list[list[tuple[str, LocalParameter]]]] = {}
        for rank in range(self.offset, self.offset + self.world):
            rosters[rank] = [[] for _ in range(self.vpp)]
            for chunk, name, array, says in self.entries(rank):
                rosters[rank][chunk].append((name, LocalParameter(array.shape, **says)))
        return gather_parameters(self.names, rosters)

    @property
    def names(self) -> MegatronNames:
        ranks = MegatronRanks(
            tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep, etp=self.etp, offset=self.offset
        )
        return MegatronNames(ranks, PipelineLayers.even(LAYERS, self.pp, self.vpp), EXPERTS)

    def memory(self) -> dict[str, dict[int, Array]]:
        """Every rank's array, by global name."""
        found: dict[str, dict[int, Array]] = {}
        for rank in range(self.offset, self.offset + self.world):
            for chunk, name, array, _ in self.entries(rank):
                found.setdefault(self.names.global_name(name, rank, chunk), {})[rank] = array
        return found


@st.composite
def models(draw: st.DrawFn) -> Model:
    tp, etp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    pp, ep = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    dp = etp * ep // math.gcd(tp, etp * ep)
    vpp = draw(st.sampled_from([1, 2]))
    return Model(tp, pp, dp, ep, etp, vpp, draw(st.sampled_from([0, 0, 2, 16])))


@settings(max_examples=choose(12, 25))
@given(models(), models())
def test_a_model_from_one_set_of_ranks_to_another(source: Model, target: Model) -> None:
    pairs = reconcile_all(source.parameters(), target.parameters())
    before, after = source.memory(), target.memory()
    assert pairs.keys() == before.keys() == after.keys()
    for name, pair in pairs.items():
        plan = reshard.plan(pair.source.layout(pair.shape), pair.target.layout(pair.shape))
        plan.verify()
        moved = plan.run(before[name])
        assert moved.keys() == after[name].keys(), name
        for rank, array in moved.items():
            assert np.array_equal(array, after[name][rank]), (name, rank)
