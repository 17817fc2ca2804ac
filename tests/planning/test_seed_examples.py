"""The worked examples of MLIR's resharding notes, their contents entered by hand.

Each mesh is drawn as its devices lie: rows along the axis before the last, columns along the
last; `/` begins the next row of a device's own tensor, `|` separates devices, a line ends a
row of devices, an empty line separates planes of the first axis. Where the notes slip, the
contents here are the corrected ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard


@dataclass(frozen=True, slots=True)
class Example:
    """Two shardings of one tensor, what every device holds before and after, and the least cost."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    source: str
    target: str
    before: str
    after: str
    least_elements: int


EXAMPLES = [
    Example(
        mesh=(2, 3),
        shape=(6,),
        source="a b",
        target="b a",
        before="""
            11 | 12 | 13
            21 | 22 | 23
        """,
        after="""
            11 | 13 | 22
            12 | 21 | 23
        """,
        least_elements=4,
    ),
    Example(
        mesh=(2, 3),
        shape=(6,),
        source="a b",
        target="b",
        before="""
            11 | 12 | 13
            21 | 22 | 23
        """,
        after="""
            11 12 | 13 21 | 22 23
            11 12 | 13 21 | 22 23
        """,
        least_elements=10,
    ),
    Example(
        mesh=(2, 3),
        shape=(2, 6),
        source="-, a b",
        target="-, a",
        before="""
            11 / 21 | 12 / 22 | 13 / 23
            14 / 24 | 15 / 25 | 16 / 26
        """,
        after="""
            11 12 13 / 21 22 23 | 11 12 13 / 21 22 23 | 11 12 13 / 21 22 23
            14 15 16 / 24 25 26 | 14 15 16 / 24 25 26 | 14 15 16 / 24 25 26
        """,
        least_elements=24,
    ),
    Example(
        mesh=(2, 2, 2),
        shape=(4, 8),
        source="a, b c",
        target="a, c",
        before="""
            11 12 / 21 22 | 13 14 / 23 24
            15 16 / 25 26 | 17 18 / 27 28

            31 32 / 41 42 | 33 34 / 43 44
            35 36 / 45 46 | 37 38 / 47 48
        """,
        after="""
            11 12 13 14 / 21 22 23 24 | 15 16 17 18 / 25 26 27 28
            11 12 13 14 / 21 22 23 24 | 15 16 17 18 / 25 26 27 28

            31 32 33 34 / 41 42 43 44 | 35 36 37 38 / 45 46 47 48
            31 32 33 34 / 41 42 43 44 | 35 36 37 38 / 45 46 47 48
        """,
        least_elements=48,
    ),
    Example(
        mesh=(2, 3),
        shape=(6, 6),
        source="a, b",
        target="b, a",
        before="""
            11 12 / 21 22 / 31 32 | 13 14 / 23 24 / 33 34 | 15 16 / 25 26 / 35 36
            41 42 / 51 52 / 61 62 | 43 44 / 53 54 / 63 64 | 45 46 / 55 56 / 65 66
        """,
        after="""
            11 12 13 / 21 22 23 | 31 32 33 / 41 42 43 | 51 52 53 / 61 62 63
            14 15 16 / 24 25 26 | 34 35 36 / 44 45 46 | 54 55 56 / 64 65 66
        """,
        least_elements=26,
    ),
    Example(
        mesh=(2, 6),
        shape=(6, 6),
        source="a, b",
        target="b, a",
        before="""
            11/21/31 | 12/22/32 | 13/23/33 | 14/24/34 | 15/25/35 | 16/26/36
            41/51/61 | 42/52/62 | 43/53/63 | 44/54/64 | 45/55/65 | 46/56/66
        """,
        after="""
            11 12 13 | 21 22 23 | 31 32 33 | 41 42 43 | 51 52 53 | 61 62 63
            14 15 16 | 24 25 26 | 34 35 36 | 44 45 46 | 54 55 56 | 64 65 66
        """,
        least_elements=30,
    ),
    Example(
        mesh=(3,),
        shape=(6, 6),
        source="a, -",
        target="-, a",
        before="""
            11 12 13 14 15 16 / 21 22 23 24 25 26 | 31 32 33 34 35 36 / 41 42 43 44 45 46 | 51 52 53 54 55 56 / 61 62 63 64 65 66
        """,  # noqa: E501
        after="""
            11 12/21 22/31 32/41 42/51 52/61 62 | 13 14/23 24/33 34/43 44/53 54/63 64 | 15 16/25 26/35 36/45 46/55 56/65 66
        """,  # noqa: E501
        least_elements=24,
    ),
    Example(
        mesh=(2, 2, 2),
        shape=(4, 4),
        source="a, b c",
        target="a b, c",
        before="""
            11 / 21 | 12 / 22
            13 / 23 | 14 / 24

            31 / 41 | 32 / 42
            33 / 43 | 34 / 44
        """,
        after="""
            11 12 | 13 14
            21 22 | 23 24

            31 32 | 33 34
            41 42 | 43 44
        """,
        least_elements=12,
    ),
]


