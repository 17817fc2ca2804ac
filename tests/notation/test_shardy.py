"""Shardy's notation: meshes and shardings, canonical sub-axes, and Shardy's own parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from notation.flat_specs import flat_specs
from reshard.errors import LayoutError, MeshError, NotationError, SpecError
from reshard.mesh import DeviceMesh
from reshard.notation.shardy import (
    parse_shardy,
    parse_shardy_mesh,
    shardy_mesh_text,
    shardy_text,
)
from reshard.sharding import DimSpec, ShardingSpec
from strategies import Shape, meshes, specs_with_shapes

MESH = DeviceMesh.of(x=8, y=2, z=4, w=2)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        (
            '@cluster = <["dp"=2, "tp"=4]>  # 8 devices: 2×4',
            DeviceMesh.of(name="cluster", dp=2, tp=4),
        ),
        ('sdy.mesh @m = <["a"=1]>', DeviceMesh.of(name="m", a=1)),
        (
            'sdy.mesh @m = <["a"=2,"b"=2], device_ids=[0, 2, 1, 3]>',
            DeviceMesh.of(name="m", a=2, b=2, devices=[0, 2, 1, 3]),
        ),
        ('sdy.mesh @iota = <["a"=2], device_ids=[0, 1]>', DeviceMesh.of(name="iota", a=2)),
        (
            "sdy.mesh @maximal_mesh_3 = <[], device_ids=[3]>",
            DeviceMesh("maximal_mesh_3", (), (), [3]),
        ),
        ("sdy.mesh @empty_mesh = <[]>", DeviceMesh.of(name="empty_mesh")),
        ('sdy.mesh @"two words" = <["a"=2]> // quoted', DeviceMesh.of(name="two words", a=2)),
        ('#sdy.mesh<["a"=2]>', DeviceMesh.of(a=2)),
        ('<["a"=2]>', DeviceMesh.of(a=2)),
        ('@m = #\n<["a"=2]>', DeviceMesh.of(name="m", a=2)),
    ],
)
def test_a_text_means_its_mesh(text: str, mesh: DeviceMesh) -> None:
    assert parse_shardy_mesh(text) is mesh
    assert parse_shardy_mesh(shardy_mesh_text(mesh)) is mesh


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('<["a"=2, "b"=0]>', MeshError, "axis 'b' has size 0"),
        ('<["a"=2, "b"=2, "a"=4]>', MeshError, "must differ from each other"),
        ("<[], device_ids=[-1]>", MeshError, "ranks from 0 up"),
        ("<[], device_ids=[1, 0]>", MeshError, "2 devices for a mesh of 1"),
        ('<["a"=2, "b"=2], device_ids=[0, 2, 1, 3, 4, 5]>', MeshError, "6 devices for a mesh of 4"),
        ('<["a"=2], device_ids=[1, 1]>', MeshError, "each once"),
        ('<["a"=2], device_ids=[2, 1]>', MeshError, r"device_ids \[2, 1\] .* each of 0 to 1"),
        ('<["a-b"=2]>', MeshError, "axis name 'a-b'"),
        ("<[a=2]>", NotationError, "expected an axis in quotes"),
        ('<["a"]>', NotationError, "expected `=`"),
        ('@m <["a"=2]>', NotationError, "expected `=`"),
        ('<["a"=2]> <["a"=2]>', NotationError, "expected nothing more"),
        ('<["a"=2]', NotationError, "expected `>`"),
        ('<["a"=99999999999999999999]>', NotationError, "expected a number"),
    ],
)
def test_invalid_meshes_are_refused(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        parse_shardy_mesh(text)
    assert type(caught.value) is error
    assert str(caught.value).endswith(f"(in the Shardy text `{text}`)")


def test_meshes_that_shardy_cannot_express_are_refused() -> None:
    with pytest.raises(NotationError, match="'a\"b' cannot be written as a name of MLIR"):
        shardy_mesh_text(DeviceMesh.of(name='a"b', x=2))
    with pytest.raises(
        NotationError, match=r"cannot express the devices \[4, 5\] of the mesh 'mesh'"
    ):
        shardy_mesh_text(DeviceMesh.of(x=2, devices=[4, 5]))


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("#sdy.sharding<@mesh, []>", ""),
        ('#sdy.sharding<@mesh, [{"x"}, {}]>', "x, -"),
        ('<@mesh, [{"x", "y"}, {}]>', "x y, -"),
        ('[{"x"},{}]', "x, -"),
        ('sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>', "y"),
        ('<@mesh, [{"x", ?}, {?}]>', "x ?, ?"),
        ('<@mesh, [{"x"}p0, {"y"}p1, {"z", ?}p12, {?}p1]>', "x, y !1, z ?!12, ?!1"),
        ('<@mesh, [{"x":(2)2}]>', "x:(2)2"),
        (
            '#sdy.sharding<@mesh, [{"x","y":(1)2,?}p1, {}], replicated={"z"}, unreduced={"w"}>',
            "x y ?!1, - | replicated(z) sum(w)",
        ),
        ('<@mesh, [{}], unreduced=max{"w"}>', "- | max(w)"),
        (
            '<@mesh, [{}], unreduced=min{"w", "y"}, replicated={"x":(1)2}>',
            "- | replicated(x:(1)2) min(y w)",
        ),
        # What Shardy calls by other names, canonical:
        ('<@mesh, [{"x":(1)2, "x":(2)2}]>', "x:(1)4"),
        ('<@mesh, [{"x":(1)2, "x":(2)4}]>', "x"),
        ('<@mesh, [{"x":(1)8}]>', "x"),
        ('<@mesh, [{"x":(2)2, "x":(1)2}]>', "x:(2)2 x:(1)2"),
        ('<@mesh, [{}], replicated={"w", "x":(4)2, "x":(2)2, "y"}>', "- | replicated(x:(2)4 y w)"),
        ('<@mesh, [{}], unreduced={"w", "x":(4)2, "x":(2)2}>', "- | sum(x:(2)4 w)"),
        ('<@mesh, [{"x":(1)2, "y", "x":(2)2}]>', "x:(1)2 y x:(2)2"),
    ],
)
def test_a_text_means_its_sharding(text: str, native: str) -> None:
    spec = reshard.spec(MESH, native)
    assert parse_shardy(text, MESH) is spec
    assert parse_shardy(shardy_text(spec), MESH) is spec


@pytest.mark.parametrize(
    ("native", "text"),
    [
        ("", "[]"),
        ("x y:(1)2, - !0", '[{"x", "y"}, {}]'),
        ("x:(1)2 x:(2)2 ?!1, ?", '[{"x":(1)4, ?}p1, {?}]'),
        ("x | replicated(w z) max(y)", '[{"x"}], replicated={"z", "w"}, unreduced=max{"y"}'),
        ("- | sum(y x)", '[{}], unreduced={"x", "y"}'),
        ("- | sum(x:(4)2 x:(2)2)", '[{}], unreduced={"x":(2)4}'),
    ],
)
def test_written_texts_are_canonical(native: str, text: str) -> None:
    assert shardy_text(reshard.spec(MESH, native)) == f"#sdy.sharding<@mesh, {text}>"


def test_the_local_shapes_of_the_documentation() -> None:
    mesh = DeviceMesh.of(x=2, y=4, z=2)
    layout = parse_shardy('<@mesh_xyz, [{"x"}, {"z", "y"}]>', mesh).layout((4, 8))
    assert layout.local_shape(0) == (2, 1)
    # z is the major axis of the columns: rank 1 has z = 1, rank 2 has y = 1.
    assert [layout.boxes(rank)[0].start for rank in (1, 2)] == [(0, 4), (0, 1)]
    mesh = DeviceMesh.of(x=2, y=8, z=2)
    layout = parse_shardy('<@mesh_xyz, [{"x"}, {"y":(2)2}]>', mesh).layout((4, 8))
    assert layout.local_shape(0) == (2, 4)
    split, full = DeviceMesh.of(x=4, y=2), DeviceMesh.of(d=8)
    split_layout = parse_shardy('[{"x"}, {"y"}]', split).layout((4, 4))
    assert parse_shardy('[{"d":(1)4}, {"d":(4)2}]', full).layout((4, 4)) is split_layout


def test_a_text_may_define_its_meshes() -> None:
    text = 'sdy.mesh @a = <["x"=2]>\nsdy.mesh @b = <["x"=4]>\n'
    assert parse_shardy(text + '#sdy.sharding<@b, [{"x"}]>').mesh.shape == (4,)
    assert parse_shardy(text + '<@a, [{"x"}]>', MESH).mesh is DeviceMesh.of(name="a", x=2)
    assert parse_shardy('@a = <["x"=2]> [{"x"}]').mesh is DeviceMesh.of(name="a", x=2)
    assert parse_shardy('@a = <["x"=2]> [{"x"}]', MESH).mesh is DeviceMesh.of(name="a", x=2)
    assert parse_shardy(text + '[{"x"}]', MESH).mesh is MESH
    inline = parse_shardy('<mesh<["x"=2], device_ids=[1, 0]>, [{"x"}, {}]>')
    assert inline.mesh is DeviceMesh.of(x=2, devices=[1, 0])
    for asked, message in [
        (text + '<@c, [{"x"}]>', "unknown mesh @c; the text has @a, @b"),
        (text + '[{"x"}]', "the axes are of no mesh"),
        ('<@c, [{"x"}]>', "the axes are of no mesh"),
        ('@a = <["x"=2]> @a = <["x"=2]> [{"x"}]', "mesh @a occurs twice"),
        ('<"a", [{"x"}]>', "expected a mesh: its name"),
    ]:
        with pytest.raises(NotationError, match=message):
            parse_shardy(asked)


def test_a_tensor_on_one_device() -> None:
    mesh = DeviceMesh("one", (), (), [3])
    spec = parse_shardy("sdy.mesh @one = <[], device_ids=[3]>  <@one, []>", shape=(4, 4))
    assert spec is ShardingSpec(mesh, [[], []])
    assert spec.layout((4, 4)).holders == (3,)
    assert shardy_text(spec) == "#sdy.sharding<@one, []>"
    with pytest.raises(NotationError, match=r"cannot express `\?` .* without axes it has no dim"):
        shardy_text(ShardingSpec(mesh, [DimSpec(is_open=True)]))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", NotationError, r"expected `\[`"),
        ('<@mesh, [{"x"}]', NotationError, "expected `>`"),
        ('<@mesh [{"x"}]>', NotationError, "expected `,`"),
        ('<@mesh, [{"x" "y"}]>', NotationError, "expected `,`"),
        ('<@mesh, [{"x", }]>', NotationError, "expected an axis in quotes"),
        ("<@mesh, [{, ?}]>", NotationError, "expected an axis in quotes"),
        ('<@mesh, [{?, "x"}]>', NotationError, "expected `}`"),
        ('<@mesh, [{"x"}phigh]>', NotationError, "cannot read 'phigh.*; expected a priority"),
        ('<@mesh, [{"x"}p01]>', NotationError, "expected a priority"),
        ('<@mesh, [{"x"}p9999999999999999999]>', NotationError, "expected a priority"),
        ("<@mesh, [{}p1]>", NotationError, r"the dimension {}p1 is empty and closed"),
        ("<@mesh, [{}p0]>", NotationError, r"the dimension {}p0 is empty and closed"),
        ('<@mesh, [{"c"}]>', MeshError, "unknown axis 'c'"),
        ('<@mesh, [{"c":(2)2}]>', MeshError, "unknown axis 'c'"),
        ('<@mesh, [{}], replicated={"c"}>', MeshError, "unknown axis 'c'"),
        ('<@mesh, [{}], unreduced={"c"}>', MeshError, "unknown axis 'c'"),
        (
            '<@mesh, [{"y"}], replicated={"y"}>',
            SpecError,
            "axis y is used in dimension 0 and the rep",
        ),
        (
            '<@mesh, [{"y"}], unreduced={"y"}>',
            SpecError,
            "axis y is used in dimension 0 and the par",
        ),
        (
            '<@mesh, [{}], replicated={"y"}, unreduced={"y"}>',
            SpecError,
            "axis y is used in the rep",
        ),
        ('<@mesh, [{}], replicated={"y", "y"}>', SpecError, "the replicated axes, twice"),
        ('<@mesh, [{}], unreduced={"y", "y"}>', SpecError, "the partial axes, twice"),
        ('<@mesh, [{"y", "y"}]>', SpecError, "axis y is used in dimension 0, twice"),
        ('<@mesh, [{"y"}, {"y"}]>', SpecError, "axis y is used in dimension 0 and dimension 1"),
        ('<@mesh, [{"x":(2)2}], replicated={"x":(2)2}>', SpecError, r"axis x:\(2\)2 is used"),
        ('<@mesh, [{"x"}], replicated={"x":(2)2}>', SpecError, "axis x is used in dimension 0 and"),
        ('<@mesh, [{"x":(2)4}], replicated={"x":(1)4}>', SpecError, "overlap"),
        ('<@mesh, [{"x":(-1)2}]>', MeshError, "pre and size must be at least 1"),
        ('<@mesh, [{"x":(2)1}]>', NotationError, r"sub-axis x:\(2\)1 has size 1"),
        ('<@mesh, [{"x":(3)2}]>', MeshError, r"x:\(3\)2 does not divide axis 'x' of size 8"),
        ('<@mesh, [{"x":(2)3}]>', MeshError, r"x:\(2\)3 does not divide"),
        ('<@mesh, [{"x":(4)4}]>', MeshError, r"x:\(4\)4 does not divide"),
        ('<@mesh, [{"x":2}]>', NotationError, r"expected `\(`"),
        ('<@mesh, [{}], sharded={"x"}>', NotationError, "expected replicated="),
        ('<@mesh, [{}], replicated=max{"x"}>', NotationError, "expected `{`"),
        ('<@mesh, [{}], replicated={"x"}, replicated={"y"}>', NotationError, "replicated=.* twice"),
        ("<@mesh, [{}]> {}", NotationError, "expected nothing more"),
    ],
)
def test_a_sharding_that_means_nothing_is_refused(
    text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        parse_shardy(text, MESH)
    assert type(caught.value) is error
    assert str(caught.value).endswith(f"(in the Shardy text `{text}`)")


def test_the_dimensions_must_be_those_of_the_tensor() -> None:
    assert parse_shardy('[{"x"}, {}]', MESH, (8, 8)).ndim == 2
    for text in ('[{"x"}]', '[{"x"}, {}, {}]', "[]"):
        with pytest.raises(NotationError, match=r"dimensions for a tensor of shape \[8, 8\]"):
            parse_shardy(text, MESH, (8, 8))


@pytest.mark.parametrize(
    ("native", "part"),
    [
        ("x / y", "x / y"),
        ("x@stride2", "x@stride2"),
        ("- !1", "!1"),
        ("x | product(y)", "product(y)"),
        ("x | mean(y)", "mean(y)"),
        ("x | only(y=0)", "only(y=0)"),
        ("x:(2)1", "x:(2)1"),
    ],
)
def test_errors_name_the_part_that_cannot_be_expressed(native: str, part: str) -> None:
    spec = reshard.spec(MESH, native)
    with pytest.raises(NotationError) as caught:
        shardy_text(spec)
    assert str(caught.value).startswith(
        f"Shardy cannot express `{part}` of the sharding `{spec}`: "
    )


@given(specs_with_shapes())
def test_any_sharding_is_written_or_refused(pair: tuple[ShardingSpec, Shape]) -> None:
    spec, shape = pair
    try:
        text = shardy_text(spec)
    except NotationError as error:
        refusal = str(error)
    else:
        refusal = None
        again = parse_shardy(text, spec.mesh, shape)
        assert (again.dim_specs, again.replicated_axes) == (spec.dim_specs, spec.replicated_axes)
        assert again.reduction == spec.reduction
        assert shardy_text(again) == text
        assert again.layout(shape).tables == spec.layout(shape).tables
    assert refusal is None or refusal.startswith("Shardy cannot express `")


@given(flat_specs(("sum", "max", "min"), sub_axes=True, replicated=True), st.data())
def test_written_texts_are_read_back(spec: ShardingSpec, data: st.DataObject) -> None:
    dims = []
    for dim in spec.dim_specs:
        is_open = data.draw(st.booleans())
        priority = data.draw(st.sampled_from((0, 1, 30))) if is_open or dim.axes else 0
        dims.append(DimSpec(dim.axes, is_open, priority))
    if not spec.mesh.axis_names:
        dims = [DimSpec() for _ in dims]
    given_spec = ShardingSpec(spec.mesh, dims, spec.replicated_axes)
    shape = (2,) * spec.ndim
    assert parse_shardy(shardy_text(given_spec), spec.mesh, shape) is given_spec
    again = parse_shardy(shardy_text(spec), spec.mesh, shape)
    assert again.dim_specs == spec.dim_specs and again.reduction == spec.reduction
    assert shardy_text(again) == shardy_text(spec)


@given(st.text(alphabet='<@mesh, [{"xyz"}]>?:()12p=replicatdun#', max_size=28))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_shardy(text, MESH)
    except LayoutError as error:
        refusal = str(error)
    else:
        refusal = None
        assert parse_shardy(shardy_text(spec), spec.mesh) is spec
    assert refusal is None or "in the Shardy text" in refusal


@pytest.fixture(scope="module")
def shardy_prints() -> Callable[[str], str]:
    """Shardy's own parser, verifier and printer, on a module that jaxlib's bindings read."""
    pytest.importorskip("jaxlib.mlir.dialects.sdy")
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy, stablehlo

    context: Any = ir.Context()
    sdy.register_dialect(context)
    stablehlo.register_dialect(context)

    def prints(module: str) -> str:
        with context, ir.Location.unknown():
            return str(ir.Module.parse(module))

    return prints


def in_a_module(spec: ShardingSpec, text: str) -> str:
    """A tensor constrained to a sharding, which is what Shardy verifies."""
    tensor = f"tensor<{''.join('8x' for _ in range(spec.ndim))}f32>"
    return (
        f"{shardy_mesh_text(spec.mesh)}\n"
        f"%0 = stablehlo.constant dense<0.0> : {tensor}\n"
        f"%1 = sdy.sharding_constraint %0 {text.removeprefix('#sdy.sharding')} : {tensor}\n"
    )


@given(flat_specs(("sum",), sub_axes=True, replicated=True), st.integers(0, 5))
def test_shardy_accepts_written_texts(
    shardy_prints: Callable[[str], str], spec: ShardingSpec, turn: int
) -> None:
    size = spec.mesh.size
    order = [(rank + turn) % size for rank in range(size)]
    mesh = DeviceMesh("a mesh", spec.mesh.shape, spec.mesh.axis_names, order)
    dims = [
        DimSpec(dim.axes, (d + turn) % 3 == 0, turn if dim.axes else 0)
        for d, dim in enumerate(spec.dim_specs)
    ]
    if not mesh.axis_names:
        dims = [DimSpec() for _ in dims]
    spec = ShardingSpec(mesh, dims, spec.replicated_axes, spec.partial_axes)
    text = shardy_text(spec)
    printed = shardy_prints(in_a_module(spec, text))
    assert text.removeprefix("#sdy.sharding") in printed
    assert shardy_mesh_text(mesh) in printed
    (line,) = (line for line in printed.splitlines() if "sharding_constraint" in line)
    told = line.partition("%cst")[2].rpartition(":")[0]
    ordered = parse_shardy(text, mesh, (8,) * spec.ndim)
    assert parse_shardy(told, mesh, (8,) * spec.ndim) is ordered


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ('{"x":(1)2, "x":(2)2}', '{"x":(1)4}'),
        ('{"x":(1)8}', '{"x"}'),
    ],
)
def test_shardy_refuses_texts_that_are_not_canonical(
    shardy_prints: Callable[[str], str], wrong: str, right: str
) -> None:
    spec = parse_shardy(f"<@mesh, [{wrong}]>", MESH)
    assert shardy_text(spec) == f"#sdy.sharding<@mesh, [{right}]>"
    assert right in shardy_prints(in_a_module(spec, shardy_text(spec)))
    with pytest.raises(Exception, match="sub-ax"):
        shardy_prints(in_a_module(spec, f"<@mesh, [{wrong}]>"))


@given(meshes())
def test_meshes_are_read_back(mesh: DeviceMesh) -> None:
    try:
        text = shardy_mesh_text(mesh)
    except NotationError:
        assert sorted(mesh.devices) != list(range(mesh.size))
    else:
        assert parse_shardy_mesh(text) is mesh
