"""Block-cyclic descriptors: local sizes by numroc, contents by the owner of each block."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.cut_rules import BlockCyclic
from reshard.errors import LayoutError, MeshError, NotationError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.scalapack import Descriptor, parse_scalapack, process_grid, scalapack_text
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.sharding import spec as native

GRID = process_grid(2, 3)


def numroc(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """How many of `n` indices in blocks of `nb` process `iproc` has: ScaLAPACK's TOOLS/numroc.f.

    All have the whole rounds; of the blocks left, the first processes have one each, and the next
    has the short one.
    """
    distance = (nprocs + iproc - isrcproc) % nprocs
    rounds, left = divmod(n // nb, nprocs)
    extra = nb if distance < left else n % nb if distance == left else 0
    return rounds * nb + extra


descriptors = st.builds(
    lambda m, n, mb, nb, p, q, r, c: (m, n, mb, nb, p, q, r % p, c % q),
    *(st.integers(0, 14), st.integers(0, 14), st.integers(1, 5), st.integers(1, 5)),
    *(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3)),
)


@given(descriptors, st.sampled_from(["row", "column"]))
def test_every_process_has_the_blocks_dealt_to_it(numbers: tuple[int, ...], order: str) -> None:
    m, n, mb, nb, p, q, rsrc, csrc = numbers
    text = f"{m} {n} {mb} {nb} {rsrc} {csrc} grid={p}x{q} order={order}"
    spec = parse_scalapack(text, shape=(m, n))
    layout = spec.layout((m, n))
    array = np.arange(m * n).reshape(m, n)
    whole = Layout.replicated((m, n), p * q)
    held = reshard.plan(whole, layout).run(dict.fromkeys(range(p * q), array))
    for i in range(p):
        for j in range(q):
            rank = i * q + j if order == "row" else i + j * p
            rows = [r for r in range(m) if (rsrc + r // mb) % p == i]
            columns = [c for c in range(n) if (csrc + c // nb) % q == j]
            assert np.array_equal(held[rank], array[np.ix_(rows, columns)])
            assert held[rank].shape == (numroc(m, mb, i, rsrc, p), numroc(n, nb, j, csrc, q))
    assert parse_scalapack(scalapack_text(spec)) is spec
    assert parse_scalapack(scalapack_text(spec, (m, n)), shape=(m, n)) is spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9 9 2 2 0 0 grid=2x3", "row@cyclic2, column@cyclic2"),
        ("9, 9, 2, 3, 1, 2, grid=2x3", "row@cyclic2+1, column@cyclic3+2"),
        ("(9, 9, 2, 3, 1, 2) grid=2x3", "row@cyclic2+1, column@cyclic3+2"),
        ("DESC_A = (1, 0, 9, 9, 2, 3, 0, 1, 5) grid=2x3", "row@cyclic2, column@cyclic3+1"),
        ("DESC_ = [1, 0, 9, 9, 2, 3, 0, 1, 5] grid=2x3", "row@cyclic2, column@cyclic3+1"),
        ("desca 1 7 9 9 2 3 0 1 5 grid=2x3 order=row", "row@cyclic2, column@cyclic3+1"),
        ("mb=2 nb=3 grid=2x3", "row@cyclic2, column@cyclic3"),
        ("M_=9 N_=9 MB_=2 NB_=3 RSRC_=1 CSRC_=2 grid=2x3", "row@cyclic2+1, column@cyclic3+2"),
        ("dtype=1 ctxt=4 m=9 n=9 mb=2 nb=3 lld=4 grid=2 x 3", "row@cyclic2, column@cyclic3"),
        ("grid=[[0, 1, 2], [3, 4, 5]] mb=2 nb=3", "row@cyclic2, column@cyclic3"),
    ],
)
def test_a_text_means_its_sharding(text: str, expected: str) -> None:
    spec = parse_scalapack(text, shape=(9, 9))
    assert str(spec) == expected
    assert spec.mesh is GRID
    mesh = DeviceMesh.of(x=2, y=3)
    on_mesh = parse_scalapack(text, mesh, (9, 9))
    assert on_mesh.mesh is mesh
    assert str(on_mesh) == expected.replace("row", "x").replace("column", "y")


def test_the_grid_may_be_in_any_order() -> None:
    assert parse_scalapack("mb=1 nb=1 grid=2x3 order=column").mesh.devices == (0, 2, 4, 1, 3, 5)
    spec = parse_scalapack("mb=2 nb=2 grid=[[3, 1], [2, 0]]")
    assert spec.mesh is DeviceMesh("grid", (2, 2), ("row", "column"), [3, 1, 2, 0])
    assert scalapack_text(spec) == "mb=2 nb=2 rsrc=0 csrc=0 grid=[[3,1],[2,0]]"
    assert parse_scalapack(scalapack_text(spec)) is spec
    # A grid of one row or column is in both orders; and the mesh's own order is kept.
    assert scalapack_text(parse_scalapack("mb=1 nb=1 grid=1x4")).endswith("grid=1x4 order=row")
    turned = DeviceMesh.of(x=2, y=2, devices=[0, 2, 1, 3])
    assert parse_scalapack("mb=2 nb=2 order=column", turned).mesh is turned
    assert scalapack_text(parse_scalapack("mb=2 nb=2", turned)).endswith("grid=2x2 order=column")


def test_rows_may_be_cut_over_the_second_axis() -> None:
    mesh = DeviceMesh.of(x=2, y=3)
    rules = [BlockCyclic(2), BlockCyclic(3, 1)]
    levels = [Level([axis], rule) for axis, rule in zip(["y", "x"], rules, strict=True)]
    spec = ShardingSpec(mesh, [DimSpec([level]) for level in levels])
    text = scalapack_text(spec)
    assert text == "mb=2 nb=3 rsrc=0 csrc=1 grid=3x2 order=column"
    assert parse_scalapack(text).layout((9, 9)) is spec.layout((9, 9))


@given(
    st.integers(0, 13),
    st.integers(0, 13),
    st.sampled_from(["x, y", "x@balanced, y", "x@unit2, y@sizes[4,4,4]", "x@whole[3,3], y"]),
)
def test_other_cuts_are_written_where_they_deal_the_same(m: int, n: int, text: str) -> None:
    mesh = DeviceMesh.of(x=2, y=3)
    spec = native(mesh, text)
    try:
        layout = spec.layout((m, n))
    except LayoutError:
        return
    try:
        found = scalapack_text(spec, (m, n))
    except NotationError:
        # By definition: no block size deals the indices of that dimension as the rule does.
        assert any(
            all(BlockCyclic(block).table(size, table.parts) is not table for block in range(1, 15))
            for size, table in zip((m, n), layout.tables, strict=True)
        )
        return
    assert parse_scalapack(found, mesh, (m, n)).layout((m, n)) is layout


def test_rules_equal_to_block_cyclic_are_written_for_a_shape() -> None:
    spec = native(DeviceMesh.of(x=2, y=3), "x@balanced, y")
    assert scalapack_text(spec, (8, 7)) == "m=8 n=7 mb=4 nb=3 rsrc=0 csrc=0 grid=2x3 order=row"
    with pytest.raises(NotationError, match="blocks are assigned in turn; give a shape"):
        scalapack_text(spec)
    # 5 and 4 of 9: a block of 5, and one of 4 that is short. 3, 3 and 2 are not 3, 3 and 1.
    assert scalapack_text(spec, (9, 9)).startswith("m=9 n=9 mb=5 nb=3 ")
    uneven = native(DeviceMesh.of(x=2, y=3), "x, y@sizes[2,3,3]")
    with pytest.raises(NotationError, match=r"`y@sizes\[2,3,3\]` .*: for length 8"):
        scalapack_text(uneven, (9, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the grid of processes is missing"),
        ("9 9 2 2 0 0", "the grid of processes is missing; give a mesh, or grid=2x3"),
        ("grid=2x3", "mb and nb missing; give at least the sizes of a block"),
        ("mb=2 grid=2x3", "nb missing"),
        ("mb=a nb=2 grid=2x3", "mb=a is not a number"),
        ("mb=2 nb=2x2 grid=2x3", "nb=2x2 is not a number"),
        ("mb=2 nb=2 grid=2x3 grid=2x3", "grid is given twice"),
        ("mb=2 nb=2 bs=4 grid=2x3", "bs is not known; a descriptor has dtype, ctxt, m, n"),
        ("9 9 2 2 grid=2x3", "a descriptor of 4 numbers; a dense one has 9"),
        (
            "9 9 2 2 0 0 lld=3 grid=2x3",
            "numbers .* and names lld; give only numbers",
        ),
        ("DESC_ = (501, 0, 9, 9, 2, 2, 0, 0, 5) grid=2x3", "a descriptor of type 501"),
        ("dtype=601 mb=2 nb=2 grid=2x3", "dtype=601; only dense matrices"),
        ("9 9 0 2 0 0 grid=2x3", "a descriptor's mb 0 must be at least 1"),
        ("9 -9 2 2 0 0 grid=2x3", "a descriptor's n -9 must not be negative"),
        ("9 9 2 2 2 0 grid=2x3", "rsrc=2 on a grid of 2x3 processes; it must be below 2"),
        ("9 9 2 2 0 3 grid=2x3", "csrc=3 on a grid of 2x3 processes; it must be below 3"),
        ("m=9 mb=2 nb=2 lld=3 grid=2x3", "lld=3, but every process has at least 4 rows"),
        ("m=9 mb=2 nb=2 lld=0 grid=2x3", "a descriptor's lld 0 must be at least 1"),
        ("mb=2 nb=2 grid=2", "grid=2; write rows and columns"),
        ("mb=2 nb=2 grid=2x3 order=diagonal", "order 'diagonal' of a process grid"),
        ("mb=2 nb=2 grid=[[0,1],[2]]", "write equal rows of ranks"),
        ("mb=2 nb=2 grid=[]", "write equal rows of ranks"),
        ("mb=2 nb=2 grid=[[0,1],[2,3]] order=row", "has every rank, so order=row is left out"),
        ("mb=2 nb=2 grid=2x3 and more", "cannot read 'and more'"),
        ("10 9 2 2 0 0 grid=2x3", r"matrix of 10 x 9 for shape \[9, 9\]; both must agree"),
        ("n=8 mb=2 nb=2 grid=2x3", "matrix of any x 8"),
        (f"9 9 {'9' * 30} 2 0 0 grid=2x3", "cannot read"),
        (f"mb=2 nb=2 grid={'9' * 5000}x2", "cannot read"),
        (f"mb=2 nb=2 grid=[[{'9' * 5000}]]", "cannot read"),
    ],
)
def test_invalid_texts_are_refused_with_the_text(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message) as caught:
        parse_scalapack(text, shape=(9, 9))
    assert f"`{text}`" in str(caught.value)


def test_invalid_grids_are_refused() -> None:
    for text in (
        "mb=2 nb=2 grid=0x3",
        "mb=2 nb=2 grid=[[0,0]]",
        "mb=2 nb=2 grid=99999999x99999999 order=column",
    ):
        with pytest.raises(MeshError):
            parse_scalapack(text)
    with pytest.raises(NotationError, match="order 'both'"):
        process_grid(2, 2, "both")


def test_the_grid_of_a_text_overrides_a_mesh() -> None:
    for mesh in (DeviceMesh.of(x=2, y=3), DeviceMesh.of(x=4)):
        assert parse_scalapack("mb=2 nb=2 grid=3x2", mesh).mesh is process_grid(3, 2)
        turned = parse_scalapack("mb=2 nb=2 grid=2x3 order=column", mesh).mesh
        assert turned is process_grid(2, 3, "column")


def test_texts_must_fit_the_mesh_and_the_shape() -> None:
    mesh = DeviceMesh.of(x=2, y=3)
    with pytest.raises(NotationError, match="order=column for the mesh x=2,y=3 with ranks"):
        parse_scalapack("mb=2 nb=2 order=column", mesh)
    with pytest.raises(NotationError, match="a mesh of 1 axes"):
        parse_scalapack("mb=2 nb=2", DeviceMesh.of(x=6))
    with pytest.raises(NotationError, match=r"for shape \[9\]"):
        parse_scalapack("mb=2 nb=2", mesh, (9,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x@cyclic2", "not for tensors of 1 dimensions"),
        ("x@cyclic2, -", "`-` .*: every dimension is sharded over a single axis"),
        (
            "x y@cyclic2, z@cyclic2",
            "`x y@cyclic2` .*: every dimension is sharded over",
        ),
        ("x@cyclic2 / y@cyclic2, z", "`x@cyclic2 / y@cyclic2` .*: it shards a dimension once"),
        ("x:(1)2@cyclic2, y@cyclic2", "it takes whole mesh axes"),
        ("x@cyclic2, y@cyclic2", "it has no copies; use every axis of the mesh"),
        ("x@cyclic2, y@cyclic2 | sum(z)", "it has no partial axes"),
        ("x@cyclic2, y@cyclic2 | only(z=0)", "every device of its mesh holds a part"),
        ("x@cyclic2 ?, y@cyclic2", "it has no open dimensions"),
        ("x@cyclic2, y@stride2", "`y@stride2`"),
        ("x, y@cyclic2", "`x` of the sharding"),
    ],
)
def test_errors_name_the_part_that_a_descriptor_cannot_express(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=f"ScaLAPACK cannot express .*{message}"):
        scalapack_text(native(DeviceMesh.of(x=4, y=3, z=2), text))


def test_a_shape_of_a_matrix_has_two_sizes() -> None:
    with pytest.raises(NotationError, match=r"shape \[9\] is not that of a matrix"):
        scalapack_text(parse_scalapack("mb=2 nb=2 grid=2x3"), (9,))
    with pytest.raises(NotationError, match="a descriptor of 2 numbers"):
        Descriptor.from_array((1, 0))


def test_the_case_of_the_issue() -> None:
    # 100 x 100 blocks of a 100000 x 100000 matrix, from a 2x4 to a 4x2 grid.
    shape = (100_000, 100_000)
    source, target = (
        parse_scalapack(f"100000 100000 100 100 0 0 grid={grid}", shape=shape).layout(shape)
        for grid in ("2x4", "4x2")
    )
    assert [source.local_shape(rank) for rank in (0, 7)] == [(50_000, 25_000)] * 2
    assert [target.local_shape(rank) for rank in (0, 7)] == [(25_000, 50_000)] * 2
    assert reshard.plan(source, target).moved_elements == math.prod(shape) * 6 // 8


@given(st.text(alphabet="mnbgrid=[]x,0123 corderw", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for candidate in (text, f"mb=2 nb=2 grid={text}"):
        try:
            spec = parse_scalapack(candidate)
        except LayoutError:
            continue
        assert parse_scalapack(scalapack_text(spec)) is spec
