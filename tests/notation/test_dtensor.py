"""Placements of DTensor: what torch itself does with them, and texts both ways.

Meshes in front of placements, as torch prints them and as programs write them.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.errors import LayoutError, MeshError, NotationError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation import dtensor
from reshard.notation.dtensor import (
    Partial,
    Replicate,
    Shard,
    StridedShard,
    dtensor_text,
    parse_dtensor,
    sharding_of_placements,
    split_mesh,
)
from reshard.notation.ragged import parse_ragged
from reshard.notation.registry import read_sharding
from reshard.sharding import DimSpec, ShardingSpec
from reshard.sharding import spec as native
from selection import choose
from strategies import specs_with_shapes

torch = pytest.importorskip("torch")

from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor import _utils as torch_utils  # noqa: E402
from torch.distributed.tensor import placement_types as torch_placements  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta  # noqa: E402
from torch.distributed.tensor._redistribute import redistribute_local_tensor  # noqa: E402

from checkpoint.torch_checkpoints import cut, mesh_of, standing_for  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Shape = tuple[int, ...]
AXES = ("dp", "tp", "pp")
SQUARE = DeviceMesh.of(dp=2, tp=2)
CUBE = DeviceMesh.of(dp=2, tp=2, pp=2)


def numbered(shape: Shape) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape)).reshape(shape)


def locals_of(layout: Layout) -> dict[int, np.ndarray[Any, Any]]:
    """What every rank holds of a tensor whose elements are numbered."""
    whole = Layout.replicated(layout.shape, layout.slots)
    array = numbered(layout.shape)
    return reshard.plan(whole, layout).run(dict.fromkeys(range(layout.slots), array))


def torch_object(value: dtensor.Placement) -> Any:
    match value:
        case Shard():
            return torch_placements.Shard(value.dim)
        case StridedShard():
            return torch_placements._StridedShard(value.dim, split_factor=value.split_factor)
        case Partial():
            return torch_placements.Partial(value.operation)
    return torch_placements.Replicate()


def torch_local(
    shape: Shape, mesh_shape: Shape, objects: Sequence[Any], at: Sequence[int]
) -> np.ndarray[Any, Any]:
    """What torch's own splitting code leaves at a coordinate of the mesh."""
    local = torch.arange(math.prod(shape)).reshape(shape)
    for size, placement, coordinate in zip(mesh_shape, objects, at, strict=True):
        if isinstance(placement, torch_placements.Shard | torch_placements._StridedShard):
            parts, _ = placement._split_tensor(local, size, with_padding=False)
            local = parts[coordinate]
    return np.asarray(local.numpy())


@st.composite
def cases(draw: st.DrawFn) -> tuple[DeviceMesh, Shape, list[dtensor.Placement]]:
    """A mesh of at most 8 ranks in any order, a shape, and placements that cut it."""
    shapes = [s for n in (1, 2, 3) for s in itertools.product((1, 2, 3, 4), repeat=n)]
    mesh_shape = draw(st.sampled_from([s for s in shapes if math.prod(s) <= 8]))
    size = math.prod(mesh_shape)
    devices = draw(st.permutations(range(size)))
    mesh = DeviceMesh("torch", mesh_shape, AXES[: len(mesh_shape)], devices)
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        dims.map(Shard),
        dims.map(Shard),
        st.builds(StridedShard, dims, st.integers(1, 4)),
        st.just(Replicate()),
    )
    return mesh, shape, [draw(kinds) for _ in mesh_shape]


@given(cases())
def test_every_rank_holds_the_elements_that_torch_gives_it(
    case: tuple[DeviceMesh, Shape, list[dtensor.Placement]],
) -> None:
    mesh, shape, values = case
    spec = sharding_of_placements(mesh, values, len(shape))
    objects = [torch_object(value) for value in values]
    assert sharding_of_placements(mesh, objects, len(shape)) is spec
    held = locals_of(spec.layout(shape))
    coordinates = itertools.product(*map(range, mesh.shape))
    for rank, at in zip(mesh.devices, coordinates, strict=True):
        expected = torch_local(shape, mesh.shape, objects, at)
        assert held[rank].shape == expected.shape
        assert np.array_equal(held[rank], expected)
        local_shape, offset = torch_utils._compute_local_shape_and_global_offset(
            shape, mesh.shape, list(at), objects
        )
        assert tuple(local_shape) == held[rank].shape
        if held[rank].size:
            assert np.ravel_multi_index(offset, shape) == held[rank].flat[0]


