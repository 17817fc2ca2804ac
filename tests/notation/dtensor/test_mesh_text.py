"""Meshes in front of placements, as torch prints them and as programs write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError, MeshError, NotationError
from reshard.mesh import DeviceMesh
from reshard.notation.dtensor.mesh_text import split_mesh
from reshard.notation.dtensor.ragged import parse_ragged
from reshard.notation.dtensor.text import parse_dtensor
from reshard.notation.registry import read_sharding

PLACED = "(Shard(dim=0), Replicate())"
NAMED = DeviceMesh("torch", (2, 2), ("dp", "tp"))
UNNAMED = DeviceMesh("torch", (2, 2), ("dim0", "dim1"))
TURNED = DeviceMesh("torch", (2, 2), ("dim0", "dim1"), [3, 1, 2, 0])


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))", NAMED),
        ("DeviceMesh((2, 2), 'cuda', stride=(2, 1))", UNNAMED),
        ("DeviceMesh((2, 2), 'cpu', stride=(2, 1), Mesh: [[3, 1], [2, 0]])", TURNED),
        ("DeviceMesh('cpu', [[3, 1], [2, 0]])", TURNED),
        ("DeviceMesh((2, 2), 'cpu', mesh_dim_names=('dp', 'tp'))", NAMED),
        ("DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))", NAMED),
        ('DeviceMesh("cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=["dp", "tp"])', NAMED),
    ],
)
def test_a_mesh_in_front_of_placements(text: str, mesh: DeviceMesh) -> None:
    for whole in (
        f"{text}, {PLACED}",
        f"{text} {PLACED}",
        f"({text}, {PLACED})",
        f"DTensor(local_tensor=tensor([[0., 0.],\n  [1., 1.]]), device_mesh={text}, "
        f"placements={PLACED})",
    ):
        found, rest = split_mesh(whole)
        assert (found, rest) == (mesh, PLACED)
        spec = parse_dtensor(whole, None, (4, 2))
        assert spec is parse_dtensor(PLACED, mesh, (4, 2))
        assert read_sharding(whole, None, (4, 2)).sharding is spec


def test_a_mesh_that_is_given_fits_or_gives_way() -> None:
    cube = DeviceMesh.of(x=2, y=2, devices=[3, 1, 2, 0])
    sizes = "DeviceMesh((2, 2), 'cpu', stride=(2, 1))"
    # The text has no ranks and no names, so the mesh tells them.
    assert split_mesh(f"{sizes}, {PLACED}", cube)[0] is cube
    assert split_mesh(f"DeviceMesh('cpu', [[3, 1], [2, 0]]), {PLACED}", cube)[0] is cube
    other = "DeviceMesh('cpu', [[0, 1], [2, 3]])"
    assert split_mesh(f"{other}, {PLACED}", cube)[0] is UNNAMED
    assert split_mesh(f"DeviceMesh((dp=2, tp=2), 'cpu'), {PLACED}", cube)[0] is NAMED
    assert split_mesh(f"{sizes}, {PLACED}", DeviceMesh.of(x=4))[0] is UNNAMED
    # A part of another mesh hides its ranks.
    part = DeviceMesh.of(dp=2, devices=[1, 5])
    assert split_mesh("DeviceMesh((dp=2), 'cpu', stride=(4,)), R", part)[0] is part
    assert split_mesh(PLACED, cube) == (cube, PLACED)
    assert split_mesh(PLACED) == (None, PLACED)


def test_ragged_shards_may_have_one_too() -> None:
    text = "DeviceMesh('cpu', [3, 1]), RaggedShard((0,), (1, 3))"
    layout = parse_ragged(text, shape=(4, 2))
    assert (layout.local_shape(3), layout.local_shape(1)) == ((1, 2), (3, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DeviceMesh((2, 2)", "cannot read the mesh"),
        ("mesh: DeviceMesh((2, 2), 'cpu'), R", "cannot read the mesh"),
        ("DeviceMesh('cpu'), R", "has neither sizes nor ranks"),
        ("DeviceMesh((x, 2), 'cpu'), R", r"cannot read the sizes of a mesh \(x, 2\)"),
        ("DeviceMesh('cpu', [[0, 1], [2]]), R", r"cannot read the ranks \[\[0, 1\], \[2\]\]"),
        (f"DeviceMesh('cpu', {'[' * 9000}{']' * 9000}), R", "cannot read the ranks"),
        (f"DeviceMesh('cpu', [{'9' * 30}]), R", "cannot read the ranks"),
        ("DeviceMesh((dp=2), 'cpu', stride=(4,)), R", "is a part of another one"),
        ("DeviceMesh((x=4), 'cpu', stride=((4, 1),)), R", "is a part of another one"),
    ],
)
def test_a_mesh_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_dtensor(text, None, (4,))


def test_a_mesh_that_cannot_be() -> None:
    for mesh in ("'cpu', [0, 0]", "(0,), 'cpu'", "'cpu', [0, 1], mesh_dim_names=('a', 'b')"):
        with pytest.raises(MeshError):
            parse_dtensor(f"DeviceMesh({mesh}), R", None, (4,))


@given(st.text(alphabet="()[]0123,= 'dpstride", max_size=24))
def test_any_text_is_read_or_refused(text: str) -> None:
    for whole in (f"DeviceMesh({text}), R", f"DeviceMesh({text}, RR"):
        try:
            spec = parse_dtensor(whole, None, (4,))
        except LayoutError:
            continue
        assert spec.ndim == 1
