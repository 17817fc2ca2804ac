"""The worked examples of MLIR's resharding notes, their contents entered by hand.

Each mesh is drawn as its devices lie: rows along the axis before the last, columns along the
last; `/` begins the next row of a device's own tensor, `|` separates devices, a line ends a
row of devices, an empty line separates planes of the first axis. Where the notes slip, the
contents here are the corrected ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import reshard
from conformance.checked_movement import Side, check, rows, same
from oracle import shards_of
from reshard.notation.mlir import parse_mlir
from strategies import sizes_adding_up_to


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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.source} to {e.target}")
def test_an_example_of_the_notes(example: Example) -> None:
    axes = dict(zip("abc", example.mesh, strict=False))
    mesh = reshard.DeviceMesh.of(**axes)
    source, target = (
        Side.sharded(mesh, text, example.shape) for text in (example.source, example.target)
    )
    before, after = (read(text, len(example.shape)) for text in (example.before, example.after))
    plan = check(source, target, example.least_elements)
    assert same(plan.run(before), after)
    # The source's drawing is itself checked: it is what comes out on the way back.
    assert same(check(target, source).run(after), before)


# What the notes write for the shardings of their examples.
NOTES = {
    "a b": "[[0, 1]]",
    "b a": "[[1, 0]]",
    "b": "[[1]]",
    "-, a b": "[[], [0, 1]]",
    "-, a": "[[], [0]]",
    "a, b c": "[[0], [1, 2]]",
    "a, c": "[[0], [2]]",
    "a, c b": "[[0], [2, 1]]",
    "a, b": "[[0], [1]]",
    "b, a": "[[1], [0]]",
    "a, -": "[[0], []]",
    "a b, c": "[[0, 1], [2]]",
    "d c, -, a b": "[[3, 2], [], [0, 1]]",
    "d c, b, a": "[[3, 2], [1], [0]]",
    "d, b c, a": "[[3], [1, 2], [0]]",
    "-, b c, a": "[[], [1, 2], [0]]",
    "a, b c, -": "[[0], [1, 2], []]",
}


@pytest.mark.parametrize(("native", "notes"), NOTES.items())
def test_the_shardings_as_the_notes_write_them(native: str, notes: str) -> None:
    mesh = reshard.DeviceMesh.of(a=2, b=3, c=2, d=2)
    assert parse_mlir(notes, mesh) is reshard.spec(mesh, native)


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
    # The second check asks for column 19 of 14; column 13 is the last.
    layout = reshard.spec(reshard.DeviceMesh.of(a=5, b=2), "b, a").layout((27, 14))
    assert place(layout, 9, 13) == [(4 * 2 + 0, 9, 1)]
    assert place(layout, 9, 19) == []


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


def test_the_drawing_of_the_second_example() -> None:
    """Two rows, cut both ways, gathered along the rows: what its picture shows."""
    mesh = reshard.DeviceMesh.of(a=2, b=3)
    source, target = (reshard.spec(mesh, text).layout((2, 3)) for text in ("a, b", "-, b"))
    before = read("11 | 12 | 13 \n 21 | 22 | 23", 2)
    after = read("11 / 21 | 12 / 22 | 13 / 23 \n 11 / 21 | 12 / 22 | 13 / 23", 2)
    plan = reshard.plan(source, target)
    assert same(plan.run(before), after)
    assert plan.moved_elements == plan.lower_bound_elements == 6
    plan.verify()


def test_the_tiles_of_the_two_by_six_exchange() -> None:
    """Every tile is one element: device (m, n) has column n, device (p, q) wants row q."""
    mesh = reshard.DeviceMesh.of(a=2, b=6)
    tiles = set()
    for m, n, k in itertools.product(range(2), range(6), range(3)):
        p, q = n // 3, 3 * m + k
        tiles.add((6 * m + n, 6 * p + q, (k, 0), (0, n % 3), (1, 1)))
    plan = check(Side.sharded(mesh, "a, b", (6, 6)), Side.sharded(mesh, "b, a", (6, 6)), 30)
    assert rows(plan) == tiles


def test_the_tiles_of_the_two_by_three_exchange() -> None:
    """Their ranges of (k, l) and (u, v), entered by hand: rows of tiles, and columns of tiles."""
    # Coordinates m and q, then where the rows begin at the source, at the target, how many.
    across = [(0, 0, 0, 0, 2), (0, 1, 2, 0, 1), (1, 1, 0, 1, 1), (1, 2, 1, 0, 2)]
    # Coordinates n and p, then the same of the columns.
    down = [(0, 0, 0, 0, 2), (1, 0, 0, 2, 1), (1, 1, 1, 0, 1), (2, 1, 0, 1, 2)]
    tiles = {
        (3 * m + n, 3 * p + q, (k, h), (u, v), (high, wide))
        for (m, q, k, u, high), (n, p, h, v, wide) in itertools.product(across, down)
    }
    mesh = reshard.DeviceMesh.of(a=2, b=3)
    plan = check(Side.sharded(mesh, "a, b", (6, 6)), Side.sharded(mesh, "b, a", (6, 6)), 26)
    assert rows(plan) == tiles


@given(*[st.integers(1, 24)] * 2, *[st.integers(1, 5)] * 2)
def test_the_tiles_of_any_exchange(K: int, L: int, M: int, N: int) -> None:  # noqa: N803
    """For fixed (m, n, p, q), the range of (k, l, u, v): what the formulas give, point by point."""
    high, wide = -(-K // M), -(-L // N)
    points: dict[tuple[int, int], set[tuple[int, int, int, int]]] = {}
    for m, n, k, h in itertools.product(range(M), range(N), range(high), range(wide)):
        i, j = m * high + k, n * wide + h
        if i < K and j < L:
            q, u = divmod(i, -(-K // N))
            p, v = divmod(j, -(-L // M))
            points.setdefault((m * N + n, p * N + q), set()).add((k, h, u, v))
    mesh = reshard.DeviceMesh.of(a=M, b=N)
    plan = check(Side.sharded(mesh, "a, b", (K, L)), Side.sharded(mesh, "b, a", (K, L)))
    found = {}
    for source, target, (k, h), (u, v), (tall, broad) in rows(plan):
        steps = itertools.product(range(tall), range(broad))
        assert (source, target) not in found
        found[source, target] = {(k + a, h + b, u + a, v + b) for a, b in steps}
    assert found == points


def along_one_dimension(
    length: int, source: str, sources: int, target: str, targets: int
) -> list[tuple[int, int, int, int]]:
    """The pieces of a dimension cut two ways, in order: (source part, target part, start, length).

    No rank is on both sides, so every piece is a transfer.
    """
    before = reshard.DeviceMesh.of(x=sources)
    after = reshard.DeviceMesh.of(x=targets, devices=range(sources, sources + targets))
    plan = check(
        Side.sharded(before, source, (length,)), Side.sharded(after, target, (length,)), length
    )
    transfers = plan.transfers
    columns = (transfers.source_slot, transfers.target_slot - sources)
    boxes = (transfers.start[:, 0], transfers.shape[:, 0])
    return sorted(
        zip(*(column.tolist() for column in (*columns, *boxes)), strict=True),
        key=lambda piece: piece[2],
    )


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_the_cut_pattern_repeats_with_the_period_of_the_notes(S: int, T: int, times: int) -> None:  # noqa: N803
    period = S * T // math.gcd(S, T)
    length = period * times
    pieces = along_one_dimension(length, "x", length // S, "x", length // T)
    first = [piece for piece in pieces if piece[2] < period]
    # Inside a period no two cuts meet, so it is the shortest.
    assert len(first) == period // S + period // T - 1
    expected = [
        (source + time * period // S, target + time * period // T, start + time * period, size)
        for time in range(times)
        for source, target, start, size in first
    ]
    assert pieces == expected


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12))
def test_how_many_pieces_two_cuts_make(length: int, a: int, b: int) -> None:
    pieces = along_one_dimension(length, "x", a, "x", b)
    assert len(pieces) <= a + b - 1
    if length and length % a == 0 and length % b == 0:
        assert len(pieces) == a + b - math.gcd(a, b)


@given(st.data(), st.integers(0, 60), st.integers(1, 9), st.integers(1, 9))
def test_how_many_pieces_cuts_of_any_sizes_make(
    data: st.DataObject, length: int, a: int, b: int
) -> None:
    source, target = (
        f"x@sizes{list(data.draw(sizes_adding_up_to(length, parts)))}" for parts in (a, b)
    )
    assert len(along_one_dimension(length, source, a, target, b)) <= a + b - 1


@pytest.mark.parametrize(
    ("source", "target", "moved"),
    [
        # From replicate to split: nothing moves.
        ("-", "b", 0),
        # From split to replicate. The gather along the minor axis is a gather; for the major
        # one a swap comes first, as the fourth example says.
        ("a", "-", 18),
        ("a b", "a", 12),
        ("a b", "b a", 4),
        ("b a", "b", 6),
        ("a b", "b", 10),
        # Move an axis to another dimension: see the example on three devices.
        ("a, -", "-, a", 54),
    ],
)
def test_the_basis_of_the_notes(source: str, target: str, moved: int) -> None:
    mesh = reshard.DeviceMesh.of(a=2, b=3)
    shape = (6,) * (source.count(",") + 1)
    check(Side.sharded(mesh, source, shape), Side.sharded(mesh, target, shape), moved)


@pytest.mark.parametrize(
    ("mesh", "shape", "steps", "moved", "direct"),
    [
        ((2, 3), (6,), ["a b", "b a", "b"], [4, 6], 10),
        ((2, 3), (6, 6), ["a, b", "a, -", "-, a", "b, a"], [72, 54, 0], 26),
        ((2, 2, 2), (4, 8), ["a, b c", "a, c b", "a, c"], [16, 32], 48),
        ((2, 2, 2), (4, 4), ["a, b c", "a, c b", "a b, c"], [8, 8], 12),
        (
            (2, 2, 2, 2),
            (4, 4, 4),
            ["d c, -, a b", "d c, b, a", "d, b c, a", "-, b c, a", "a, b c, -"],
            [32, 32, 64, 64],
            120,
        ),
    ],
)
def test_the_decompositions_of_the_notes(
    mesh: tuple[int, ...], shape: tuple[int, ...], steps: list[str], moved: list[int], direct: int
) -> None:
    """Each step by itself, one after another on the same data, and the direct way."""
    devices = reshard.DeviceMesh.of(**dict(zip("abcd", mesh, strict=False)))
    sides = [Side.sharded(devices, text, shape) for text in steps]
    plans = [
        check(source, target, count)
        for (source, target), count in zip(itertools.pairwise(sides), moved, strict=True)
    ]
    at_once = check(sides[0], sides[-1], direct)
    assert direct <= sum(moved)
    dense = np.arange(math.prod(shape)).reshape(shape)
    before = shards_of(sides[0].contents, [dense])
    shards = before
    for plan in plans:
        shards = plan.run(shards)
    assert same(at_once.run(before), shards)