@given(cases(), st.sampled_from(["sum", "avg", "max", "min", "product"]), st.data())
def test_texts_and_torch_objects_of_a_sharding_give_it_back(
    case: tuple[DeviceMesh, Shape, list[dtensor.Placement]], operation: str, data: st.DataObject
) -> None:
    mesh, shape, values = case
    partial = data.draw(st.integers(0, len(values)))
    values[:partial] = [Partial(operation)] * partial
    spec = sharding_of_placements(mesh, values, len(shape))
    assert parse_dtensor(dtensor_text(spec), mesh, shape) is spec
    objects = dtensor.to_placements(spec)
    assert list(objects) == [torch_object(value) for value in values]
    assert sharding_of_placements(mesh, objects, len(shape)) is spec
    for text in (str(list(objects)), repr(objects), "".join(map(str, objects))):
        assert parse_dtensor(text, mesh, shape) is spec, text


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "values"),
    [
        ((8,), (13,), [Shard(0)]),
        ((4,), (5, 3), [Shard(-1)]),
        ((4,), (2, 0), [Shard(1)]),
        ((2, 2), (6, 5), [Shard(0), Shard(0)]),
        ((2, 4), (9, 7), [Shard(1), Shard(0)]),
        ((2, 2, 2), (11,), [Shard(0), Shard(0), Shard(0)]),
        ((3, 2), (7, 2), [StridedShard(0, 2), Shard(0)]),
        ((2, 3), (17, 2), [Shard(0), StridedShard(0, 3)]),
        ((2, 2, 2), (13, 5), [StridedShard(0, 4), StridedShard(0, 2), Shard(0)]),
        ((4,), (10, 2), [StridedShard(-2, 3)]),
        ((2, 2), (3, 4), [Replicate(), Shard(0)]),
    ],
    ids=str,
)
def test_distribute_tensor(
    mesh_shape: Shape, shape: Shape, values: list[dtensor.Placement]
) -> None:
    size = math.prod(mesh_shape)
    for rank in range(size):
        with standing_for(rank, size):
            mesh = mesh_of(*mesh_shape, names=AXES[: len(mesh_shape)])
            whole = torch.arange(math.prod(shape)).reshape(shape)
            tensor = cut(whole, mesh, [torch_object(value) for value in values])
            spec = dtensor.sharding_of_dtensor(tensor)
            assert spec.mesh is DeviceMesh("torch", mesh_shape, AXES[: len(mesh_shape)])
            assert spec is sharding_of_placements(spec.mesh, values, len(shape))
            # A DTensor's own text, as it is printed.
            assert parse_dtensor(str(tensor.placements), spec.mesh, shape) is spec
            assert parse_dtensor(repr(tensor), None, shape) is spec
            held = locals_of(spec.layout(shape))[rank]
            assert np.array_equal(held, tensor.to_local().numpy())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("shape", [(16, 2), (13, 2), (3, 1)], ids=str)
