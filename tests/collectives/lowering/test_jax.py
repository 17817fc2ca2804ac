"""Programs as functions of JAX, run on 8 virtual devices against `jax.device_put`."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.collectives import Program, find_program
from reshard.collectives.lowering import jax_module
from reshard.errors import NotationError, PlanError
from reshard.mesh import Axis, DeviceMesh
from selection import choose

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


UNEVEN = [
    (GRID, "y", "-", "joint", (10,)),
    (GRID, "-", "y", "joint", (10,)),
    (GRID, "-, y", "y, -", "joint", (10, 6)),
    (DeviceMesh.of(x=2, y=3), "x, y", "y, x", "joint", (6, 6)),
    (DeviceMesh.of(x=2, y=3), "x, y", "y, x", "joint", (7, 5)),
    (DeviceMesh.of(x=2, y=3), "x, y", "y, x", "mlir", (7, 5)),
    (GRID, "x y, -", "-, y x", "joint", (17, 5)),
    (GRID, "x, - | sum(y)", "x, y", "joint", (5, 7)),
    (GRID, "x, - | max(y)", "x, y", "joint", (5, 7)),
    (GRID, "x, - | product(y)", "x, y", "joint", (5, 7)),
    (GRID, "x, - | product(y)", "x, -", "joint", (5, 7)),
    (GRID, "x, - | mean(y)", "x, y", "joint", (5, 7)),
    (GRID, "- | sum(x y)", "- | sum(y)", "joint", (7,)),
    (CUBE, "-, x z", "x z, -", "joint", (4, 10)),
    (CUBE, "x y z", "z y x", "joint", (1,)),
]


def side(spec: reshard.ShardingSpec, shape: tuple[int, ...]) -> dict[str, Any]:
    """A sharding over a mesh of its sub-axes, in plain words, contributions in front."""
    mesh, dims = spec.mesh, [dim.axes for dim in spec.dim_specs]
    parts = [math.prod(map(mesh.axis_size, axes)) for axes in dims]
    if spec.partial_axes:
        dims = [spec.partial_axes, *dims]
    used = [axis for axes in dims for axis in axes]
    whole = [*used, *mesh.remaining_axes(used)]
    whole.sort(key=lambda axis: (mesh.axis_names.index(axis.name), axis.pre))
    return {
        "devices": list(mesh.devices),
        "sizes": [mesh.axis_size(axis) for axis in whole],
        "names": [str(axis) for axis in whole],
        "entries": [[str(axis) for axis in axes] for axes in dims],
        "is_partial": bool(spec.partial_axes),
        # As many elements as there are parts of the longest one.
        "padded": [-(-size // count) * count for size, count in zip(shape, parts, strict=True)],
    }


def case_of(program: Program, dtype: str = "float32") -> dict[str, Any]:
    source, target = program.source, program.target
    return {
        "module": jax_module(program),
        "dtype": dtype,
        "shape": program.shape,
        "source": side(source, program.shape),
        "target": side(target, program.shape),
        # One after another the partial axes, and which of them are reduced.
        "contributions": [source.mesh.axis_size(axis) for axis in source.partial_axes],
        "reduced": [axis not in target.partial_axes for axis in source.partial_axes],
        "reduction": {"product": "prod"}.get(source.reduction or "sum", source.reduction or "sum"),
    }


def random_program(rng: random.Random) -> Program:
    """Two shardings over 8 devices, also by sub-axes, of a tensor that they may not cut evenly."""
    mesh = rng.choice([DeviceMesh.of(x=8), GRID, DeviceMesh.of(x=4, y=2), CUBE, TURNED])
    sides = []
    partial = [Axis(name) for name in mesh.axis_names if rng.random() < 0.2]
    reduction = rng.choice(["sum", "max", "min", "product", "mean"])
    for pending in (partial, [axis for axis in partial if rng.random() < 0.3]):
        dims: list[list[str | Axis]] = [[], [], []]
        parts: list[Axis] = []
        for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
            halves = [Axis(name, low, 2) for low in (1, 2, 4) if low < size]
            parts += halves if rng.random() < 0.4 else [Axis(name)]
        rng.shuffle(parts)
        for part in parts:
            place = rng.randrange(4)
            if place < 3 and Axis(part.name) not in pending:
                dims[place].append(part)
        sides.append(reshard.ShardingSpec(mesh, dims, (), pending, reduction))
    shape = rng.choice([(8, 16, 8), (8, 16, 8), (5, 6, 3), (10, 7, 4)])
    return find_program(*sides, shape, steps=rng.choice(["joint", "joint", "classical"]))


def by_hand(
    mesh: DeviceMesh,
    source: str,
    target: str,
    steps: str = "joint",
    shape: tuple[int, ...] = (16, 8, 8),
) -> Program:
    sides = reshard.spec(mesh, source), reshard.spec(mesh, target)
    return find_program(*sides, shape[: sides[0].ndim], steps=steps)


def answers(cases: list[dict[str, Any]]) -> list[str]:
    """What a process with 8 devices says of each case."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("jax_function_process.py")],
        input=json.dumps(cases),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
            "--xla_backend_optimization_level=0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told: list[str] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(
    "count",
    [
        16,
        pytest.param(70, marks=pytest.mark.exhaustive(reason="JAX compiles each function; random")),
    ],
)
def test_functions_equal_device_put(count: int) -> None:
    pytest.importorskip("jax")
    programs = [by_hand(*case) for case in choose(BY_HAND[1::2], BY_HAND)]
    programs += [by_hand(*case) for case in choose(UNEVEN[1::2], UNEVEN)]
    cases = [case_of(program) for program in programs]
    cases[0] = case_of(programs[0], "int8")
    rng = random.Random(7)
    while len(cases) < count:
        try:
            program = random_program(rng)
            cases.append(case_of(program))
        except PlanError:
            continue
        except NotationError as error:
            refusal = str(error)
        else:
            refusal = None
            programs.append(program)
        assert refusal is None or re.search("do not divide|exchange", refusal)
    told = answers(cases)
    found = [(p.shape, p.source, p.target, a) for p, a in zip(programs, told, strict=True)]
    assert [answer for answer in found if answer[-1] != "same"] == []
    kinds = Counter(step.name for program in programs for step in program.steps)
    assert kinds.keys() == {
        *("slice", "all-gather", "all-to-all", "joint all-to-all"),
        *("permute", "reduce-scatter", "all-reduce"),
    }


