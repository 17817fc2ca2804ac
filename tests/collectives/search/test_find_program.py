"""Programs against the direct plan, on random shardings and in named cases."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

import reshard
from collectives.program_checks import check, is_exchange
from collectives.sharding_pairs import Pair, pairs
from reshard.collectives import (
    STEPS,
    find_program,
)
from reshard.errors import PlanError, UsageError
from selection import choose


@settings(max_examples=choose(60, 150), deadline=None)
@given(pairs())
def test_a_program_has_the_result_of_the_direct_plan(pair: Pair) -> None:
    source, target, shape = pair
    program = find_program(source, target, shape)
    check(program)
    quick = find_program(source, target, shape, search="constructive")
    check(quick)
    if not is_exchange(quick):
        assert program.moved_elements <= quick.moved_elements


@settings(max_examples=choose(25, 60), deadline=None)
@given(pairs(max_devices=12))
def test_with_an_exchange_nothing_moves_more(pair: Pair) -> None:
    source, target, shape = pair
    program = find_program(source, target, shape, steps="all")
    check(program)
    assert program.moved_elements <= find_program(source, target, shape).moved_elements
    if not source.partial_axes:
        assert program.moved_elements == program.lower_bound_elements


MESH = reshard.DeviceMesh.of(x=2, y=2, z=2)


def found(
    before: tuple[reshard.DeviceMesh, str],
    after: tuple[reshard.DeviceMesh, str],
    shape: tuple[int, ...],
) -> tuple[list[str], int]:
    program = find_program(reshard.spec(*before), reshard.spec(*after), shape)
    check(program)
    assert not is_exchange(program)
    return [step.name for step in program.steps], program.moved_elements


@pytest.mark.parametrize(
    ("before", "after", "shape", "steps", "moved"),
    [
        # Two names of one cut: nothing to do.
        ("x", "y z", (12,), [], 0),
        ("x, -", "y z, -", (12, 4), [], 0),
        ("x, -", "-, y z", (12, 6), ["all-to-all"], 60),
        ("x, -", "y, -", (12, 4), ["all-gather"], 96),
        ("x, -", "y, z", (12, 6), ["all-to-all"], 48),
    ],
)
def test_a_mesh_and_its_reshape(
    before: str, after: str, shape: tuple[int, ...], steps: list[str], moved: int
) -> None:
    line, grid = reshard.DeviceMesh.of(x=6), reshard.DeviceMesh.of(y=2, z=3)
    assert found((line, before), (grid, after), shape) == (steps, moved)


@pytest.mark.parametrize("devices", [(3, 2, 1, 0), (3, 1, 2, 0)])
def test_device_orders(devices: tuple[int, ...]) -> None:
    plain = reshard.DeviceMesh.of(x=2, y=2)
    other = reshard.DeviceMesh.of(x=2, y=2, devices=devices)
    moving = sum(rank != place for place, rank in enumerate(devices))
    both = found((plain, "x, y"), (other, "x, y"), (16, 8))
    assert both == (["permute"], 32 * moving)
    # The same shardings as in the other order, read off the ranks.
    names, moved = found((plain, "x, -"), (other, "x, -"), (16, 8))
    assert names == ["permute"] and moved == 64 * (4 if devices == (3, 2, 1, 0) else 2)


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [((4, 6), (24, 12)), ((4, 6), (7, 10)), ((4, 6, 5), (24, 30)), ((4, 6, 5), (13, 31))],
)
def test_meshes_whose_sizes_share_some_factors(
    mesh: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    devices = reshard.DeviceMesh.of(**dict(zip("xyz", mesh, strict=False)))
    for before, after in [("x, y", "y, x"), ("x, -", "y, -"), ("x y, -", "-, y x")]:
        program = find_program(reshard.spec(devices, before), reshard.spec(devices, after), shape)
        check(program)
        # Where nothing divides, one axis cannot take another's place within legal steps.
        assert not is_exchange(program) or shape in {(7, 10), (13, 31)}


def test_an_uneven_dimension_over_axes_that_are_not_neighbours() -> None:
    names, moved = found((MESH, "-, x z"), (MESH, "x z, -"), (4, 10))
    assert names == ["all-to-all"]
    assert moved == 2 * sum(10 - held for held in (3, 3, 3, 1))


@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_contributions_are_kept_scattered_or_reduced(reduction: str) -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    # Kept along y while rows become columns along x.
    kept = found((mesh, f"x, - | {reduction}(y)"), (mesh, f"-, x | {reduction}(y)"), (4, 6))
    assert kept == (["all-to-all"], 4 * 6)
    assert found((mesh, f"-, - | {reduction}(x y)"), (mesh, "x y, -"), (4, 6)) == (
        ["reduce-scatter"],
        3 * 24,
    )
    names, moved = found(
        (mesh, f"-, - | {reduction}(x y)"), (mesh, f"x, - | {reduction}(y)"), (4, 6)
    )
    assert (names, moved) == (["reduce-scatter"], 2 * 24)
    names, moved = found((mesh, f"-, - | {reduction}(x y)"), (mesh, "-, -"), (4, 6))
    assert moved == 2 * 3 * 24


def placements(dims: int) -> list[reshard.ShardingSpec]:
    """Every order of the three axes, in every way on the dimensions."""
    found = []
    for order in itertools.permutations("xyz"):
        for where in itertools.combinations_with_replacement(range(dims), 3):
            cuts = [
                " ".join(axis for axis, at in zip(order, where, strict=True) if at == dim) or "-"
                for dim in range(dims)
            ]
            found.append(reshard.spec(MESH, ", ".join(cuts)))
    return found


@pytest.mark.parametrize(
    "shape",
    [
        (17, 5),
        pytest.param(
            (33, 16, 8, 1),
            marks=pytest.mark.exhaustive(
                reason="2,400 programs; of two dimensions all 576 are found"
            ),
        ),
    ],
)
def test_all_orders_of_shards(shape: tuple[int, ...]) -> None:
    """Every order of the axes on every dimension, to every order on every other.

    Of four dimensions, from every way to cut them by `x`, `y` and `z` in this order: all others are
    the same but for the names of the axes, which are as long as one another. By default two of
    seven are run on arrays.
    """
    specs = placements(len(shape))
    assert len(set(specs)) == len(specs) == {2: 24, 4: 120}[len(shape)]
    sources, run_of_seven = (specs, choose(2, 7)) if len(shape) == 2 else (specs[:20], 2)
    for number, (source, target) in enumerate(itertools.product(sources, specs)):
        program = find_program(source, target, shape)
        assert not is_exchange(program)
        assert program.moved_elements == program.lower_bound_elements
        assert len(program.steps) <= 1
        program.verify()
        if number % 7 < run_of_seven:
            check(program)


@pytest.mark.parametrize(
    ("before", "after", "shape"),
    [
        ("", "", ()),
        ("| sum(x y)", "", ()),
        ("| sum(x)", "", ()),
        ("| sum(x y)", "| sum(y)", ()),
        ("x y", "y", (0,)),
        ("x, y", "y, z x", (0, 4)),
        ("x, - | sum(y)", "-, y", (3, 0)),
        ("x y z, -", "-, z y x", (1, 1)),
        ("- | sum(x y z)", "z y x", (1,)),
    ],
)
def test_scalars_and_empty_tensors(before: str, after: str, shape: tuple[int, ...]) -> None:
    for steps in ("joint", "all"):
        program = find_program(
            reshard.spec(MESH, before), reshard.spec(MESH, after), shape, steps=steps
        )
        check(program)


def test_unsupported_shardings_become_an_exchange() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    others = reshard.DeviceMesh.of(x=4, devices=[4, 5, 6, 7])
    for source, target, shape in [
        (reshard.spec(mesh, "x, -"), reshard.spec(others, "x, -"), (8, 4)),
        (reshard.spec(mesh, "x@stride2, -"), reshard.spec(mesh, "-, x"), (8, 4)),
        (reshard.spec(mesh, "x | only(y=0)"), reshard.spec(mesh, "y"), (8,)),
        (reshard.spec(mesh, "-"), reshard.spec(mesh, "- | sum(x)"), (8,)),
        # Ten of five and five, cut again into three, three, three and one.
        (reshard.spec(mesh, "x"), reshard.spec(mesh, "x y"), (10,)),
    ]:
        program = find_program(source, target, shape)
        check(program)
        assert [step.name for step in program.steps] == ["exchange"]
        assert program.moved_elements == program.lower_bound_elements


def test_nested_levels_are_legal_where_flat_cuts_are_not() -> None:
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    assert found((mesh, "x"), (mesh, "x / y"), (10,)) == (["slice"], 0)
    assert found((mesh, "x / y"), (mesh, "x"), (10,)) == (["all-gather"], 2 + 3 + 2 + 3)


def test_invalid_searches_raise() -> None:
    source, target = reshard.spec(MESH, "x, -"), reshard.spec(MESH, "-, x")
    with pytest.raises(PlanError, match=r"live_shard=5: the shards .* up to 16"):
        find_program(source, target, (4, 8), live_shard=5)
    with pytest.raises(UsageError, match="search='best': expected one of default, exact"):
        find_program(source, target, (4, 8), search="best")
    with pytest.raises(UsageError, match="steps='some': expected"):
        find_program(source, target, (4, 8), steps="some")
    one = reshard.spec(reshard.DeviceMesh.of(x=2, y=2), "x")
    both = reshard.spec(reshard.DeviceMesh.of(x=2, y=2), "x y")
    with pytest.raises(PlanError, match="no program of classical steps"):
        find_program(one, both, (10,), steps="classical")


def test_a_larger_live_shard_is_used() -> None:
    """With memory for it, rows are gathered where no legal program stays within the shards."""
    mesh = reshard.DeviceMesh.of(x=2, y=2)
    one, both = reshard.spec(mesh, "x"), reshard.spec(mesh, "x y")
    program = find_program(one, both, (10,), live_shard=10)
    check_moved = [(step.name, step.moved_elements) for step in program.steps]
    assert check_moved == [("all-gather", 20), ("slice", 0)]
    program.verify()


def test_programs_are_cached() -> None:
    source, target = reshard.spec(MESH, "x, -"), reshard.spec(MESH, "-, x")
    assert find_program(source, target, (4, 8)) is find_program(source, target, [4, 8])
    assert sorted(STEPS) == ["all", "classical", "joint", "mlir"]
