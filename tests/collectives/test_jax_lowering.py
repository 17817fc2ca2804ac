"""Programs as functions of JAX, run on 8 virtual devices against `jax.device_put`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.collectives import Program, find_program
from reshard.collectives.lowering import jax_module
from reshard.errors import NotationError
from reshard.mesh import Axis, DeviceMesh

CUBE = DeviceMesh.of(x=2, y=2, z=2)
GRID = DeviceMesh.of(x=2, y=4)
TURNED = DeviceMesh.of(x=2, y=4, devices=[3, 1, 2, 0, 7, 6, 5, 4])

BY_HAND = [
    (GRID, "x, -", "x y, -", "joint"),
    (GRID, "-, -", "y, x", "joint"),
    (GRID, "y x, -", "-, -", "joint"),
    (GRID, "x y, -", "-, x y", "joint"),
    (GRID, "x, y", "y, x", "joint"),
    (GRID, "x, y", "y, x", "classical"),
    (GRID, "x, y", "y, x", "mlir"),
    (TURNED, "x, y", "y, x", "joint"),
    (TURNED, "x y, -", "y x, -", "joint"),
    (TURNED, "y, -", "x, -", "classical"),
    (CUBE, "x y, z", "z, y x", "joint"),
    (CUBE, "x y, z", "z x, y", "classical"),
    (CUBE, "x y z", "z y x", "joint"),
    (CUBE, "x, -, y", "-, x y, z", "joint"),
    (CUBE, "x / y, z", "z, x / y", "joint"),
    (GRID, "x, - | sum(y)", "x, y", "joint"),
    (GRID, "x, - | sum(y)", "x y, -", "joint"),
    (GRID, "-, - | sum(y x)", "-, -", "joint"),
    (GRID, "x, - | max(y)", "x, -", "joint"),
    (GRID, "x, - | min(y)", "x, -", "joint"),
    (GRID, "x, - | mean(y)", "x, -", "joint"),
    (GRID, "x, -", "x, -", "joint"),
]


def side(spec: reshard.ShardingSpec) -> dict[str, Any]:
    """A sharding over a mesh of its sub-axes, in plain words, contributions in front."""
    mesh, dims = spec.mesh, [dim.axes for dim in spec.dim_specs]
    if spec.partial_axes:
        dims = [spec.partial_axes, *dims]
    used = [axis for axes in dims for axis in axes]
    parts = [*used, *mesh.remaining_axes(used)]
    parts.sort(key=lambda axis: (mesh.axis_names.index(axis.name), axis.pre))
    return {
        "devices": list(mesh.devices),
        "sizes": [mesh.axis_size(axis) for axis in parts],
        "names": [str(axis) for axis in parts],
        "entries": [[str(axis) for axis in axes] for axes in dims],
    }


def case_of(program: Program) -> dict[str, Any]:
    source = program.source
    return {
        "module": jax_module(program),
        "shape": program.shape,
        "source": side(source),
        "target": side(program.target),
        "contributions": source.layout(program.shape).contributions,
        "reduction": source.reduction or "sum",
    }


def random_program(rng: random.Random) -> Program:
    """Two shardings over 8 devices, also by sub-axes, of a tensor that they cut evenly."""
    mesh = rng.choice([DeviceMesh.of(x=8), GRID, DeviceMesh.of(x=4, y=2), CUBE, TURNED])
    sides = []
    for _ in range(2):
        dims: list[list[str | Axis]] = [[], [], []]
        parts: list[Axis] = []
        for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
            halves = [Axis(name, low, 2) for low in (1, 2, 4) if low < size]
            parts += halves if rng.random() < 0.4 else [Axis(name)]
        rng.shuffle(parts)
        for part in parts:
            place = rng.randrange(4)
            if place < 3:
                dims[place].append(part)
        sides.append(reshard.ShardingSpec(mesh, dims))
    return find_program(*sides, (8, 16, 8), steps=rng.choice(["joint", "joint", "classical"]))


def by_hand(mesh: DeviceMesh, source: str, target: str, steps: str) -> Program:
    sides = reshard.spec(mesh, source), reshard.spec(mesh, target)
    return find_program(*sides, (16, 8, 8)[: sides[0].ndim], steps=steps)


def test_functions_do_what_device_put_does() -> None:
    pytest.importorskip("jax")
    programs = [by_hand(*case) for case in BY_HAND]
    rng = random.Random(7)
    cases = [case_of(program) for program in programs]
    while len(cases) < 44:
        program = random_program(rng)
        try:
            cases.append(case_of(program))
        except NotationError as error:
            refusal = str(error)
        else:
            refusal = None
            programs.append(program)
        assert refusal is None or "do not divide" in refusal or "different shapes" in refusal
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("jax_function_process.py")],
        input=json.dumps(cases),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    answers = [(p.source, p.target, answer) for p, answer in zip(programs, told, strict=True)]
    assert [answer for answer in answers if answer[2] != "same"] == []
    kinds = Counter(step.name for program in programs for step in program.steps)
    assert kinds.keys() == {
        *("slice", "all-gather", "all-to-all", "joint all-to-all"),
        *("permute", "reduce-scatter", "all-reduce"),
    }


@pytest.mark.parametrize(
    ("mesh", "source", "target", "steps", "said"),
    [
        (GRID, "x@stride2, -", "x@stride2, -", "joint", "the source cannot be said"),
        (DeviceMesh.of(x=3), "x, -", "-, x", "joint", "the source .* `x, -` has other shards"),
        (DeviceMesh.of(x=2, y=3), "x, -", "-, y", "joint", r"step 1, .* has other shards"),
        (GRID, "x, - | product(y)", "x, -", "joint", r"step 1, all-reduce\(y\), .* the product"),
        (
            GRID,
            "x, - | max(y)",
            "x y, -",
            "joint",
            "no collective for the reduce-scatter of the max",
        ),
    ],
)
def test_what_jax_cannot_say_names_the_step(
    mesh: DeviceMesh, source: str, target: str, steps: str, said: str
) -> None:
    with pytest.raises(NotationError, match=said):
        jax_module(by_hand(mesh, source, target, steps))


def test_pieces_of_different_shapes_are_refused() -> None:
    # Halves of 6 against thirds: the middle third is half and half of both.
    mesh = DeviceMesh.of(x=2, y=3)
    sides = reshard.spec(mesh, "x, y"), reshard.spec(mesh, "y, x")
    with pytest.raises(NotationError, match=r"step 1, joint all-to-all\(x y\), .* --steps class"):
        jax_module(find_program(*sides, (6, 6)))


def test_one_function_has_one_mesh() -> None:
    sides = reshard.spec(GRID, "x, y"), reshard.spec(TURNED, "x, y")
    with pytest.raises(NotationError, match=r"step 1, permute, .* a shard_map has one mesh"):
        jax_module(find_program(*sides, (8, 8)))


def test_parts_of_an_axis_become_axes() -> None:
    mesh = DeviceMesh.of(x=4, x_2_4=2)
    sides = reshard.spec(mesh, "x:(1)2, x:(2)2"), reshard.spec(mesh, "x:(1)2, -")
    text = jax_module(find_program(*sides, (8, 8)))
    assert "axis_names = ('x_1_2', 'x_2_4_', 'x_2_4')" in text
    assert "grid.reshape((2, 2, 2))" in text
    assert "lax.all_gather(x, ('x_2_4_',), axis=1, tiled=True)" in text