@pytest.mark.parametrize(
    ("mesh", "source", "target", "shape", "said"),
    [
        (GRID, "x@stride2, -", "x@stride2, -", (8, 8), "the source cannot be expressed"),
        (GRID, "x / y", "x", (10,), "the source .* `x / y` does not shard"),
        (
            GRID,
            "x",
            "x y",
            (10,),
            r"step 1, exchange, cannot be expressed in JAX: .* between any ranks",
        ),
        (GRID, "x", "-", (0,), "has no elements to move"),
    ],
)
def test_steps_without_a_jax_collective_raise(
    mesh: DeviceMesh, source: str, target: str, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(NotationError, match=said):
        jax_module(by_hand(mesh, source, target, "joint", shape))


def test_uneven_shards_are_padded_and_cut() -> None:
    """Ten over four devices are three each: two of twelve are padding."""
    text = jax_module(by_hand(GRID, "-, y", "y, -", shape=(10, 6)))
    assert "`reshard` takes an array\n# of shape (10, 8) and returns one of shape (12, 6)." in text
    assert re.findall(r"    x = (.*)", text) == [
        "jnp.pad(x, [(0, 2), (0, 0)])",
        "lax.all_to_all(x, ('y',), split_axis=0, concat_axis=1, tiled=True)",
        "lax.slice_in_dim(x, 0, 6, axis=1)",
    ]
    assert "padding" not in jax_module(by_hand(GRID, "-, y", "y, -"))


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
