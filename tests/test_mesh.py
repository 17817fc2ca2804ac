"""Meshes: axes and their parts, groups, and what a mesh may not be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import coordinate
from reshard.errors import MeshError, NotationError
from reshard.mesh import Axis, DeviceMesh
from strategies import axis_parts, meshes


def test_devices_are_numbered_row_major() -> None:
    mesh = DeviceMesh.of(dp=2, tp=3)
    assert mesh.devices == (0, 1, 2, 3, 4, 5)
    assert mesh.coordinates(["dp"]).tolist() == [0, 0, 0, 1, 1, 1]
    assert mesh.coordinates(["tp"]).tolist() == [0, 1, 2, 0, 1, 2]


def test_a_mesh_without_axes_is_one_device() -> None:
    mesh = DeviceMesh.of()
    assert (mesh.size, mesh.devices, mesh.coordinates([]).tolist()) == (1, (0,), [0])
    assert mesh.groups([]) == ((0,),)


@given(st.data())
def test_coordinates_are_those_of_each_device(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = data.draw(axis_parts(mesh))
    axes = axes[: data.draw(st.integers(0, len(axes)))]
    expected = [coordinate(mesh, position, axes) for position in range(mesh.size)]
    assert mesh.coordinates(axes).tolist() == expected
    assert mesh.coordinates(map(str, axes)).tolist() == expected


@given(meshes())
def test_all_axes_together_number_the_devices(mesh: DeviceMesh) -> None:
    assert mesh.coordinates(mesh.axis_names).tolist() == list(range(mesh.size))
    grid = np.arange(mesh.size).reshape(mesh.shape)
    for axis, name in enumerate(mesh.axis_names):
        expected = np.unravel_index(grid.ravel(), mesh.shape)[axis]
        assert mesh.coordinates([name]).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("x:(1)2", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("x:(2)2", [0, 0, 1, 1, 0, 0, 1, 1]),
        ("x:(4)2", [0, 1, 0, 1, 0, 1, 0, 1]),
        ("x:(2)4", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("x:(1)4", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("x:(1)8", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("x:(4)1", [0] * 8),
    ],
)
def test_a_sub_axis_is_digits_of_its_axis(axis: str, expected: list[int]) -> None:
    assert DeviceMesh.of(x=8).coordinates([axis]).tolist() == expected


@given(st.data())
def test_groups_differ_along_their_axes_only(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = data.draw(axis_parts(mesh))
    chosen = axes[: data.draw(st.integers(0, len(axes)))]
    rest = mesh.remaining_axes(chosen)
    groups = mesh.groups(chosen)
    assert sorted(rank for group in groups for rank in group) == sorted(mesh.devices)
    position = {rank: index for index, rank in enumerate(mesh.devices)}
    for group in groups:
        along = [coordinate(mesh, position[rank], chosen) for rank in group]
        assert along == list(range(len(group)))
        assert len({coordinate(mesh, position[rank], rest) for rank in group}) == 1


def test_groups_keep_the_order_of_the_mesh_not_of_the_ranks() -> None:
    mesh = DeviceMesh.of(x=2, y=2, devices=[3, 1, 2, 0])
    assert mesh.groups(["y"]) == ((3, 1), (2, 0))
    assert mesh.groups(["x"]) == ((3, 2), (1, 0))
    assert mesh.groups(["y", "x"]) == ((3, 2, 1, 0),)


@given(st.data())
def test_remaining_axes_are_the_rest_of_the_mesh(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    axes = data.draw(axis_parts(mesh))
    chosen = axes[: data.draw(st.integers(0, len(axes)))]
    remaining = mesh.remaining_axes(chosen)
    numbers = mesh.coordinates([*chosen, *remaining]).tolist()
    assert sorted(numbers) == list(range(mesh.size))


def test_sizes_of_axes_and_sub_axes() -> None:
    mesh = DeviceMesh.of(x=6, y=2)
    assert [mesh.axis_size(axis) for axis in ("x", "y", "x:(2)3", Axis("x", 3, 2))] == [6, 2, 3, 2]


def test_axes_read_and_print_themselves() -> None:
    for text in ("x", "x:(2)4", "tp.expert:(1)2", "_a1"):
        assert str(Axis.parse(text)) == text
    assert Axis.parse(" x ") == Axis("x")
    assert Axis("x").is_full and not Axis("x", 1, 2).is_full


@given(meshes())
def test_meshes_read_back_from_their_text(mesh: DeviceMesh) -> None:
    again = DeviceMesh.parse(mesh.text)
    assert (again.shape, again.axis_names) == (mesh.shape, mesh.axis_names)
    assert again is DeviceMesh(mesh.name, mesh.shape, mesh.axis_names)


def test_a_mesh_prints_its_axes_and_an_unusual_order() -> None:
    assert repr(DeviceMesh.of(dp=2, tp=4)) == "DeviceMesh(dp=2,tp=4)"
    assert repr(DeviceMesh.of(name="pod", x=2, devices=[1, 0])) == (
        "DeviceMesh('pod', x=2, devices=[1, 0])"
    )


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (lambda: DeviceMesh.of(x=0), MeshError, "axis 'x' has size 0"),
        (lambda: DeviceMesh("m", (2,), ("x", "y")), MeshError, r"2 axis names \['x', 'y'\] .* 1 a"),
        (lambda: DeviceMesh("m", (2, 2), ("x", "x")), MeshError, r"\['x', 'x'\] must differ"),
        (lambda: DeviceMesh("m", (2,), ("2x",)), MeshError, "axis name '2x' must be letters"),
        (lambda: DeviceMesh.of(x=2, devices=[0]), MeshError, "1 devices for a mesh of 2"),
        (lambda: DeviceMesh.of(x=2, devices=[1, 1]), MeshError, r"devices \[1, 1\]"),
        (lambda: DeviceMesh.of(x=2, devices=[-1, 1]), MeshError, r"devices \[-1, 1\]"),
        (lambda: DeviceMesh.of(x=2.7), MeshError, r"size of axis 'x' 2\.7 must be a whole number"),
        (lambda: DeviceMesh.of(x="2"), MeshError, "size of axis 'x' '2' must be a whole number"),
        (lambda: DeviceMesh.of(x=True), MeshError, "size of axis 'x' True"),
        (lambda: DeviceMesh.of(x=-1), MeshError, "size of axis 'x' -1 must not be negative"),
        (lambda: DeviceMesh.of(x=10**30), MeshError, "must be at most"),
        (lambda: DeviceMesh("m", (2.7,), ("x",)), MeshError, r"shape of a mesh \[2\.7\] must be"),
        (lambda: DeviceMesh("m", "2", ("x",)), MeshError, "shape of a mesh '2' must be a list"),
        (lambda: DeviceMesh("m", 2, ("x",)), MeshError, "shape of a mesh 2 must be a list"),
        (lambda: DeviceMesh("m", (2,), "x"), MeshError, "axis names 'x'; give a list"),
        (lambda: DeviceMesh("m", (2,), (3,)), MeshError, "axis name 3 must be letters"),
        (lambda: DeviceMesh((2,), ("x",), None), MeshError, r"name \(2,\) of a mesh; give a text"),
        (lambda: DeviceMesh.of(x=2, devices=[0, 1.5]), MeshError, r"devices \[0, 1\.5\] must be"),
        (lambda: DeviceMesh.of(x=2, devices=2), MeshError, "devices 2 must be a list"),
        (lambda: DeviceMesh.of(x=2, devices=[0, 1 << 40]), MeshError, "and below 4194304"),
        (lambda: DeviceMesh.of(x=2).axis_size(0), MeshError, "axis 0; give the name of a mesh"),
        (lambda: DeviceMesh.of(dp=2).groups("dp"), MeshError, "axes 'dp'; give a list of axes"),
        (lambda: DeviceMesh.of(dp=2).groups(3), MeshError, "axes 3; give a list of axes"),
        (lambda: DeviceMesh.parse(["x=2"]), NotationError, r"mesh \['x=2'\]; give its axes as a"),
        (lambda: Axis("x", 1.0, 2), MeshError, r"pre of a sub-axis 1\.0 must be a whole number"),
        (lambda: Axis(3), MeshError, "axis name 3 must be"),
        (lambda: Axis.parse(3), NotationError, "axis 3; give its name"),
        (lambda: DeviceMesh.of(x=2).axis_size("y"), MeshError, "unknown axis 'y'; the mesh 'mesh'"),
        (lambda: DeviceMesh.of().axis_size("y"), MeshError, "has no axes"),
        (
            lambda: DeviceMesh.of(x=6).axis_size("x:(1)4"),
            MeshError,
            r"sub-axis x:\(1\)4 does not divide axis 'x' of size 6",
        ),
        (lambda: DeviceMesh.of(x=8).axis_size("x:(4)4"), MeshError, r"x:\(4\)4 does not divide"),
        (lambda: Axis("x", 2), MeshError, "sub-axis of 'x' with pre 2 needs a size"),
        (lambda: Axis("x", 0, 2), MeshError, r"x:\(0\)2: pre and size must be at least 1"),
        (lambda: Axis("x", 1, 0), MeshError, r"x:\(1\)0"),
        (lambda: Axis("x y"), MeshError, "axis name 'x y'"),
        (lambda: Axis.parse("x:2"), NotationError, "cannot read the axis 'x:2'"),
        (lambda: Axis.parse(""), NotationError, "cannot read the axis ''"),
        (lambda: DeviceMesh.parse("dp=2,tp"), NotationError, "cannot read 'tp' in the mesh 'dp=2"),
        (lambda: DeviceMesh.parse("dp=-2"), NotationError, "cannot read 'dp=-2'"),
        (lambda: DeviceMesh.parse("dp=2,"), NotationError, "cannot read ''"),
        (lambda: DeviceMesh.parse("dp=0"), MeshError, "axis 'dp' has size 0"),
        (lambda: DeviceMesh.parse("dp=²"), NotationError, "cannot read 'dp=²'"),
        (lambda: DeviceMesh.parse("x=2,x=3"), MeshError, r"\['x', 'x'\]"),
    ],
)
def test_invalid_meshes_are_refused(
    refused: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        refused()


def test_a_mesh_beyond_any_machine_is_refused() -> None:
    with pytest.raises(MeshError, match="100000000000 devices"):
        DeviceMesh.of(tp=100_000_000_000)