def read(drawing: str, dims: int) -> dict[int, NDArray[np.int64]]:
    """The arrays of a drawing, by rank: devices are drawn in row-major order."""
    devices = [device for line in drawing.split("\n") if line.strip() for device in line.split("|")]
    arrays = [[row.split() for row in device.split("/")] for device in devices]
    found = {rank: np.array(rows, dtype=np.int64) for rank, rows in enumerate(arrays)}
    return {rank: array if dims == 2 else array[0] for rank, array in found.items()}


def same(found: dict[int, NDArray[np.int64]], expected: dict[int, NDArray[np.int64]]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[rank], expected[rank]) for rank in expected
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.source} to {e.target}")
def test_an_example_of_the_notes(example: Example) -> None:
    axes = dict(zip("abc", example.mesh, strict=False))
    mesh = reshard.DeviceMesh.of(**axes)
    source, target = (
        reshard.spec(mesh, text).layout(example.shape) for text in (example.source, example.target)
    )
    before, after = (read(text, len(example.shape)) for text in (example.before, example.after))
    plan = reshard.plan(source, target)
    assert same(plan.run(before), after)
    assert plan.moved_elements == plan.lower_bound_elements == example.least_elements
    plan.verify()
    # The source's drawing is itself checked: it is what comes out on the way back.
    assert same(reshard.plan(target, source).run(after), before)


def place(layout: reshard.Layout, i: int, j: int) -> list[tuple[int, int, int]]:
    """The (rank, row, column) of every place of element (i, j)."""
    found = []
    for rank in layout.holders:
        (box,) = layout.boxes(rank) or (reshard.Box((0, 0), (0, 0)),)
        if box.start[0] <= i < box.stop[0] and box.start[1] <= j < box.stop[1]:
            found.append((rank, i - box.start[0], j - box.start[1]))
    return found


def test_the_check_of_the_notes() -> None:
    mesh = reshard.DeviceMesh.of(a=3, b=4)
    layout = reshard.spec(mesh, "a, b").layout((16, 23))
    assert place(layout, 13, 17) == [(2 * 4 + 2, 1, 5)]


@given(*[st.integers(1, 30)] * 2, *[st.integers(1, 6)] * 2)
def test_the_formulas_of_the_notes(K: int, L: int, M: int, N: int) -> None:  # noqa: N803
    """Both shardings, and the map from one to the other with its divisors put right."""

    def ceildiv(a: int, b: int) -> int:
        return -(-a // b)

    mesh = reshard.DeviceMesh.of(a=M, b=N)
    first, second = (reshard.spec(mesh, text).layout((K, L)) for text in ("a, b", "b, a"))
    for i, j in {(0, 0), (K - 1, L - 1), (K // 2, L // 2), (K // 3, L - 1)}:
        m, n, k, h = (
            i // ceildiv(K, M),
            j // ceildiv(L, N),
            i % ceildiv(K, M),
            j % ceildiv(L, N),
        )
        assert place(first, i, j) == [(m * N + n, k, h)]
        p = (n * ceildiv(L, N) + h) // ceildiv(L, M)
        q = (m * ceildiv(K, M) + k) // ceildiv(K, N)
        u = (m * ceildiv(K, M) + k) % ceildiv(K, N)
        v = (n * ceildiv(L, N) + h) % ceildiv(L, M)
        assert place(second, i, j) == [(p * N + q, u, v)]


def test_the_two_by_three_tiles_of_the_notes() -> None:
    """Which pairs of devices meet in the last drawing of the transposed mesh."""
    mesh = reshard.DeviceMesh.of(a=2, b=3)
    source, target = (reshard.spec(mesh, text).layout((6, 6)) for text in ("a, b", "b, a"))
    plan = reshard.plan(source, target)
    names = {rank: f"{rank // 3 + 1}{rank % 3 + 1}" for rank in range(6)}
    meet: dict[str, set[str]] = {}
    for source_slot, target_slot in zip(
        plan.transfers.source_slot.tolist(), plan.transfers.target_slot.tolist(), strict=True
    ):
        meet.setdefault(names[source_slot], set()).add(names[target_slot])
    assert meet == {
        "11": {"11", "12"},
        "12": {"11", "21", "12", "22"},
        "13": {"21", "22"},
        "21": {"12", "13"},
        "22": {"12", "22", "13", "23"},
        "23": {"22", "23"},
    }
