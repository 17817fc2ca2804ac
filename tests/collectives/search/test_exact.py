"""The exact search against all programs on small meshes."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from collectives.sharding_pairs import Pair, pairs
from reshard.collectives import JointAllToAll, find_program
from reshard.collectives.search.constructive import constructive_search
from reshard.collectives.search.exact import StateTable, count_states, exact_outcome, join_axes
from reshard.collectives.search.states import Problem, State, make_problem
from reshard.collectives.search.transitions import name_step, path_cost
from selection import choose

Mask = NDArray[np.bool_]


def all_states(primes: int, dims: int) -> list[State]:
    """Every flat sharding over the prime axes 0, 1, ... of one prime mesh."""
    found = []
    for count in range(primes + 1):
        for order in itertools.permutations(range(primes), count):
            for where in itertools.combinations_with_replacement(range(dims), count):
                cuts = []
                for dim in range(dims):
                    level = tuple(a for a, at in zip(order, where, strict=True) if at == dim)
                    cuts.append((level,) if level else ())
                found.append(State(0, tuple(cuts)))
    return found


def mask(problem: Problem, state: State) -> Mask:
    """Which elements each rank holds, from the layout: shape `(ranks, elements)`."""
    space = problem.space
    layout = space.spec(state, None).layout(space.shape)
    held = np.zeros((len(space.ranks), *space.shape), dtype=bool)
    for row, rank in enumerate(space.ranks):
        for box in layout.boxes(rank):
            held[(row, *(slice(a, b) for a, b in zip(box.start, box.stop, strict=True)))] = True
    return held.reshape(len(space.ranks), -1)


def legal(
    problem: Problem, one: State, other: State, before: Mask, after: Mask, basis: str
) -> bool:
    """Whether a step of the basis leads from one to the other, by what its definition says."""
    prime_mesh = problem.space.prime_meshes[0]

    def covered(primes: set[int]) -> bool:
        rest = [prime_mesh.digit(prime) for prime in prime_mesh.primes if prime not in primes]
        group = np.array([*rest, np.zeros(len(before), int)]).T
        together = (group[:, None] == group[None]).all(axis=2)
        return not (after & ~(together @ before)).any()

    flat = [[cut[0] if cut else () for cut in state.cuts] for state in (one, other)]
    pairs = list(zip(*flat, strict=True))
    if all(b[: len(a)] == a for a, b in pairs):
        return not (after & ~before).any()
    if all(a[: len(b)] == b for a, b in pairs):
        return covered({prime for a, b in pairs for prime in a[len(b) :]})
    if sorted(map(bytes, before)) == sorted(map(bytes, after)):
        sizes = [[math.prod(prime_mesh.size(x) for x in a) for a in side] for side in flat]
        if sizes[0] == sizes[1]:
            return True
    if basis == "joint":
        return one.used == other.used
    changed = [(a, b) for a, b in pairs if a != b]
    for (a, b), (c, d) in itertools.permutations(changed, 2) if len(changed) == 2 else ():
        given_up, taken = a[len(b) :], d[len(c) :]
        is_moved = a[: len(b)] == b and d[: len(c)] == c and set(given_up) == set(taken)
        if is_moved and covered(set(given_up)):
            return True
    return False


def cheapest(problem: Problem, basis: str) -> int | None:
    """The least cost of any program, by Dijkstra over all shardings that fit."""
    prime_mesh = problem.space.prime_meshes[0]
    states = all_states(len(prime_mesh.primes), len(problem.space.shape))
    masks = {state: mask(problem, state) for state in states}
    states = [s for s in states if masks[s].sum(axis=1).max() <= problem.live_shard]
    best = {problem.source: 0}
    queue = [(0, 0, problem.source)]
    ticks = itertools.count(1)
    while queue:
        cost, _, here = heapq.heappop(queue)
        if cost > best[here]:
            continue
        if (masks[here] == masks[problem.target]).all():
            return cost
        for after in states:
            total = cost + int((masks[after] & ~masks[here]).sum())
            if total < best.get(after, 1 << 62) and legal(
                problem, here, after, masks[here], masks[after], basis
            ):
                best[after] = total
                heapq.heappush(queue, (total, next(ticks), after))
    return None


@st.composite
def problems(draw: st.DrawFn, basis: str) -> Problem:
    sizes = draw(st.sampled_from([(2, 2), (4,), (2, 3), (6,), (2, 2, 2), (4, 2)]))
    mesh = reshard.DeviceMesh("mesh", sizes, list("xyz")[: len(sizes)])
    shape = tuple(draw(st.integers(1, 9)) for _ in range(draw(st.integers(1, 2))))
    states = all_states(sum(2 if n in (4, 6) else 1 for n in sizes), len(shape))
    blank = reshard.spec(mesh, ", ".join("-" for _ in shape))
    # The prime mesh is that of the mesh: every part of prime size of every axis.
    problem = make_problem(blank, blank, shape)
    assert problem is not None
    chosen = [problem.space.spec(draw(st.sampled_from(states)), None) for _ in range(2)]
    found = make_problem(*chosen, shape, None, basis)
    assert found is not None
    return found


@pytest.mark.parametrize("basis", ["joint", "classical"])
def test_nothing_is_cheaper(basis: str) -> None:
    @settings(max_examples=choose(18, 60), deadline=None)
    @given(problems(basis))
    def compare(problem: Problem) -> None:
        path, is_cheapest, _ = exact_outcome(problem, None)
        assert is_cheapest
        found = None if path is None else path_cost(problem, path)
        assert found == cheapest(problem, basis)
        if path is not None:
            assert path[0] == problem.source
            assert problem.is_reached(path[-1])
            for before, after in itertools.pairwise(path):
                assert name_step(problem.space, before, after) is not None
                assert problem.fits(after)

    compare()


@settings(max_examples=choose(18, 60), deadline=None)
@given(problems("joint"))
def test_the_constructive_search_is_bounded_by_the_exact_one(problem: Problem) -> None:
    quick = constructive_search(problem)
    best = exact_outcome(problem, None)[0]
    if quick is not None:
        assert best is not None
        assert path_cost(problem, best) <= path_cost(problem, quick)
        assert path_cost(problem, best) >= problem.distance(problem.source)


def problem_on(sizes: dict[str, int], source: str, target: str, shape: tuple[int, ...]) -> Problem:
    mesh = reshard.DeviceMesh.of(**sizes)
    found = make_problem(reshard.spec(mesh, source), reshard.spec(mesh, target), shape)
    assert found is not None
    return found


def test_over_budget_the_best_known_is_kept() -> None:
    """It is the constructive search's program, and it is said that nothing was proved."""
    problem = problem_on({"x": 2, "y": 2, "z": 2}, "-, x, -", "-, -, x y z", (16, 8, 8))
    quick, quick_is_cheapest, _ = exact_outcome(problem, 0)
    proved, proved_is_cheapest, _ = exact_outcome(problem)
    assert quick == proved == constructive_search(problem)
    assert (quick_is_cheapest, proved_is_cheapest) == (False, True)


