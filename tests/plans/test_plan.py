"""Plans from specs and layouts, and invalid arguments of public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import reshard
from reshard.errors import LayoutError, PlanError, ReshardError, SpecError, UsageError

MESH = reshard.DeviceMesh.of(tp=4)
ROWS = reshard.spec(MESH, "tp, -")
COLUMNS = reshard.spec(MESH, "-, tp")


def test_specs_make_the_plan_that_their_layouts_make() -> None:
    shape = (8, 6)
    known = reshard.plan(ROWS.layout(shape), COLUMNS.layout(shape), "float32")
    assert reshard.plan(ROWS, COLUMNS, "float32", shape=shape) is known
    assert reshard.plan(ROWS, COLUMNS, dtype="float32", shape=list(shape)) is known
    assert reshard.plan(ROWS.layout(shape), COLUMNS, "float32") is known
    assert reshard.plan(ROWS, COLUMNS.layout(shape), "float32") is known
    assert reshard.plan(ROWS, COLUMNS.layout(shape), "float32", shape=shape) is known


LAYOUT = ROWS.layout((8, 6))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ROWS, COLUMNS), PlanError, r"the source is ShardingSpec.*shape=\(4096, 4096\)"),
        (
            (LAYOUT, LAYOUT, None, (8, 7)),
            PlanError,
            r"shape \[8, 6\], but the tensor has shape .*8, 7\]",
        ),
        ((LAYOUT, ROWS.layout((8, 7))), PlanError, "both layouts must be of the same tensor"),
        ((ROWS, COLUMNS, None, "86"), PlanError, "shape '86' must be a list of whole numbers"),
        ((ROWS, COLUMNS, None, (8.0, 6)), PlanError, r"shape \[8\.0, 6\] must be"),
        ((ROWS, COLUMNS, None, (8,)), SpecError, "for tensors of 2 dimensions, not for shape"),
        ((ROWS, COLUMNS, None, (2**40, 2**40)), LayoutError, "bytes fit 64 bits"),
        (
            ("tp, -", COLUMNS, None, (8, 6)),
            PlanError,
            "the source is 'tp, -', neither a Layout nor",
        ),
        ((LAYOUT, None), PlanError, "the target is None, neither a Layout nor a spec"),
        ((LAYOUT, LAYOUT, "float99"), UsageError, "float99"),
    ],
)
def test_invalid_plans_raise(
    arguments: tuple[Any, ...], error: type[ReshardError], message: str
) -> None:
    source, target, dtype, shape = (*arguments, None, None)[:4]
    with pytest.raises(error, match=message):
        reshard.plan(source, target, dtype, shape=shape)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: reshard.find_program(LAYOUT, LAYOUT, (8, 6)), "source <Layout.*> is not a Shardi"),
        (lambda: reshard.find_program(ROWS, COLUMNS, "86"), "shape '86' must be a list"),
        (lambda: reshard.find_program(ROWS, COLUMNS, (8, 6), steps=[1]), "expected one of joint"),
        (lambda: reshard.find_program(ROWS, COLUMNS, (8, 6), live_shard=0.5), "live_shard 0.5"),
        (lambda: reshard.picture(ROWS), "layout ShardingSpec.* is not a Layout; give a spec"),
        (lambda: reshard.picture(LAYOUT, "80"), "width '80' must be a whole number"),
        (lambda: reshard.picture(LAYOUT, labels=3), "labels 3; give 'ranks', or a function"),
        (lambda: reshard.change_picture(LAYOUT, LAYOUT, plan=3), "plan 3 is not a Plan"),
        (lambda: reshard.read_sharding(ROWS), "is not a str; give a text"),
        (lambda: reshard.read_sharding("P('tp')", MESH, 3), "shape 3 must be a list"),
        (lambda: reshard.write_sharding("tp, -", "jax"), "sharding 'tp, -' is not a ShardingSpec"),
        (lambda: reshard.write_sharding(ROWS, "dtensr"), "no notation 'dtensr'; name the"),
        (lambda: reshard.Binding(ROWS, {}, {}), "layout ShardingSpec.* is not a Layout"),
        (lambda: reshard.Binding(LAYOUT, [0, 1], {}), r"addresses \[0, 1\] is not a Mapping"),
        (lambda: reshard.relabel(LAYOUT), "is not a job; give a Job, or a plan"),
        (lambda: reshard.StagedJob(LAYOUT, None), "job <Layout.*is not a Job"),
        (lambda: reshard.plan(LAYOUT, LAYOUT).verify(3), "transfers 3 is not a Transfers"),
    ],
)
def test_misuse_of_public_functions_raises(misuse: Callable[[], object], message: str) -> None:
    with pytest.raises(ReshardError, match=message):
        misuse()
