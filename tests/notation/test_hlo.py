"""HLO's notation: texts, and JAX's own over eight devices in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import reshard
from reshard.errors import NotationError
from reshard.mesh import DeviceMesh
from reshard.notation.hlo import hlo_text, parse_hlo

MESH = DeviceMesh.of(x=4, y=2)


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("{devices=[4,2]<=[8]}", "x, y"),
        ("{devices=[2,4]<=[4,2]T(1,0)}", "y, x"),
        ("{devices=[8]<=[4,2]T(1,0)}", "y x"),
        ("{devices=[1,8]<=[8]}", "-, x y"),
        ("{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}", "y, -"),
        ("{devices=[2,4]<=[8]}", "x:(1)2, x:(2)2 y"),
        ("{devices=[2,2,2]<=[8] last_tile_dim_replicate}", "x:(1)2, x:(2)2"),
        ("{devices=[4,2]<=[8] last_tile_dims={unreduced}}", "x | sum(y)"),
        (
            "{devices=[2,2,2]<=[2,2,2]T(2,1,0) last_tile_dims={unreduced, replicated}}",
            "y | sum(x:(2)2)",
        ),
    ],
)
def test_a_text_is_read_and_written(text: str, native: str) -> None:
    spec = reshard.spec(MESH, native)
    assert parse_hlo(text, MESH, (8,) * spec.ndim) is spec
    assert hlo_text(spec) == text


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("{devices=[4,2]0,1,2,3,4,5,6,7}", "x, y"),
        ("{devices=[2,4]0, 2, 4, 6, 1, 3, 5, 7}", "y, x"),
        (" sharding={devices=[4,2]<=[8]}", "x, y"),
        ("jax.GSPMDSharding({devices=[4,2]<=[8]}, memory_kind=device)", "x, y"),
        ('{devices=[4,2]<=[8] metadata={op_name="a"}}', "x, y"),
        ("{devices=[4,1,1,2]<=[8] last_tile_dims={unreduced, replicated}}", "x, -"),
        ("{replicated}", "-, -"),
    ],
)
def test_other_spellings_are_read(text: str, native: str) -> None:
    assert parse_hlo(text, MESH, (8, 8)) is reshard.spec(MESH, native)


def test_a_mesh_is_made_of_the_dimensions() -> None:
    spec = parse_hlo("{devices=[2,2]3,1,2,0}")
    assert [spec.layout((4, 4)).boxes(rank)[0].start for rank in (3, 1, 2, 0)] == [
        *((0, 0), (0, 2), (2, 0), (2, 2))
    ]
    spec = parse_hlo("{devices=[1,2,3,2]<=[12] last_tile_dims={unreduced, replicated}}")
    assert str(spec) == "-, d1 | sum(sum)" and spec.mesh.text == "d1=2,sum=3,copies=2"


def test_a_device_alone_is_that_of_the_mesh() -> None:
    mesh = DeviceMesh.of(x=2, devices=[7, 5])
    assert parse_hlo("{maximal device=1}", mesh, (3,)).mesh.devices == (5,)
    assert parse_hlo("{maximal device=1}", None, (3,)).mesh.devices == (1,)


def test_numbers_are_places_in_the_mesh() -> None:
    mesh = DeviceMesh.of(x=2, y=2, devices=[3, 1, 2, 0])
    spec = parse_hlo("{devices=[2,2]<=[2,2]T(1,0)}", mesh)
    assert str(spec) == "y, x" and spec.layout((2, 2)).boxes(1)[0].start == (1, 0)
    assert hlo_text(spec) == "{devices=[2,2]<=[2,2]T(1,0)}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{replicated}", "give a mesh"),
        ("{{replicated}, {replicated}}", "shardings of a tuple"),
        ("{manual}", "`manual` does not define the shards"),
        ("{devices=[2,2]<=[5]}", r"5 devices for tiles \[2, 2\]; give 4"),
        ("{devices=[0]<=[0]}", r"tiles \[0\]; give positive numbers"),
        ("{devices=[99999999999,99999]<=[2]}", "give positive numbers of parts"),
        ("{devices=[4]<=[2,2]T(0,0)}", r"T\(0, 0\) of 2 dimensions; name each once"),
        ("{devices=[2]<=[0]}", "give positive lengths"),
        ("{devices=[2]0,0}", "give each device once"),
        ("{devices=[2]<=[2] last_tile_dims={manual}}", "kind 'manual'"),
        ("{devices=[2]<=[2] last_tile_dims={replicated, unreduced}}", "give at most these"),
        ("{devices=[2]<=[2] last_tile}", "cannot read 'last_tile}'"),
        ("{devices=[2", "expected"),
    ],
)
def test_unreadable_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse_hlo(text, None, None)


def test_tiles_that_do_not_fit_the_mesh_or_the_tensor() -> None:
    with pytest.raises(NotationError, match="give the mesh of these devices, or none"):
        parse_hlo("{devices=[4]<=[4]}", MESH)
    with pytest.raises(NotationError, match="no axes of the mesh x=4,y=2 make these tiles"):
        parse_hlo("{devices=[4,2]0,1,2,3,4,5,7,6}", MESH)
    with pytest.raises(NotationError, match=r"2 dimensions for a tensor of shape \[8\]"):
        parse_hlo("{devices=[4,2]<=[8]}", MESH, (8,))
    with pytest.raises(NotationError, match="HLO cannot express `x@balanced`"):
        hlo_text(reshard.spec(MESH, "x@balanced, -"))


JAX = """
import json, random, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax._src.sharding_impls import GSPMDSharding
from reshard.notation import hlo_text, parse_hlo, sharding_of

rng, shape, found = random.Random(0), (8, 8), []
for case in range(60):
    sizes = rng.choice([(2, 4), (2, 2, 2), (4, 2), (8,), (2, 1, 4)])
    devices = np.array(rng.sample(jax.devices(), 8))
    mesh = Mesh(devices.reshape(sizes), tuple("abc"[: len(sizes)]))
    entries = [[], [], []]
    for name in rng.sample(mesh.axis_names, len(sizes)):
        rng.choice(entries).append(name)
    named = NamedSharding(mesh, PartitionSpec(*(tuple(entry) for entry in entries[:2])))
    hlo = named._to_xla_hlo_sharding(2)
    spec = sharding_of(named, shape=shape)
    order = rng.sample(jax.devices(), 8)
    tiled = GSPMDSharding(order, hlo)
    layout = sharding_of(tiled, shape=shape).layout(shape)
    boxes = {d.id: [list(i.indices(8)[:2]) for i in box]
             for d, box in tiled.devices_indices_map(shape).items()}
    ours = {rank: [list(b) for b in zip(box.start, box.stop)]
            for rank in boxes for box in layout.boxes(rank)}
    same = parse_hlo(str(hlo), spec.mesh, shape).layout(shape) is spec.layout(shape)
    found.append([str(hlo), hlo_text(spec), same, boxes == ours])
print(json.dumps(found))
"""


def test_texts_and_objects_of_jax() -> None:
    """Random meshes with devices in any order: XLA's texts, and JAX's indices of each device."""
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", JAX],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 60
    for theirs, ours, is_same_layout, are_same_boxes in found:
        assert ours == theirs and is_same_layout and are_same_boxes, theirs
