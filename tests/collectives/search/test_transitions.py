"""Joined steps: fewer, legal, and with no more moved elements."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

import reshard
from collectives.sharding_pairs import Pair, pairs
from reshard.collectives import find_program
from reshard.collectives.search.exact import budgeted_search
from reshard.collectives.search.states import State, make_problem
from reshard.collectives.search.transitions import join_steps, name_step, path_cost, step_cost
from reshard.collectives.steps import JointAllToAll
from reshard.mesh import Axis
from selection import choose

MESH = reshard.DeviceMesh.of(x=2, y=4)


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("x, -", "x y, -", ["slice(y)"]),
        ("-, -", "y, x", ["slice(y x)"]),
        ("x y, -", "-, -", ["all-gather(x y)"]),
        ("y, x", "-, -", ["all-gather(y x)"]),
        ("x y, -", "x, y", ["all-to-all(y)"]),
        ("x, - | mean(y)", "x, -", ["all-reduce(y)"]),
        ("x, - | sum(y)", "x y, -", ["reduce-scatter(y)"]),
    ],
)
def test_parts_of_axes_go_together(source: str, target: str, steps: list[str]) -> None:
    sides = reshard.spec(MESH, source), reshard.spec(MESH, target)
    program = find_program(*sides, (16, 16), steps="classical")
    assert [str(step) for step in program.steps] == steps


@settings(max_examples=choose(18, 60), deadline=None)
@given(pairs(max_devices=12))
def test_joined_paths_are_legal_and_cost_no_more(pair: Pair) -> None:
    for basis in ("joint", "classical"):
        problem = make_problem(*pair, None, basis)
        path = None if problem is None else budgeted_search(problem)
        if problem is None or path is None:
            continue
        shorter = join_steps(problem, path)
        assert (shorter[0], shorter[-1]) == (path[0], path[-1])
        assert set(shorter) <= set(path)
        assert path_cost(problem, shorter) <= path_cost(problem, path)
        for before, after in itertools.pairwise(shorter):
            named = name_step(problem.space, before, after)
            assert named is not None
            assert basis == "joint" or named[0] is not JointAllToAll
        # Nothing is left to take at once.
        assert join_steps(problem, shorter) == shorter


def test_costlier_joined_steps_are_rejected() -> None:
    """A sum of four, where two ranks hold each contribution: they share the work."""
    mesh = reshard.DeviceMesh.of(x=4, y=2, z=2)
    sides = reshard.spec(mesh, "z | sum(x)"), reshard.spec(mesh, "-")
    problem = make_problem(*sides, (16,), 16)
    assert problem is not None
    prime_mesh = problem.space.prime_meshes[0]
    over_y = State(0, ((prime_mesh.primes_of([Axis("y")]),),), problem.source.partial)
    gathered = over_y._replace(cuts=((),))
    summed = over_y._replace(partial=frozenset())
    path = (problem.source, gathered, over_y, summed, problem.target)
    steps = [step_cost(problem, before, after) for before, after in itertools.pairwise(path)]
    at_once = step_cost(problem, gathered, problem.target)
    assert steps == [128, 0, 192, 128] and at_once == 384
    # The first two are an exchange of shards of half the tensor, and no more than the gather.
    assert join_steps(problem, path) == (problem.source, over_y, summed, problem.target)