@pytest.mark.parametrize(("before", "after"), [("-, x", "b, -"), ("x, -", "-, b a")])
def test_the_constructive_search_crosses_to_the_other_mesh(before: str, after: str) -> None:
    """No single rearrangement leads from a mesh of 2 x 3 to one of 3 x 2."""
    source = reshard.spec(reshard.DeviceMesh.of(x=2, y=3), before)
    target = reshard.spec(reshard.DeviceMesh.of(a=3, b=2), after)
    problem = make_problem(source, target, (6, 6))
    assert problem is not None
    path = constructive_search(problem)
    assert path is not None
    assert [state.prime_mesh for state in path][:: len(path) - 1] == [0, 1]
    assert problem.is_reached(path[-1])
    best = exact_outcome(problem, None)[0]
    assert best is not None and path_cost(problem, best) <= path_cost(problem, path)


def test_the_work_done_is_the_same_every_time() -> None:
    sides = ({"x": 2, "y": 2, "z": 2, "w": 4}, "y z w:(1)2, -", "y, x w", (16, 8))
    outcomes = [exact_outcome(problem_on(*sides)) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] > 0


@pytest.mark.parametrize(("primes", "shape"), [(3, (8, 9)), (2, (5,)), (3, (4, 4, 4))])
def test_a_table_has_every_sharding_once(primes: int, shape: tuple[int, ...]) -> None:
    source = ", ".join(["x y z"[: 2 * primes - 1]] + ["-"] * (len(shape) - 1))
    problem = problem_on(dict.fromkeys("xyz"[:primes], 2), source, source, shape)
    problem = replace(problem, live_shard=math.prod(shape))
    used = frozenset(range(primes))
    state_table = StateTable(problem, 0, used)
    found = [state_table.state(number, frozenset()) for number in range(len(state_table))]
    assert len(set(found)) == len(found) == count_states(primes, len(shape))
    assert set(found) == {s for s in all_states(primes, len(shape)) if s.used == used}
    held = mask(problem, problem.target)
    for number, state in enumerate(found):
        here = mask(problem, state)
        assert state_table.total[number] == here.sum()
        assert state_table.shared_with_target[number] == (here & held).sum()
        assert problem.space.largest(state) == here.sum(axis=1).max()


@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        ({"dp": 8, "tp": 8, "pp": 4}, "dp tp, -", "tp, dp"),
        ({"x": 8, "y": 8, "z": 8}, "x y, z", "z, y x"),
    ],
)
def test_a_large_mesh_has_a_classical_program(
    mesh: dict[str, int], source: str, target: str
) -> None:
    """Over the parts of its axes there are too many shardings; over the axes there are few."""
    devices = reshard.DeviceMesh.of(**mesh)
    sides = reshard.spec(devices, source), reshard.spec(devices, target)
    program = find_program(*sides, (4096, 4096), steps="classical")
    assert not any(isinstance(step, JointAllToAll) for step in program.steps)
    ends = [int(side.layout((4096, 4096)).cell_shape.prod(axis=1).max()) for side in sides]
    assert program.live_shard <= max(ends)
    assert program.moved_elements >= program.lower_bound_elements
    if devices.size < 1000:
        program.verify()


@settings(max_examples=choose(18, 60), deadline=None)
@given(pairs(max_devices=12))
def test_a_problem_of_whole_axes_maps_to_their_parts(pair: Pair) -> None:
    problem = make_problem(*pair, None, "classical")
    if problem is None:
        return
    small, split = join_axes(problem)
    space = problem.space
    for given_, own in ((small.source, problem.source), (small.target, problem.target)):
        assert split(given_) == own
        assert np.array_equal(small.space.boxes(given_).low, space.boxes(own).low)
        assert np.array_equal(small.space.boxes(given_).high, space.boxes(own).high)
    assert small.distance(small.source) == problem.distance(problem.source)
    over_axes, best = (exact_outcome(one, None)[0] for one in (small, problem))
    if over_axes is not None:
        path = tuple(map(split, over_axes))
        assert all(problem.fits(state) for state in path)
        assert path_cost(problem, path) == path_cost(small, over_axes)
        for before, after in itertools.pairwise(path):
            assert name_step(space, before, after) is not None
        assert best is not None and path_cost(problem, best) <= path_cost(problem, path)
