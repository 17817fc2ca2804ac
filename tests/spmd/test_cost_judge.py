"""The least time, against all that could be chosen: every sharding of every value, every way.

The judge knows nothing of candidates. It gives each axis of the mesh, in any order, to a dimension
of a value, to its contributions, or to nothing; to a factor of an operator, to operands whose
contributions are carried through, or to nothing; and adds up programs and work by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache, lru_cache

import numpy as np
import pytest

from reshard import DeviceMesh, ShardingSpec, spec
from reshard.dtypes import dtype
from reshard.spmd.core.array_type import ArrayType
from reshard.spmd.graph import Graph
from reshard.spmd.propagation.by_cost.cost_model import Machine
from reshard.spmd.propagation.by_cost.cost_propagation import propagate_by_cost
from reshard.spmd.shards.chosen_program import chosen_program
from reshard.topology import Device, Link, Topology

SIZE = 64
SHAPE = (SIZE, SIZE)
FLOAT = dtype("float32")
RATE, SPEED = 1e11, 1e10
ONE, TWO = DeviceMesh.of(x=2), DeviceMesh.of(x=2, y=2)

# What the operators are to the judge: letters of operands and result, and operands that may have
# contributions together.
OPERATORS: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "matmul": ("ik,kj->ij", [(0,), (1,)]),
    "add": ("ij,ij->ij", [(0, 1)]),
    "multiply": ("ij,ij->ij", [(0,), (1,)]),
    "negative": ("ij->ij", [(0,)]),
    "exp": ("ij->ij", []),
    "permute_dims": ("ij->ji", [(0,)]),
}


def rule_text(name: str) -> str:
    letters = OPERATORS[name][0]
    operands, _, result = letters.partition("->")
    given = ", ".join(f"[{', '.join(one)}]" for one in operands.split(","))
    used = sorted(set(operands) - {","})
    sizes = ", ".join(f"{letter}={SIZE}" for letter in used)
    reduced = [letter for letter in used if letter not in result]
    kinds = f" reduction={{{', '.join(reduced)}}}" if reduced else ""
    return f"({given}) -> ([{', '.join(result)}]) {{{sizes}}}{kinds}"


def dealt(mesh: DeviceMesh, places: int) -> Iterator[list[list[str]]]:
    """The axes, in any order, dealt to so many places or to none."""
    seen = set()
    for axes in itertools.permutations(mesh.axis_names):
        for chosen in itertools.product(range(places + 1), repeat=len(axes)):
            found: list[list[str]] = [[] for _ in range(places + 1)]
            for axis, place in zip(axes, chosen, strict=True):
                found[place].append(axis)
            key = str(found[:places])
            if key not in seen:
                seen.add(key)
                yield found[:places]


def said(mesh: DeviceMesh, dims: list[list[str]], partial: list[str]) -> ShardingSpec:
    text = ", ".join(" ".join(axes) or "-" for axes in dims)
    return spec(mesh, text + (f" | sum({' '.join(sorted(partial))})" if partial else ""))


@lru_cache(maxsize=8)
def every_spec(mesh: DeviceMesh) -> tuple[ShardingSpec, ...]:
    return tuple(dict.fromkeys(said(mesh, found[:2], found[2]) for found in dealt(mesh, 3)))


@lru_cache(maxsize=100_000)
def moving_s(source: ShardingSpec, target: ShardingSpec, topology: Topology) -> float:
    program = chosen_program(ArrayType(SHAPE, FLOAT, source), target)
    return program.estimate(FLOAT, topology).seconds_s


Way = tuple[float, tuple[ShardingSpec, ...], ShardingSpec]


def ways(name: str, mesh: DeviceMesh) -> list[Way]:
    """Seconds, what is read, and what is made."""
    letters, carried = OPERATORS[name]
    operands, _, result = letters.partition("->")
    factors = sorted(set(operands) - {","})
    found: dict[object, Way] = {}
    for places in dealt(mesh, len(factors) + len(carried)):
        cut = dict(zip(factors, places, strict=False))
        kept = places[len(factors) :]
        if sum(map(bool, kept)) > 1:
            continue
        having = next((who for who, axes in zip(carried, kept, strict=True) if axes), ())
        pending = next(filter(None, kept), [])
        reads = tuple(
            said(mesh, [cut[letter] for letter in own], pending if number in having else [])
            for number, own in enumerate(operands.split(","))
        )
        reduced = [axis for letter in factors if letter not in result for axis in cut[letter]]
        makes = said(mesh, [cut[letter] for letter in result], pending + reduced)
        here = {letter: SIZE // 2 ** len(axes) for letter, axes in cut.items()}
        products = math.prod(here.values()) if name == "matmul" else 0
        tensors = [*operands.split(","), result]
        size_bytes = 4 * sum(math.prod(here[letter] for letter in own) for own in tensors)
        seconds = max(2 * products / RATE, size_bytes / SPEED)
        found[seconds, reads, makes] = (seconds, reads, makes)
    return list(found.values())


def least_s(
    mesh: DeviceMesh,
    operations: list[tuple[str, list[int]]],
    inputs: int,
    given: dict[int, str],
    topology: Topology,
) -> float:
    """The least time of all choices, each value in turn one axis of a table."""
    everything = every_spec(mesh)
    values = inputs + len(operations)
    own = []
    for number in range(values):
        if number in given:
            own.append((spec(mesh, given[number]),))
        elif number == values - 1:
            own.append(tuple(one for one in everything if not one.partial_axes))
        else:
            own.append(everything)

    @cache
    def tables(value: int, end: ShardingSpec, is_read: bool) -> np.ndarray:
        """What a value takes that goes to an end, or comes from it, for each of its shardings."""
        ends = [(one, end) if is_read else (end, one) for one in own[value]]
        return along(value, values, [moving_s(*pair, topology) for pair in ends])

    least = math.inf
    # Every operation in every way, since those that read a value so move it once together.
    for chosen in itertools.product(*(ways(name, mesh) for name, _ in operations)):
        total = np.zeros([1] * values)
        moves: set[tuple[int, ShardingSpec]] = set()
        for number, (seconds, reads, makes) in enumerate(chosen):
            result = inputs + number
            moves.update(zip(operations[number][1], reads, strict=True))
            total = total + seconds + tables(result, makes, False)
        for value, end in moves:
            total = total + tables(value, end, True)
        least = min(least, float(total.min()))
    return least


def along(value: int, values: int, seconds: list[float]) -> np.ndarray:
    shape = [1] * values
    shape[value] = len(seconds)
    return np.array(seconds).reshape(shape)


def links(bytes_per_s: float, latency_s: float) -> Topology:
    device = Device(SPEED, (("float32", RATE),))
    return Topology([0] * 4, within_host=Link(bytes_per_s, latency_s), device=device)


FAST, SLOW, FAR = links(1e12, 1e-8), links(1e8, 1e-6), links(1e11, 1e-4)

CASES: list[tuple[DeviceMesh, list[tuple[str, list[int]]], int, dict[int, str]]] = [
    (TWO, [("matmul", [0, 1])], 2, {0: "x, y", 1: "-, -"}),
    (TWO, [("matmul", [0, 1])], 2, {0: "-, x y", 1: "y, x"}),
    (TWO, [("matmul", [0, 1])], 2, {0: "-, x", 1: "x, -", 2: "y, -"}),
    (TWO, [("matmul", [0, 1])], 2, {2: "x, y"}),
    (TWO, [("add", [0, 1])], 2, {0: "x, y", 1: "y, x"}),
    (TWO, [("multiply", [0, 1])], 2, {0: "- , - | sum(x)", 1: "y, -"}),
    (TWO, [("matmul", [0, 1]), ("exp", [2])], 2, {0: "-, x", 1: "x, y"}),
    (TWO, [("matmul", [0, 1]), ("add", [2, 0])], 2, {0: "x, y", 1: "x, y"}),
    (TWO, [("permute_dims", [0]), ("add", [1, 0])], 1, {0: "x, y"}),
    (TWO, [("permute_dims", [0]), ("add", [1, 0])], 1, {0: "y x, -"}),
    (ONE, [("matmul", [0, 1]), ("exp", [2]), ("matmul", [3, 1])], 2, {0: "-, x", 1: "x, -"}),
    (
        ONE,
        [("matmul", [0, 1]), ("matmul", [1, 0]), ("add", [2, 3]), ("negative", [4])],
        2,
        {0: "-, x", 1: "x, -"},
    ),
    # What is read more than once: moved for all, or computed with as it lies.
    (ONE, [("exp", [0]), ("matmul", [0, 0]), ("add", [1, 2])], 1, {0: "-, x", 3: "x, -"}),
    (
        ONE,
        [("matmul", [0, 1]), ("matmul", [0, 2]), ("matmul", [0, 3]), ("add", [4, 5])],
        4,
        {0: "x, -", 1: "-, x", 2: "-, x", 3: "x, -", 7: "-, x"},
    ),
    (
        ONE,
        [("negative", [0]), ("permute_dims", [1]), ("multiply", [1, 2]), ("exp", [3])],
        1,
        {0: "- , - | sum(x)", 4: "-, x"},
    ),
]


@pytest.mark.parametrize("topology", [FAST, SLOW, FAR], ids=["fast", "slow", "far"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(name for name, _ in case[1]))
def test_nothing_that_could_be_chosen_takes_less(
    case: tuple[DeviceMesh, list[tuple[str, list[int]]], int, dict[int, str]], topology: Topology
) -> None:
    mesh, operations, inputs, given = case
    graph = Graph.of(
        [SHAPE] * inputs,
        [(name, operands, rule_text(name)) for name, operands in operations],
        [inputs + len(operations) - 1],
    )
    specs = {number: spec(mesh, text) for number, text in given.items()}
    found = propagate_by_cost(graph, specs, machine=Machine(topology))
    assert found.is_exact
    assert found.seconds_s == pytest.approx(least_s(mesh, operations, inputs, given, topology))


def test_the_judge_looks_at_everything() -> None:
    assert len(every_spec(TWO)) == 18
    assert len(every_spec(ONE)) == 4
    # Three factors, two operands to carry, or nothing; two orders where both cut one factor.
    assert len(ways("matmul", TWO)) == 6 * 6 + 3 - 2