def test_a_shard_order_is_the_order_of_the_cuts(order: Shape, shape: Shape) -> None:
    for rank in range(8):
        with standing_for(rank, 8):
            mesh = mesh_of(2, 2, 2, names=AXES)
            whole = torch.arange(math.prod(shape)).reshape(shape)
            meta = TensorMeta(torch.Size(shape), whole.stride(), whole.dtype)
            full = DTensorSpec(mesh, (torch_placements.Replicate(),) * 3, meta)
            shards = (torch_placements.Shard(0),) * 3
            ordered = DTensorSpec(mesh, shards, meta, (ShardOrderEntry(0, order),))
            local = redistribute_local_tensor(whole, full, ordered)
            spec = dtensor.sharding_of_dtensor(ordered)
            assert str(spec) == f"{' / '.join(AXES[axis] for axis in order)}, -"
            assert np.array_equal(locals_of(spec.layout(shape))[rank], local.numpy())
            assert parse_dtensor(str(ordered), spec.mesh, shape) is spec
            tensor = DTensor(local, ordered, requires_grad=False)
            assert dtensor.sharding_of_dtensor(tensor) is spec


def test_offsets_of_torch_know_no_shard_order() -> None:
    """Torch's offsets are those of the left-to-right cut, whatever the order: a trap."""
    shards = (torch_placements.Shard(0),) * 2
    spec = sharding_of_placements(SQUARE, shards, 1, [(0, (1, 0))])
    held = locals_of(spec.layout((8,)))
    assert held[1].tolist() == [4, 5]
    offsets = torch_utils._compute_local_shape_and_global_offset((8,), (2, 2), [0, 1], shards)
    assert offsets == ((2,), (2,))


