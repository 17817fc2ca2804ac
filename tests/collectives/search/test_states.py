"""Prime meshes, states and their boxes against layouts, and legal steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from collectives.sharding_pairs import Pair, meshes, pairs, shardings
from reshard.collectives import (
    AllGather,
    Exchange,
    JointAllToAll,
    Permute,
    Program,
    Slice,
    Step,
    find_program,
)
from reshard.collectives.search.states import (
    GroupIntervals,
    PrimeMesh,
    Problem,
    Space,
    State,
    count_overlaps,
    drop_minor_axis,
    find_prime_meshes,
    flatten_cut,
    make_problem,
    prime_factors,
)
from reshard.collectives.search.transitions import (
    find_group,
    is_covered,
    is_inside,
    is_permutation,
    name_step,
)
from reshard.errors import PlanError
from reshard.mesh import Axis
from selection import choose


@given(st.integers(1, 400))
def test_prime_factors(number: int) -> None:
    found = prime_factors(number)
    product = 1
    for factor in found:
        assert all(factor % small for small in range(2, factor))
        product *= factor
    assert product == number
    assert found == sorted(found)


@settings(deadline=None)
@given(pairs(partials=False))
def test_a_state_is_its_sharding(pair: Pair) -> None:
    source, target, shape = pair
    prime_meshes = find_prime_meshes(source, target)
    space = Space(prime_meshes, shape)
    for prime_mesh, spec in ((0, source), (len(prime_meshes) - 1, target)):
        state = space.state(prime_mesh, spec)
        layout = spec.layout(shape)
        assert space.spec(state, None, spec.mesh).layout(shape) is layout
        assert space.spec(state, None).layout(shape).shape == shape
        boxes = space.boxes(state)
        for row, rank in enumerate(space.ranks):
            (box,) = layout.boxes(rank) or (reshard.Box((0,) * len(shape), (0,) * len(shape)),)
            assert boxes.elements[row] == box.elements
            if box.elements:
                assert (tuple(boxes.low[:, row]), tuple(boxes.high[:, row])) == tuple(box)
        assert space.total(state) == layout.cell_elements.sum()
        assert space.largest(state) == layout.cell_elements.max()


@settings(deadline=None)
@given(pairs(partials=False))
def test_arriving_elements_equal_a_plan(pair: Pair) -> None:
    source, target, shape = pair
    problem = make_problem(source, target, shape)
    assert problem is not None
    plan = reshard.plan(source.layout(shape), target.layout(shape))
    space = problem.space
    assert space.arriving(problem.source, problem.target) == plan.moved_elements
    assert problem.distance(problem.source) == plan.lower_bound_elements
    assert problem.is_reached(problem.target)
    assert problem.is_reached(problem.source) == (
        plan.moved_elements == 0 and space.total(problem.source) == space.total(problem.target)
    )


@settings(deadline=None)
@given(pairs(max_devices=12))
def test_the_distance_is_the_bound_of_any_program(pair: Pair) -> None:
    problem = make_problem(*pair)
    if problem is not None:
        source, target, shape = pair
        program = Program(shape, source, target, (Exchange(shape, source, target),))
        assert problem.distance(problem.source) == program.lower_bound_elements


def test_the_bound_of_a_sum_is_reached_by_a_ring() -> None:
    """Three contributions: two arrivals for each element, and one for each further copy."""
    mesh = reshard.DeviceMesh.of(x=3)
    summed = reshard.spec(mesh, "- | sum(x)")
    for target, moved in (("x", 2 * 6), ("-", 2 * 6 + 2 * 6)):
        problem = make_problem(summed, reshard.spec(mesh, target), (6,))
        assert problem is not None
        assert problem.distance(problem.source) == moved
        assert find_program(summed, reshard.spec(mesh, target), (6,)).moved_elements == moved


@pytest.mark.parametrize(
    ("one", "other", "sizes"),
    [
        ({"x": 6}, {"y": 2, "z": 3}, [(2, 3)]),
        ({"x": 6}, {"y": 3, "z": 2}, [(3, 2)]),
        ({"x": 2, "y": 3}, {"y": 3, "z": 2}, [(2, 3), (3, 2)]),
        ({"x": 4, "y": 6}, {"z": 24}, [(2, 2, 2, 3)]),
        ({"x": 4, "y": 2}, {"a": 2, "b": 4}, [(2, 2, 2)]),
        ({"x": 1}, {"y": 1, "z": 1}, [()]),
    ],
)
def test_frames_of_two_meshes(
    one: dict[str, int], other: dict[str, int], sizes: list[tuple[int, ...]]
) -> None:
    sides = [reshard.spec(reshard.DeviceMesh.of(**axes), "-") for axes in (one, other)]
    prime_meshes = find_prime_meshes(*sides)
    assert [prime_mesh.sizes for prime_mesh in prime_meshes] == sizes
    # Atoms of two prime meshes have different numbers.
    primes = [prime for prime_mesh in prime_meshes for prime in prime_mesh.primes]
    assert len(set(primes)) == len(primes)


def test_sub_axes_in_use_are_boundaries() -> None:
    mesh = reshard.DeviceMesh.of(x=12, y=2)
    prime_meshes = find_prime_meshes(reshard.spec(mesh, "x:(1)3"), reshard.spec(mesh, "x:(6)2"))
    assert prime_meshes[0].sizes == (3, 2, 2, 2)
    assert prime_meshes[0].primes_of([Axis("x", 1, 3), Axis("y")]) == (0, 3)
    assert prime_meshes[0].axes((1, 2, 3)) == (Axis("x", 3, 4), Axis("y"))
    assert prime_meshes[0].units_of([2, 0, 3, 1]) == [(2,), (0,), (3,), (1,)]
    whole = PrimeMesh(mesh, [1, 12, 24])
    assert whole.units_of([2, 3, 0]) == [(0, 2), (3,)]


@settings(deadline=None)
@given(st.data(), meshes(12), st.integers(1, 30))
def test_counts_of_groups_below_an_index(
    data: st.DataObject, mesh: reshard.DeviceMesh, length: int
) -> None:
    """Counted index by index, over the groups that the mesh itself has."""
    spec = data.draw(shardings(mesh, 1))
    (prime_mesh,) = find_prime_meshes(spec, spec)
    space = Space([prime_mesh], (length,))
    (cut,) = space.state(0, spec).cuts
    chosen = frozenset(prime for prime in prime_mesh.primes if data.draw(st.booleans()))
    held = space.intervals_of_groups(0, length, cut, chosen)
    layout = spec.layout((length,))
    groups = mesh.groups(prime_mesh.axes(sorted(chosen)))
    group_of = {rank: group for group in groups for rank in group}
    low, high = (
        np.array([data.draw(st.integers(0, length)) for _ in prime_mesh.ranks]) for _ in range(2)
    )
    found = held.count_below(np.maximum(low, high)) - held.count_below(np.minimum(low, high))
    for place, rank in enumerate(prime_mesh.ranks):
        indices = set(range(min(low[place], high[place]), max(low[place], high[place])))
        own = {
            index
            for member in group_of[rank]
            for box in layout.boxes(member)
            for index in range(box.start[0], box.stop[0])
        }
        assert found[place] == len(indices & own)


def test_indices_below_the_first_part_are_not_counted() -> None:
    held = GroupIntervals(np.array([0]), np.array([2]), np.array([4]), length=10)
    counts = [int(held.count_below(np.array([index]))[0]) for index in range(6)]
    assert counts == [0, 0, 0, 1, 2, 2]


def in_one_frame(pair: Pair) -> Problem | None:
    problem = make_problem(*pair)
    return problem if problem is not None and len(problem.space.prime_meshes) == 1 else None


@settings(deadline=None, max_examples=choose(24, 80))
@given(st.data(), pairs(max_devices=12, partials=False))
def test_legality_equals_a_plan_of_each_group(data: st.DataObject, pair: Pair) -> None:
    problem = in_one_frame(pair)
    if problem is None:
        return
    space, source, target = problem.space, problem.source, problem.target
    prime_mesh = space.prime_meshes[0]

    def is_legal(step: Step) -> bool:
        try:
            step.verify()
        except PlanError:
            return False
        return True

    sides = (space.spec(source, None), space.spec(target, None))
    assert is_inside(space, target, source) == is_legal(Slice(space.shape, *sides))
    chosen = frozenset(prime for prime in prime_mesh.primes if data.draw(st.booleans()))
    gather = AllGather(space.shape, *sides, prime_mesh.axes(sorted(chosen)))
    assert is_covered(space, source, target, chosen) == is_legal(gather)
    if is_permutation(space, source, target):
        assert is_legal(Permute(space.shape, *sides))
    if source.used == target.used:
        group = find_group(space, source, target)
        assert group is not None and group <= source.used
        assert is_legal(JointAllToAll(space.shape, *sides, prime_mesh.axes(sorted(group))))


@settings(deadline=None, max_examples=choose(24, 80))
@given(pairs(max_devices=12))
def test_a_named_step_is_legal(pair: Pair) -> None:
    problem = in_one_frame(pair)
    if problem is None:
        return
    space = problem.space
    named = name_step(space, problem.source, problem.target)
    if named is not None:
        kind, primes, dims = named
        reduction = pair[0].reduction
        sides = [space.spec(state, reduction) for state in (problem.source, problem.target)]
        kind(space.shape, *sides, space.prime_meshes[0].axes(primes), dims).verify()


def test_shorter_cuts() -> None:
    assert drop_minor_axis(((0, 1), (2,))) == ((0, 1),)
    assert drop_minor_axis(((0, 1),)) == ((0,),)
    assert drop_minor_axis(((0,),)) == ()
    assert flatten_cut(((0, 1), (2,))) == (0, 1, 2)


def test_nothing_is_shared_by_boxes_apart() -> None:
    prime_mesh = PrimeMesh(reshard.DeviceMesh.of(x=2, y=2), [1, 2, 4])
    space = Space([prime_mesh], (4, 4))
    rows, columns = State(0, (((0, 1),), ())), State(0, ((), ((0, 1),)))
    assert count_overlaps(space.boxes(rows), space.boxes(columns)).tolist() == [1, 1, 1, 1]
    for one, other in itertools.permutations((rows, columns)):
        assert space.arriving(one, other) == 12
    swapped = State(0, (((1, 0),), ()))
    assert count_overlaps(space.boxes(rows), space.boxes(swapped)).tolist() == [4, 0, 0, 4]
