"""Why values move: entered by hand for each kind of reason, and there for all that moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.spmd.tracing.table import reason_of
from spmd.traced_functions import FUNCTIONS, Traced

MESH = DeviceMesh.of(dp=2, tp=4)


def rows(text: str, shape: tuple[int, ...] = (8, 8)) -> sp.ArrayType:
    return sp.abstract(shape, "float32", spec(MESH, text))


CASES: list[tuple[Callable[..., Any], list[sp.ArrayType], list[str]]] = [
    (lambda x: sp.flip(x, axis=0), [rows("tp, -")], ["flip needs all of [i]"]),
    (lambda x: x[:, 2:6], [rows("-, tp")], ["slice needs all of [j]"]),
    (
        lambda x: sp.reshape(x, (6, 4)),
        [rows("tp, -", (8, 3))],
        ["reshape needs all of [ij]"],
    ),
    (
        lambda x, y: sp.exp(x @ y),
        [rows("-, tp"), rows("tp, -")],
        ["contributions to %2 alone do not go through exp"],
    ),
    (
        lambda x, y, z: x @ y + z,
        [rows("-, tp"), rows("tp, -"), rows("-, -")],
        ["contributions to %3 alone do not go through add"],
    ),
    # With contributions on both sides nothing moves.
    (lambda x, y: x @ y + x @ (y * 2.0), [rows("-, tp"), rows("tp, -")], []),
    (
        lambda x, y: x + y,
        [rows("tp, -"), rows("dp, -")],
        ["[i] is cut as in %0, not by dp"],
    ),
    (
        lambda x, y: x + y,
        [rows("tp, -"), rows("-, tp")],
        ["tp cuts [i] of %0"],
    ),
    (
        lambda x, w: x @ w,
        [rows("dp, tp, -", (4, 8, 8)), rows("-, tp", (8, 64))],
        ["tp cuts [k] of %1"],
    ),
    (
        lambda x: sp.max_pool(x, (3,), strides=(1,), padding=((1, 1),)),
        [rows("-, tp", (2, 16))],
        ["ranks need other elements for max_pool than they have"],
    ),
    (lambda x: x.shard(spec(MESH, "-, -")), [rows("tp, -")], ["the function asks for it"]),
]


@pytest.mark.parametrize(("function", "arguments", "expected"), CASES)
def test_reasons(function: Any, arguments: list[Any], expected: list[str]) -> None:
    traced = sp.trace(function, *arguments)
    lines = traced.reasons().splitlines()
    assert [line.split("`: ")[1] for line in lines] == expected
    told = [
        reshard["reason"]
        for one in json.loads(traced.to_json())["operations"]
        for reshard in (*one["before"], *one["after"])
        if reshard["moved_bytes"]
    ]
    assert told == expected


def test_a_line_names_the_operation_and_what_moves() -> None:
    traced = sp.trace(lambda x: sp.flip(x, axis=0), rows("tp, -"))
    expected = "%1 = flip: %0 all-gather(tp) to `-, -`: flip needs all of [i]"
    assert traced.reasons() == expected


def test_placements_have_their_reason() -> None:
    traced = sp.trace(lambda x, y: sp.exp(x @ y), rows("-, tp"), rows("-, -"), strategy="basic")
    assert "the placement wants what matmul makes so" in traced.reasons()


@pytest.mark.parametrize("strategy", ["eager", "basic", "cost"])
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_all_that_moves_has_a_reason(case: Traced, strategy: str) -> None:
    traced = sp.trace(case.function, *case.types(), strategy=strategy)
    for one in traced.operations:
        for reshard in one.reshards:
            if reshard.moved_elements:
                reason = reason_of(one, reshard)
                assert reason, f"{one.operation}: {reshard}"