def test_a_shard_order_is_written_back_by_steps_or_by_strides() -> None:
    spec = native(CUBE, "pp / dp / tp, -")
    assert dtensor_text(spec) == "[Shard(0)[1], Shard(0)[2], Shard(0)[0]]"
    assert parse_dtensor(dtensor_text(spec), CUBE, (4, 4)) is spec
    strided = torch_placements._StridedShard(0, split_factor=2)
    assert dtensor.to_placements(spec, (16, 2)) == (
        strided,
        strided,
        torch_placements.Shard(0),
    )
    with pytest.raises(NotationError, match="give the shape"):
        dtensor.to_placements(spec)
    # 9 over tp are 5 and 4, and over dp then 2, 2, 1, 0 and 1, 1, 1, 1: dp's last has no index of
    # tp's first. By strides it has one index, and gives it to tp's first.
    uneven = native(DeviceMesh.of(dp=4, tp=2), "tp / dp, -")
    with pytest.raises(NotationError, match=r"`_StridedShard` differ for shape \[9, 2\]"):
        dtensor.to_placements(uneven, (9, 2))
    assert dtensor.to_placements(uneven, (16, 2))[0].split_factor == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[Shard(0), Replicate()]", "dp, -"),
        ("(Shard(dim=0), Replicate())", "dp, -"),
        ("Shard(0), Replicate()", "dp, -"),
        ("Shard(0) R", "dp, -"),
        ("S(0)R", "dp, -"),
        ("RS(1)", "-, tp"),
        ("[S(0), S(1)]", "dp, tp"),
        ("S(0) S(0)", "dp / tp, -"),
        ("S(0)[0]S(0)[1]", "dp / tp, -"),
        ("S(0)[1]S(0)[0]", "tp / dp, -"),
        ("[Shard(0)[1], Shard(0)[0]]", "tp / dp, -"),
        ("S(1)[0]S(0)[0]", "tp, dp"),
        ("_S(0, 2)S(0)", "dp@stride2 / tp, -"),
        ("[_StridedShard(dim=0, split_factor=2), Shard(dim=-2)]", "dp@stride2 / tp, -"),
        ("[_StridedShard(dim=0, sf=3), Replicate()]", "dp@stride3, -"),
        ("_StridedShard(1) R", "-, dp@stride1"),
        ("Partial() S(0)", "tp, - | sum(dp)"),
        ("P(sum)S(0)", "tp, - | sum(dp)"),
        ("PS(1)", "-, tp | sum(dp)"),
        ("P(avg)P(avg)", "-, - | mean(dp tp)"),
        ("Partial('max'), Partial(reduce_op=\"max\")", "-, - | max(dp tp)"),
        ("Partial(product) R", "-, - | product(dp)"),
        ("RP(min)", "-, - | min(tp)"),
        ("RR", "-, -"),
        ("Spec(f32[4, 6](S(0)S(1)))", "dp, tp"),
        ("torch.distributed.tensor.placement_types.Shard(dim=1) Replicate", "-, dp"),
        ("[PartitionedShard(0, 2, (3, 1)), Replicate()]", "dp@blocks[3,1], -"),
        ("[Shard(0), PartitionedShard(1, 2, [[3, 1], [0, 2]])]", "dp, tp@pieces[3:0,1:2]"),
        (
            "PartitionedShard(dim=1, num_partitions=2, splits=(4, 2), aligned=True) R",
            "-, dp@whole[4,2]",
        ),
    ],
)
def test_a_text_means_its_sharding(text: str, expected: str) -> None:
    found = parse_dtensor(text, SQUARE, (4, 6))
    assert str(found) == expected
    found.layout((4, 6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Shard(0)]", "1 placements for a mesh of 2 axes"),
        ("", "0 placements for a mesh of 2 axes"),
        ("[Shard(2), Replicate()]", "shards dimension 2 of a tensor of 2 dimensions; give -2"),
        ("[Shard(-3), Replicate()]", "shards dimension -3"),
        ("[Shard(), Replicate()]", "Shard needs a number for dim, got None"),
        ("[Shard(x), Replicate()]", "Shard needs a number for dim, got 'x'"),
        ("[Shard(0, 1), Replicate()]", r"Shard does not take 1; write Shard\(dim\)"),
        ("[Shard(0, dim=1), Replicate()]", "Shard does not take dim=1"),
        ("[Shard(0), Replicate(1)]", "Replicate does not take 1"),
        ("[Shard(0), Owned(1)]", r"cannot read 'Owned\(1\)\]?'; expected a placement"),
        ("[Shard(0), Rubbish]", "cannot read 'Rubbish'"),
        ("[Shard(0, Replicate()]", r"cannot read .*; expected `,` or `\)`"),
        ("Shard(0", r"cannot read ''; expected `,` or `\)`"),
        ("[Shard(0", r"cannot read '\[Shard\(0'"),
        ("[Shard(1 2), R]", r"cannot read '2\).*; expected `,`"),
        ("[Shard(=2), R]", r"cannot read '=2\).*; expected a number, a word"),
        ("[Shard(((((((1))))))), R]", "expected lists of at most 3 levels"),
        (f"[Shard({'9' * 5000}), R]", "expected a number"),
        ("[Shard(1e3), R]", "cannot read 'e3"),
        ("[Partial(bor), R]", r"Partial\(bor\): the reductions are sum, avg, max, min, product"),
        ("[Partial(sum), Partial(max)]", "reduced by max and sum; a tensor has a single"),
        ("[Partial(sum), Partial(avg)]", "reduced by mean and sum"),
        ("[_StridedShard(0, 0), R]", "split_factor 0; it must be at least 1"),
        ("S(0)[1]S(0)[1]", r"dimension 0 have the steps \[1, 1\]; give 0 to 1, each once"),
        ("S(0)[0]S(0)", r"dimension 0 have the steps \[0, None\]"),
        ("S(0)R[0]", "only axes that shard have an order"),
        ("[RaggedShard((0,), (1, 1)), R]", "read it with `reshard.notation.parse_ragged`"),
        ("[PartitionedShard(0, 2), R]", "needs splits"),
        ("[PartitionedShard(0, 2, (a, b)), R]", "needs splits"),
        ("[PartitionedShard(0, 2, (2, 2), maybe), R]", "needs True or False"),
        ("[PartitionedShard(0, 2, ((1, 1), (1, 1), (0, 0))), R]", "3 ranks, but axis dp has 2"),
    ],
)
def test_invalid_texts_are_refused_with_the_text(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message) as caught:
        parse_dtensor(text, SQUARE, (4, 6))
    assert f"`{text}`" in str(caught.value)


