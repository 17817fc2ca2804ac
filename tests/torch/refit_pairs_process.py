"""One rank of a job of twelve: the movements that Megatron's parameters are planned for, live.

`conformance/test_megatron.py` has their plans; here modules with these attributes are refitted, and
compared with what NumPy cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rank_cases import run_cases
from refit_models import expect, expect_same, module_of
from reshard.errors import ShardError
from reshard.megatron.names import MegatronNames, PipelineLayers
from reshard.megatron.ranks import MegatronRanks
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.torch import MegatronModel, Refit, refit

Array = NDArray[np.float32]
Entry = tuple[str, Array, Mapping[str, Any]]
CUT = {"tensor_model_parallel": True}
COLUMNS = CUT | {"partition_dim": 1}


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * seed


def pieces(weight: Array, sizes: Sequence[int], part: int, parts: int, dim: int = 0) -> Array:
    """A rank's piece of each of a weight's blocks."""
    blocks = np.split(weight, np.cumsum(sizes)[:-1], axis=dim)
    return np.concatenate([np.split(block, parts, axis=dim)[part] for block in blocks], axis=dim)


def model_of(
    names: MegatronNames, entries: Mapping[int, Sequence[Entry]], is_empty: bool
) -> MegatronModel | None:
    """This rank's module; None where it has none."""
    given = entries.get(dist.get_rank())
    if given is None:
        return None
    tensors = [
        (name, torch.from_numpy((0 * array if is_empty else array).copy()), dict(says))
        for name, array, says in given
    ]
    return MegatronModel(module_of(tensors), names)


def check(
    what: str,
    before: tuple[MegatronNames, Mapping[int, Sequence[Entry]]],
    after: tuple[MegatronNames, Mapping[int, Sequence[Entry]]],
    received: Mapping[int, int] | None = None,
    **options: Any,
) -> None:
    """Refit, compare, and count the elements that each rank has received."""
    target = model_of(*after, is_empty=True)
    done = refit(model_of(*before, is_empty=False), target, **options)
    expected = model_of(*after, is_empty=False)
    if target is not None and expected is not None:
        expect_same(target.chunks.state_dict(), expected.chunks.state_dict(), what)
    if received is not None:
        least = 4 * received.get(dist.get_rank(), 0)
        expect(done.received_bytes == least, f"{what}: {done.received_bytes} bytes, not {least}")


def alone(tp: int, arrays: Sequence[Array], says: Mapping[str, Any], offset: int = 0) -> Any:
    """One parameter over tensor-parallel ranks."""
    of_ranks = {offset + rank: [("w", array, says)] for rank, array in enumerate(arrays)}
    return MegatronNames(MegatronRanks(tp=tp, offset=offset)), of_ranks


def parameters_move_between_all_their_shardings() -> None:
    """Each way in which one parameter is cut, collocated and to ranks behind the source's."""
    rows = numbers(12, 2)
    gated, blocks, deep = numbers(16, 2), numbers(12, 2), numbers(56, 3)
    wide = numbers(64, 96)
    glu = CUT | {"partition_stride": 2}
    whole_gated = (1, [gated], glu)
    cases: dict[str, tuple[Any, Any]] = {
        "TP2 to TP3": (
            (2, np.split(rows, 2), CUT),
            (3, np.split(rows, 3), CUT),
        ),
        "GLU, TP2 to TP1": (
            (2, [pieces(gated, (8, 8), rank, 2) for rank in range(2)], glu),
            whole_gated,
        ),
        "GLU, TP1 to TP2": (
            whole_gated,
            (2, [pieces(gated, (8, 8), rank, 2) for rank in range(2)], glu),
        ),
        "sizes 4 and 2, TP2 to TP1": (
            (
                2,
                [pieces(blocks, (8, 4), rank, 2) for rank in range(2)],
                CUT | {"partition_sizes": (4, 2)},
            ),
            (1, [blocks], CUT | {"partition_sizes": (8, 4)}),
        ),
        "sizes 16, 8 and 4, TP2 to TP4": (
            (
                2,
                [pieces(deep, (32, 16, 8), rank, 2) for rank in range(2)],
                CUT | {"partition_sizes": (16, 8, 4)},
            ),
            (
                4,
                [pieces(deep, (32, 16, 8), rank, 4) for rank in range(4)],
                CUT | {"partition_sizes": (8, 4, 2)},
            ),
        ),
        "marked, and whole on every rank": ((2, [rows] * 2, CUT), (4, [rows] * 4, CUT)),
    }
    halves = (
        2,
        [pieces(wide, (64, 32), rank, 2, dim=1) for rank in range(2)],
        COLUMNS | {"partition_sizes": (32, 16)},
    )
    cases["sizes on the source only"] = halves, (1, [wide], {})
    cases["sizes on the target only"] = (1, [wide], {}), halves
    for what, (before, after) in cases.items():
        for offset in (0, before[0]):
            check(f"{what}, from {offset}", alone(*before), alone(*after, offset=offset))


def where_no_reading_conserves_the_size() -> None:
    for before, after in (((2, 64), (1, 100)), ((2, 8), (3, 5)), ((2, 8), (2, 16))):
        source, target = (
            model_of(*alone(tp, [numbers(length, 2)] * tp, CUT), is_empty=False)
            for tp, length in (before, after)
        )
        try:
            Refit.prepare(source, target)
        except ShardError as error:
            expect("no reading gives both sides one length" in str(error), str(error))
        else:
            raise SystemExit(f"{before} to {after} was accepted")


