"""Graphs: their text, and what they refuse."""

from __future__ import annotations

import pytest

from reshard.errors import NotationError, SpecError
from reshard.spmd.graph import Graph, Operation, Value
from reshard.spmd.rules.sharding_rule import OpShardingRule

TEXT = """\
%0: float32[4, 8], %1: bfloat16[]
%2: float32[4] = sum(%0; axis=1, keepdims=False) ([i, j]) -> ([i]) {i=4, j=8} reduction={j}
%3: float32[4], %4: int64[4] = top(%2, %1) ([i], []) -> ([i], [i]) {i=4}
return %3, %0, %3"""

IDENTITY = OpShardingRule.parse("([i]) -> ([i]) {i=4}")


def test_the_text_there_and_back() -> None:
    graph = Graph.parse(TEXT)
    assert str(graph) == TEXT
    assert graph.outputs == (3, 0, 3)
    assert dict(graph.operations[0].attributes) == {"axis": 1, "keepdims": False}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a graph"),
        ("%0: float32[4]", "is not a graph"),
        ("%0: float32[4]\nnothing\nreturn %0", "'nothing' is not an operation"),
        ("%0 float32[4]\nreturn %0", "is not a list of values"),
        ("%0: float32[4]\nreturn 0", "' 0' is not a list of values"),
        (
            "%0: float32[4]\n%1: float32[4] = exp(%0; axis) ([i]) -> ([i]) {i=4}\nreturn %1",
            "' axis' are not attributes",
        ),
    ],
)
def test_text_that_is_not_a_graph(text: str, said: str) -> None:
    with pytest.raises(NotationError, match=said):
        Graph.parse(text)


def values(count: int) -> tuple[Value, ...]:
    return tuple(Value(number, (4,)) for number in range(count))


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (Operation("exp", (2,), (1,), IDENTITY), "%2 of .* is read before it is made"),
        (Operation("exp", (0,), (0,), IDENTITY), "%0 of .* is made twice"),
        (Operation("exp", (0,), (5,), IDENTITY), "%5 of .* is made twice, or is no value"),
        (Operation("exp", (0, 0), (1,), IDENTITY), "has 2 operands and 1 results"),
        (
            Operation("exp", (0,), (1,), OpShardingRule.parse("([i, j]) -> ([i]) {i=4, j=1}")),
            "has 1 dimensions; the rule has 2",
        ),
    ],
)
def test_graphs_that_cannot_be(operation: Operation, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Graph(values(3), (0,), (operation,), (0,))


def test_an_output_that_nothing_makes() -> None:
    with pytest.raises(SpecError, match="output %1"):
        Graph(values(2), (0,), (), (1,))


def test_values_are_numbered_in_order() -> None:
    with pytest.raises(SpecError, match=r"values are numbered \[1\]"):
        Graph((Value(1, (4,)),), (1,), (), (1,))