def test_a_mesh_and_a_shape_are_needed() -> None:
    with pytest.raises(NotationError, match="lack the tensor's mesh"):
        parse_dtensor("[Shard(0)]")
    with pytest.raises(NotationError, match="lack the tensor's shape"):
        parse_dtensor("[Shard(0), Replicate()]", SQUARE)
    with pytest.raises(NotationError, match="shards a tensor without dimensions"):
        parse_dtensor("[Shard(0), Replicate()]", SQUARE, ())
    assert str(parse_dtensor("[Replicate(), Partial(sum)]", SQUARE, ())) == "| sum(tp)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp tp, -", "`dp tp` .*; `dp / tp` shards the parts again"),
        ("-, dp:(1)2", "`dp:\\(1\\)2` .*: it takes whole mesh axes"),
        ("dp@balanced, -", "`dp@balanced` .*: its placements shard by ceil"),
        ("dp@stride2[4,4], -", "`dp@stride2\\[4,4\\]`"),
        ("-, dp@blocks[4,2]", "`dp@blocks\\[4,2\\]`"),
        ("dp ?, -", "`dp \\?` .*: it has no open dimensions"),
        ("-, - !1", "`!1` .*: it has no priorities"),
        ("-, - | sum(dp:(1)2)", "`dp:\\(1\\)2` .*: it takes whole mesh axes"),
        ("-, - | sum(tp dp)", "`sum\\(tp dp\\)` .*: contributions are numbered"),
        ("tp, - | only(dp=1)", "`only\\(dp=1\\)`"),
    ],
)
def test_errors_name_the_part_that_dtensor_cannot_express(text: str, message: str) -> None:
    mesh = DeviceMesh.of(dp=4, tp=2)
    with pytest.raises(NotationError, match=f"DTensor cannot express {message}"):
        dtensor_text(native(mesh, text))
    with pytest.raises(NotationError, match=f"DTensor cannot express {message}"):
        dtensor.to_placements(native(mesh, text))


@given(specs_with_shapes())
@settings(max_examples=choose(60, 200))
def test_a_sharding_is_written_so_that_it_reads_back_or_refused(
    pair: tuple[ShardingSpec, Shape],
) -> None:
    spec, shape = pair
    try:
        text = dtensor_text(spec)
    except NotationError:
        return
    # Copies that propagation must leave alone are copies here.
    marked = ShardingSpec(
        spec.mesh, spec.dim_specs, (), spec.partial_axes, spec.reduction or "sum", spec.only
    )
    assert parse_dtensor(text, spec.mesh, shape) is marked


@given(st.text(alphabet="SRP_()[]0123, =edim'Shard", max_size=24))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_dtensor(text, SQUARE, (4, 6))
    except LayoutError:
        return
    assert parse_dtensor(dtensor_text(spec), SQUARE, (4, 6)) is spec


def test_an_order_must_fit_the_placements() -> None:
    shards = [Shard(0), Shard(0)]
    assert str(sharding_of_placements(SQUARE, shards, 1, [(0, (1, 0))])) == "tp / dp"
    for order in ([], [(0, (1,))], [(0, (1, 0, 0))], [(1, (1, 0))], [(0, (0, 2))]):
        with pytest.raises(NotationError, match="does not fit the placements"):
            sharding_of_placements(SQUARE, shards, 2, order)


def test_unknown_placements_of_torch_are_refused() -> None:
    mask = torch_placements._MaskPartial(offset_shape=torch.Size([4]), offset_dim=0)
    with pytest.raises(NotationError, match="of type _MaskPartial is not known"):
        sharding_of_placements(DeviceMesh.of(tp=2), [mask], 1)

    class Own(torch_placements.Shard):
        pass

    with pytest.raises(NotationError, match="of type Own is not known"):
        sharding_of_placements(DeviceMesh.of(tp=2), [Own(0)], 1)
    with pytest.raises(NotationError, match="of type int is not known"):
        sharding_of_placements(DeviceMesh.of(tp=2), [0], 1)
    with pytest.raises(NotationError, match=r"Partial\(band\)"):
        sharding_of_placements(DeviceMesh.of(tp=2), [torch_placements.Partial("band")], 1)


