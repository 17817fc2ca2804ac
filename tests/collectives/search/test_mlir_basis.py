"""The decompositions of MLIR's notes by hand, and their basis on random shardings."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings

import reshard
from collectives.program_checks import check
from collectives.sharding_pairs import Pair, pairs
from reshard.collectives import AllGather, AllReduce, AllToAll, Permute, Slice, find_program
from reshard.collectives.search.states import find_prime_meshes
from reshard.errors import PlanError
from selection import choose


@pytest.mark.parametrize(
    ("mesh", "shape", "shardings", "steps", "moved", "live_shard"),
    [
        ((2, 3), (6,), ["a b", "b a"], ["permute"], [4], 1),
        ((2, 3), (6,), ["a b", "b a", "b"], ["permute", "all-gather(a)"], [4, 6], 2),
        ((2, 3), (2, 6), ["-, a b", "-, a"], ["all-gather(b)"], [24], 6),
        (
            (2, 2, 2),
            (4, 8),
            ["a, b c", "a, c b", "a, c"],
            ["permute", "all-gather(b)"],
            [16, 32],
            8,
        ),
        (
            (2, 3),
            (6, 6),
            ["a, b", "a, -", "-, a", "b, a"],
            ["all-gather(b)", "all-to-all(a)", "slice(b)"],
            [72, 54, 0],
            18,
        ),
        ((3,), (6, 6), ["a, -", "-, a"], ["all-to-all(a)"], [24], 12),
        (
            (2, 2, 2),
            (4, 4),
            ["a, b c", "a, c b", "a b, c"],
            ["permute", "all-to-all(b)"],
            [8, 8],
            2,
        ),
        (
            (2, 2, 2, 2),
            (4, 4, 4),
            ["d c, -, a b", "d c, b, a", "d, b c, a", "-, b c, a", "a, b c, -"],
            ["all-to-all(b)", "all-to-all(c)", "all-gather(d)", "all-to-all(a)"],
            [32, 32, 64, 64],
            8,
        ),
        ((2, 3), (6,), ["-", "b"], ["slice(b)"], [0], 6),
        ((2, 3), (6,), ["a b", "a"], ["all-gather(b)"], [12], 3),
    ],
)
def test_a_decomposition_of_the_notes(
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    shardings: list[str],
    steps: list[str],
    moved: list[int],
    live_shard: int,
) -> None:
    devices = reshard.DeviceMesh.of(**dict(zip("abcd", mesh, strict=False)))
    sides = [reshard.spec(devices, text) for text in shardings]
    program = find_program(sides[0], sides[-1], shape, steps="mlir")
    assert [step.target for step in program.steps] == sides[1:]
    assert [str(step) for step in program.steps] == steps
    assert [step.moved_elements for step in program.steps] == moved
    assert program.live_shard == live_shard
    check(program, live_shard)
    # The default is never dearer, and stays within the shards of both ends.
    best = find_program(sides[0], sides[-1], shape)
    assert best.moved_elements <= program.moved_elements


def test_the_first_decomposition_holds_more_than_both_shards() -> None:
    mesh = reshard.DeviceMesh.of(a=2, b=3)
    source, target = (reshard.spec(mesh, text) for text in ("a, b", "b, a"))
    notes = find_program(source, target, (6, 6), steps="mlir")
    best = find_program(source, target, (6, 6))
    assert (notes.live_shard, notes.moved_elements) == (18, 126)
    assert (best.live_shard, best.moved_elements) == (6, 26)


@settings(max_examples=choose(24, 80), deadline=None)
@given(pairs(max_devices=12))
def test_the_basis_leads_anywhere(pair: Pair) -> None:
    source, target, shape = pair
    nested = any(len(dim.levels) > 1 for side in pair[:2] for dim in side.dim_specs)
    assume(not nested and len(find_prime_meshes(source, target)) == 1)
    program = find_program(source, target, shape, steps="mlir")
    check(program, None)
    kinds = {type(step) for step in program.steps}
    assert kinds <= {Slice, AllGather, AllToAll, Permute, AllReduce}


def test_problems_outside_the_basis_raise() -> None:
    mesh = reshard.DeviceMesh.of(a=2, b=2)
    nested, flat = reshard.spec(mesh, "a / b"), reshard.spec(mesh, "b")
    with pytest.raises(PlanError, match="a single level in each dimension; use steps='joint'"):
        find_program(nested, flat, (10,), steps="mlir")
