"""MLIR's notation: what lists of axes mean, the texts of the dialect, what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from notation.flat_specs import flat_specs
from reshard.cut_rules import Halo, Sizes
from reshard.errors import LayoutError, MeshError, NotationError, RuleError, SpecError
from reshard.layout import Box
from reshard.mesh import DeviceMesh
from reshard.notation.mlir import (
    mlir_mesh_text,
    mlir_operation_text,
    mlir_text,
    parse_mlir,
    parse_mlir_mesh,
)
from reshard.sharding import DimSpec, Level, ShardingSpec
from strategies import Shape, specs_with_shapes

MESH = DeviceMesh("grid", (2, 2, 4), ("a", "b", "c"))
TWO_BY_THREE = DeviceMesh.of(a=2, b=3)


def rows_and_columns(text: str, mesh: DeviceMesh, shape: Shape) -> list[tuple[int, ...]]:
    """For each device in order: where its rows begin and end, then its columns and so on."""
    layout = parse_mlir(text, mesh, shape).layout(shape)
    found = []
    for rank in range(mesh.size):
        (box,) = layout.boxes(rank)
        found.append(tuple(itertools.chain.from_iterable(zip(box.start, box.stop, strict=True))))
    return found


def test_the_first_axis_of_a_list_is_the_major_one() -> None:
    # The examples of the resharding document, one element a device, numbered row by row.
    assert rows_and_columns("[[0, 1]]", TWO_BY_THREE, (6,)) == [(i, i + 1) for i in range(6)]
    swapped = [0, 2, 4, 1, 3, 5]
    assert rows_and_columns("[[1, 0]]", TWO_BY_THREE, (6,)) == [(i, i + 1) for i in swapped]
    by_column = [(0, 2), (2, 4), (4, 6)] * 2
    assert rows_and_columns("[[1]]", TWO_BY_THREE, (6,)) == by_column


def test_two_dimensions_are_cut_each_by_its_list() -> None:
    assert rows_and_columns("[[], [0, 1]]", TWO_BY_THREE, (2, 6)) == [
        (0, 2, i, i + 1) for i in range(6)
    ]
    assert rows_and_columns("[[0], [1]]", TWO_BY_THREE, (6, 6)) == [
        (0, 3, 0, 2),
        (0, 3, 2, 4),
        (0, 3, 4, 6),
        (3, 6, 0, 2),
        (3, 6, 2, 4),
        (3, 6, 4, 6),
    ]
    assert rows_and_columns("[[1], [0]]", TWO_BY_THREE, (6, 6)) == [
        (0, 2, 0, 3),
        (2, 4, 0, 3),
        (4, 6, 0, 3),
        (0, 2, 3, 6),
        (2, 4, 3, 6),
        (4, 6, 3, 6),
    ]
    cube = DeviceMesh.of(a=2, b=2, c=2)
    assert rows_and_columns("[[0], [1, 2]]", cube, (4, 8))[3] == (0, 2, 6, 8)
    assert rows_and_columns("[[0], [2, 1]]", cube, (4, 8))[2] == (0, 2, 2, 4)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_the_formulas_of_the_document_hold(
    rows: int, columns: int, m_size: int, n_size: int, is_swapped: bool
) -> None:
    mesh = DeviceMesh.of(m=m_size, n=n_size)
    text, cut = ("[[1], [0]]", (n_size, m_size)) if is_swapped else ("[[0], [1]]", (m_size, n_size))
    layout = parse_mlir(text, mesh).layout((rows, columns))
    height, width = -(-rows // cut[0]), -(-columns // cut[1])
    held = {
        (i, j): (j // width, i // height) if is_swapped else (i // height, j // width)
        for i in range(rows)
        for j in range(columns)
    }
    for m, n in itertools.product(range(m_size), range(n_size)):
        (cell,) = layout.boxes(m * n_size + n) or (Box((0, 0), (0, 0)),)
        inside = itertools.product(*map(range, cell.start, cell.stop))
        assert set(inside) == {element for element, device in held.items() if device == (m, n)}


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("[[]]", "-"),
        ("[[0, 1], [2]]", "a b, c"),
        ("[[], [], [1]]", "-, -, b"),
        ("[[2, 0]] partial = sum[1]", "c a | sum(b)"),
        ("[[0]] partial = max [1, 2]", "a | max(b c)"),
        ("[[0]], partial = min[2]", "a | min(c)"),
        ("[[0]] partial = product[2]", "a | product(c)"),
        ("[[0]] partial = average[2, 1]", "a | mean(c b)"),
        ("[[0], [1]] halo_sizes = [1, 2, 3, 4]", "a@halo[1,2,padded], b@halo[3,4,padded]"),
        ("[[0], [], [1]] halo_sizes = [1, 2, 0, 0]", "a@halo[1,2,padded], -, b"),
        ("[[0], [1]] halo_sizes = [0, 0, 0, 0]", "a, b"),
        ("[[0]] halo_sizes = []", "a"),
        ("[[0]] sharded_dims_offsets = [0, 24, 32]", "a@sizes[24,8]"),
        ("[[], [0, 1]] sharded_dims_offsets = [0, 2, 5, 9, 14]", "-, a b@sizes[2,3,4,5]"),
        (
            "[[0], [1]] sharded_dims_offsets = [0, 24, 32, 0, 20, 32]",
            "a@sizes[24,8], b@sizes[20,12]",
        ),
        ("shard.sharding @grid split_axes = [[0], []] : !shard.sharding", "a, -"),
        (
            "%s = mesh.sharding @grid split_axes = [[0]] partial = max [1] : !mesh.sharding",
            "a | max(b)",
        ),
        ("mesh.sharding @mesh [[0],[1]] partial = max[2] : array<i32>", "a, b | max(c)"),
        ("mesh.sharding @other, [[1]] halo_sizes = [1, 4]", "b@halo[1,4,padded]"),
        ("#mesh.shard<@mesh0, [[0], []], partial = sum[1]>", "a, - | sum(b)"),
        ("<@mesh0, [[1]]>", "b"),
        ("split_axes = [[0]]", "a"),
    ],
)
def test_a_text_means_its_sharding(text: str, native: str) -> None:
    assert parse_mlir(text, MESH) is reshard.spec(MESH, native)


def test_trailing_dimensions_may_be_left_out() -> None:
    assert parse_mlir("[[1]]", MESH, (4, 4, 4)) is reshard.spec(MESH, "b, -, -")
    assert parse_mlir("[[]]", MESH, ()) is reshard.spec(MESH, "")
    assert parse_mlir("[[1], []]", MESH, (4,)) is reshard.spec(MESH, "b")
    assert parse_mlir("[[0]] partial = sum[1]", MESH, (4, 4)) is reshard.spec(MESH, "a, - | sum(b)")


def test_halos_are_equally_wide_on_all_devices() -> None:
    # From the tests of the dialect: 300 and 2 halos of 2, 300x300 and halos of 1+2, 3+4.
    line, square = DeviceMesh.of(a=4), DeviceMesh.of(a=4, b=4)
    layout = parse_mlir("[[0]] halo_sizes = [2, 2]", line, (1200, 1200)).layout((1200, 1200))
    assert {layout.local_shape(rank) for rank in range(4)} == {(304, 1200)}
    layout = parse_mlir("[[0], [1]] halo_sizes = [1, 2, 3, 4]", square).layout((1200, 1200))
    assert {layout.local_shape(rank) for rank in range(16)} == {(303, 307)}
    layout = parse_mlir("[[0]] halo_sizes = [2, 1]", line, (8, 16)).layout((8, 16))
    assert {layout.local_shape(rank) for rank in range(4)} == {(5, 16)}
    assert [layout.boxes(rank)[0].start for rank in range(4)] == [(0, 0), (2, 0), (4, 0), (6, 0)]


def test_offsets_say_where_every_part_begins() -> None:
    # The examples of the dialect's documentation.
    text = "[[0], [1]] sharded_dims_offsets = [0, 24, 32, 0, 20, 32]"
    layout = parse_mlir(text, MESH, (32, 32, 32)).layout((32, 32, 32))
    assert layout.local_shape(0) == (24, 20, 32)
    assert layout.local_shape(15) == (8, 12, 32)
    text = "[[], [0]] sharded_dims_offsets = [0, 2, 5, 9, 14]"
    layout = parse_mlir(text, DeviceMesh.of(a=4)).layout((4, 14))
    assert [layout.local_shape(rank) for rank in range(4)] == [(4, 2), (4, 3), (4, 4), (4, 5)]


def test_a_text_may_define_its_grid() -> None:
    grid = DeviceMesh("g", (2, 3), ("axis0", "axis1"))
    assert parse_mlir_mesh(" shard.grid @g(shape = 2x3) // six") is grid
    assert parse_mlir_mesh("mesh.mesh @g( shape = 2 x 3 )") is grid
    text = "shard.grid @g(shape = 2x3)\nshard.grid @h(shape = 4)\n"
    assert parse_mlir(text + "%0 = shard.sharding @g split_axes = [[1]]").mesh is grid
    assert parse_mlir(text + "shard.sharding @h split_axes = [[0]]", MESH).mesh.shape == (4,)
    assert parse_mlir("shard.grid @g(shape = 2x3) [[0]]", shape=(6, 6)).mesh is grid
    assert parse_mlir("shard.grid @g(shape = 2x3) [[0]]", MESH).mesh is grid
    assert parse_mlir(text + "[[0]]", MESH).mesh is MESH


@given(flat_specs(("sum", "max", "min", "product", "mean")))
def test_written_texts_are_read_back(spec: ShardingSpec) -> None:
    shape = (5,) * spec.ndim
    assert parse_mlir(mlir_text(spec), spec.mesh, shape) is spec
    assert parse_mlir(mlir_operation_text(spec, "mesh"), spec.mesh, shape) is spec
    if spec.ndim:
        assert parse_mlir(mlir_text(spec), spec.mesh) is spec


@given(st.data(), st.booleans())
def test_halos_and_offsets_are_read_back(data: st.DataObject, has_halos: bool) -> None:
    dims = []
    for axis, parts in (("a", 2), ("b", 2), ("c", 4)):
        if data.draw(st.booleans()):
            dims.append(DimSpec())
        if has_halos:
            before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
            rule = Halo(before, after, padded_edges=True) if before or after else None
        else:
            rule = Sizes(tuple(data.draw(st.integers(0, 5)) for _ in range(parts)))
        dims.append(DimSpec([Level([axis], rule)]))
    spec = ShardingSpec(MESH, dims)
    assert parse_mlir(mlir_text(spec), MESH) is spec


@given(specs_with_shapes())
def test_any_sharding_is_written_or_refused(pair: tuple[ShardingSpec, Shape]) -> None:
    spec, shape = pair
    try:
        text = mlir_text(spec)
    except NotationError as error:
        refusal = str(error)
    else:
        refusal = None
        again = parse_mlir(text, spec.mesh, shape)
        assert again.layout(shape) is spec.layout(shape)
    assert refusal is None or refusal.startswith("MLIR cannot express `")


@pytest.mark.parametrize(
    ("native", "part"),
    [
        ("a / b", "a / b"),
        ("a@balanced", "a@balanced"),
        ("a@unit4", "a@unit4"),
        ("c:(1)2, -", "c:(1)2"),
        ("a, - | sum(c:(2)2)", "c:(2)2"),
        ("a ?", "a ?"),
        ("a, - !2", "!2"),
        ("a | replicated(b)", "replicated(b)"),
        ("a | only(b=1)", "only(b=1)"),
        ("a@halo[1,1]", "a@halo[1,1]"),
        ("a@halo[1,1,fresh,padded]", "a@halo[1,1,fresh,padded]"),
        ("a@balanced@halo[1,1,padded]", "a@balanced@halo[1,1,padded]"),
        ("a@halo[1,1,padded], b@sizes[1,2]", "b@sizes[1,2]"),
        ("a@sizes[3,1], b", "b"),
    ],
)
def test_errors_name_the_part_that_cannot_be_expressed(native: str, part: str) -> None:
    spec = reshard.spec(MESH, native)
    with pytest.raises(NotationError) as caught:
        mlir_text(spec)
    assert str(caught.value).startswith(f"MLIR cannot express `{part}` of the sharding `{spec}`: ")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", NotationError, r"cannot read ''; expected `\[`"),
        ("[0]", NotationError, r"cannot read '0\]'; expected `\[`"),
        ("[[0]", NotationError, r"expected `\]`"),
        ("[[x]]", NotationError, "expected a number"),
        ("[[0]] [[1]]", NotationError, "expected nothing more"),
        ("[[3]]", NotationError, r"mesh axis 3 of a mesh of 3 axes \(a=2,b=2,c=4\)"),
        ("[[-1]]", NotationError, "mesh axis -1"),
        ("[[0, 0]]", SpecError, "axis a is used in dimension 0, twice"),
        ("[[0], [0]]", SpecError, "axis a is used in dimension 0 and dimension 1"),
        ("[[0]] partial = sum[0]", SpecError, "dimension 0 and the partial axes"),
        ("[[0]] partial = generic[1]", NotationError, "the reduction 'generic' of partial axes"),
        ("[[0]] partial = [1]", NotationError, "no reduction of partial axes; expected sum"),
        ("[[0]] halo_sizes = [1]", NotationError, r"halo_sizes \[1\] for 1 sharded dimensions"),
        ("[[0], [1]] halo_sizes = [1, 1]", NotationError, "for 2 sharded dimensions"),
        ("[[0]] halo_sizes = [?, 1]", NotationError, "expected a number"),
        ("[[0]] halo_sizes = [-1, 1]", RuleError, "must not be negative"),
        ("[[0]] sharded_dims_offsets = [0, 4]", NotationError, r"2 sharded_dims_offsets .* give 3"),
        ("[[0]] sharded_dims_offsets = [1, 2, 4]", RuleError, "must begin with 0"),
        ("[[0]] sharded_dims_offsets = [0, 5, 4]", RuleError, "must not be negative"),
        ("[[0]] halo_sizes = [1, 1] sharded_dims_offsets = [0, 1, 2]", NotationError, "together"),
        ("[[0], [1], [2], []]", None, ""),
        (
            "[[0], [1], [], [2]]",
            NotationError,
            r"4 lists of axes for a tensor of shape \[8, 8, 8\]",
        ),
        ("shard.sharding split_axes = [[0]]", NotationError, "expected the name of a grid"),
        ("shard.grid @g(shape = 2) shard.sharding @h [[0]]", NotationError, "unknown grid @h"),
        ("shard.grid @g(shape = 2x?) [[0]]", NotationError, r"expected `\)`"),
        ("shard.grid @g(shape = ?) [[0]]", NotationError, "the sizes of the axes"),
        ("shard.grid g(shape = 2) [[0]]", NotationError, "expected a name such as @grid"),
        ("shard.grid @g(shape = 0x2) [[0]]", MeshError, "size 0, at least 1"),
    ],
)
def test_a_text_that_means_nothing_is_refused(
    text: str, error: type[Exception] | None, message: str
) -> None:
    if error is None:
        assert parse_mlir(text, MESH, (8, 8, 8)).ndim == 3
        return
    with pytest.raises(error, match=message) as caught:
        parse_mlir(text, MESH, (8, 8, 8))
    assert type(caught.value) is error
    assert str(caught.value).endswith(f"(in the MLIR text `{text}`)")


def test_axis_numbers_need_a_mesh() -> None:
    with pytest.raises(NotationError, match="the axis numbers are of no mesh"):
        parse_mlir("[[0]]")


@given(st.text(alphabet="[]0123, =@xpartilsumhoze_d<>:%.#/?-\n", max_size=24))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_mlir(text, MESH)
    except LayoutError as error:
        refusal = str(error)
    else:
        refusal = None
        assert parse_mlir(mlir_text(spec), MESH, (4,) * spec.ndim) is spec
    assert refusal is None or "in the MLIR text" in refusal


def test_operations_are_written_in_both_dialects() -> None:
    spec = reshard.spec(MESH, "a, - | max(c)")
    written = "mesh.sharding @grid split_axes = [[0], []] partial = max[2] : !mesh.sharding"
    assert mlir_operation_text(spec, "mesh") == written
    with pytest.raises(NotationError, match=r"cannot express `max\(c\)` .* `shard` has no partial"):
        mlir_operation_text(spec)
    assert mlir_operation_text(reshard.spec(MESH, "a, b@halo[0,1,padded]")) == (
        "shard.sharding @grid split_axes = [[0], [1]] halo_sizes = [0, 0, 0, 1] : !shard.sharding"
    )
    assert mlir_mesh_text(MESH) == "shard.grid @grid(shape = 2x2x4)"
    assert mlir_mesh_text(MESH, "mesh") == "mesh.mesh @grid(shape = 2x2x4)"
    for write in (lambda: mlir_mesh_text(MESH, "linalg"), lambda: mlir_operation_text(spec, "x")):
        with pytest.raises(NotationError, match="unknown dialect"):
            write()


def test_meshes_that_mlir_cannot_express_are_refused() -> None:
    with pytest.raises(NotationError, match=r"cannot express the device order \[1, 0\]"):
        mlir_mesh_text(DeviceMesh.of(a=2, devices=[1, 0]))
    with pytest.raises(NotationError, match="without axes"):
        mlir_mesh_text(DeviceMesh.of())
    with pytest.raises(NotationError, match="cannot read 'mesh'"):
        parse_mlir_mesh("mesh")