def of_experts(ep: int, dp: int, experts: int, offset: int) -> Any:
    """Whole experts, in the order of expert ranks, copied over what is left of the ranks."""
    ranks = MegatronRanks(dp=dp, ep=ep, offset=offset)
    share = experts // ep
    of_ranks = {
        offset + rank: [
            (f"experts.linear_fc1.weight{n}", numbers(3, 2, seed=rank % ep * share + n), says)
            for n in range(share)
        ]
        for rank in range(dp)
        for says in [{"is_expert": True}]
    }
    return MegatronNames(ranks, None, experts), of_ranks


def experts_move_to_other_and_to_the_same_ranks() -> None:
    """To other ranks, and on the same ranks, whose data groups contain the expert groups."""
    one = dict.fromkeys(range(2, 6), 6)
    check("EP2 to EP4, apart", of_experts(2, 2, 4, 0), of_experts(4, 4, 4, 2), one)
    for before, after in ((2, 4), (4, 8), (8, 4)):
        share = 8 // after
        lacks = {
            rank: 6
            * len(
                {rank % after * share + n for n in range(share)}
                - {rank % before * (8 // before) + n for n in range(8 // before)}
            )
            for rank in range(8)
        }
        what = f"EP{before} to EP{after}, collocated"
        check(what, of_experts(before, 8, 8, 0), of_experts(after, 8, 8, 0), lacks)


def each_replica_sends_to_one_rank() -> None:
    """Data-parallel ranks 2 and 3 to ranks 0 and 1: each sends to one."""
    word = numbers(4, 2)

    def of(offset: int) -> Any:
        ranks = MegatronRanks(dp=2, offset=offset)
        return MegatronNames(ranks), {offset + r: [("w", word, {})] for r in range(2)}

    check("DP 2, 3 to DP 0, 1", of(2), of(0), {0: 8, 1: 8})


def in_layers(counts: Sequence[int]) -> Any:
    """Twelve layers on so many stages, with an embedding and an output layer at the ends."""
    ranks, first, of_ranks = MegatronRanks(pp=len(counts)), 0, {}
    for stage, count in enumerate(counts):
        of_ranks[stage] = [
            (f"decoder.layers.{n}.w", numbers(2, 2, seed=first + n), {}) for n in range(count)
        ]
        first += count
    of_ranks[0].append(("embedding.w", numbers(5, seed=77), {}))
    of_ranks[len(counts) - 1].append(("norm", numbers(2, seed=88), {}))
    return MegatronNames(ranks, PipelineLayers.windows(counts)), of_ranks


def layers_move_between_uneven_stages() -> None:
    """5 + 7 layers to 6 + 6, to four uneven stages, to one, and back."""
    cuts = [(5, 7), (6, 6), (1, 5, 4, 2), (12,)]
    for before, after in itertools.permutations(cuts, 2):
        check(f"{before} to {after} layers", in_layers(before), in_layers(after))


def caches_of_keys_and_values_move_between_nine_sizes() -> None:
    """Key/value caches of 12 layers and 8 heads between nine sizes, all of them in one refit."""
    sizes = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 3), (2, 3), (4, 2)]
    rank = dist.get_rank()
    source, target, expected = {}, {}, {}
    for number, (before, after) in enumerate(itertools.product(sizes, repeat=2)):
        cache, name = numbers(12, 8, 1, 2, seed=number), f"{before} to {after}"
        parts = []
        for tp, pp in (before, after):
            layers = DimSpec([Level(["pp"], PipelineLayers.even(12, pp).rule)])
            mesh = MegatronRanks(tp=tp, pp=pp).dense
            layout = ShardingSpec(mesh, [layers, ["tp"], (), ()]).layout(cache.shape)
            stage = np.split(cache, pp)[rank // tp] if rank < tp * pp else None
            part = None if stage is None else np.split(stage, tp, axis=1)[rank % tp]
            parts.append((None if part is None else torch.from_numpy(part.copy()), layout))
        source[name], expected[name] = parts
        into = expected[name][0]
        target[name] = (None if into is None else torch.zeros_like(into), expected[name][1])
    refit(source, target)
    expect_same(target, expected, "a cache")


def a_tied_output_layer_on_the_last_stage_is_a_copy() -> None:
    """An output layer that is the embedding: on the last stage as a copy, and not at all."""
    word = numbers(8, 2)
    half = [("embedding.word_embeddings.weight", word, {})]
    last = [("output_layer.weight", word, {})]
    names = MegatronNames(MegatronRanks(pp=2))
    ties = {"output_layer.weight": "embedding.word_embeddings.weight"}
    single = MegatronNames(MegatronRanks()), {0: half}
    check("tied, PP2 to PP1", (names, {0: half, 1: last}), single, ties=ties)
    check("tied, PP1 to PP2", single, (names, {0: half, 1: last}), ties=ties)
    try:
        refit(model_of(*single, is_empty=False), model_of(names, {0: half, 1: last}, True))
    except ShardError as error:
        expect("output_layer.weight: not in the source" in str(error), str(error))
    else:
        raise SystemExit("a tie that nobody declared was taken")


CASES = [
    parameters_move_between_all_their_shardings,
    where_no_reading_conserves_the_size,
    experts_move_to_other_and_to_the_same_ranks,
    each_replica_sends_to_one_rank,
    layers_move_between_uneven_stages,
    caches_of_keys_and_values_move_between_nine_sizes,
    a_tied_output_layer_on_the_last_stage_is_a_copy,
]


if __name__ == "__main__":
    run_cases(CASES)