def test_a_mesh_in_another_order_of_ranks() -> None:
    order = [[3, 1], [2, 0]]
    with standing_for(2, 4):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", torch.tensor(order))
        found = dtensor.mesh_of(mesh)
        assert found is DeviceMesh("torch", (2, 2), ("dim0", "dim1"), [3, 1, 2, 0])
        tensor = cut(torch.arange(10), mesh, [torch_placements.Shard(0)] * 2)
        held = locals_of(dtensor.sharding_of_dtensor(tensor).layout((10,)))
        assert np.array_equal(held[2], tensor.to_local().numpy())
        assert [held[rank].tolist() for rank in (3, 1, 2, 0)] == [
            [0, 1, 2],
            [3, 4],
            [5, 6, 7],
            [8, 9],
        ]


def test_reading_does_not_import_torch() -> None:
    program = (
        "import sys; from reshard.notation.dtensor import parse_dtensor, dtensor_text; "
        "from reshard.mesh import DeviceMesh; "
        "dtensor_text(parse_dtensor('S(0)R', DeviceMesh.of(x=2, y=2), (4,))); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_dimension_without_axes_has_no_level() -> None:
    spec = parse_dtensor("[Shard(1), Partial(sum)]", SQUARE, (3, 4, 5))
    assert spec.dim_specs[0] is spec.dim_specs[2] is DimSpec()


@pytest.mark.parametrize(
    "text", ["S(0)S(1)", "RS(0)", "PS(0)", "_S(0, 2)R", "[Shard(0)[1], Shard(0)[0]]", "P(sum)R"]
)
def test_its_texts_are_recognised(text: str) -> None:
    reading = read_sharding(text, SQUARE, (4, 6))
    assert reading.notation.name == "dtensor"
    assert reading.sharding is parse_dtensor(text, SQUARE, (4, 6))


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


def test_the_text_of_a_ragged_shard_may_have_a_mesh() -> None:
    text = "DeviceMesh('cpu', [3, 1]), RaggedShard((0,), (1, 3))"
    layout = parse_ragged(text, shape=(4, 2))
    assert (layout.local_shape(3), layout.local_shape(1)) == ((1, 2), (3, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("DeviceMesh((2, 2)", "cannot read the mesh"),
        ("mesh: DeviceMesh((2, 2), 'cpu'), R", "cannot read the mesh"),
        ("DeviceMesh('cpu'), R", "a mesh without sizes and ranks"),
        ("DeviceMesh((x, 2), 'cpu'), R", r"cannot read the sizes of a mesh \(x, 2\)"),
        ("DeviceMesh('cpu', [[0, 1], [2]]), R", r"cannot read the ranks \[\[0, 1\], \[2\]\]"),
        (f"DeviceMesh('cpu', {'[' * 9000}{']' * 9000}), R", "cannot read the ranks"),
        (f"DeviceMesh('cpu', [{'9' * 30}]), R", "cannot read the ranks"),
        ("DeviceMesh((dp=2), 'cpu', stride=(4,)), R", "is a part of another, whose ranks"),
        ("DeviceMesh((x=4), 'cpu', stride=((4, 1),)), R", "is a part of another, whose ranks"),
    ],
)
def test_unreadable_meshes_are_refused(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_dtensor(text, None, (4,))


def test_invalid_meshes_are_refused() -> None:
    for mesh in ("'cpu', [0, 0]", "(0,), 'cpu'", "'cpu', [0, 1], mesh_dim_names=('a', 'b')"):
        with pytest.raises(MeshError):
            parse_dtensor(f"DeviceMesh({mesh}), R", None, (4,))


@given(st.text(alphabet="()[]0123,= 'dpstride", max_size=24))
def test_any_mesh_text_is_read_or_refused(text: str) -> None:
    for whole in (f"DeviceMesh({text}), R", f"DeviceMesh({text}, RR"):
        try:
            spec = parse_dtensor(whole, None, (4,))
        except LayoutError:
            continue
        assert spec.ndim == 1
