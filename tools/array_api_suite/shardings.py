"""The sharding that an array of the suite gets.

Hypothesis runs an example again to make it smaller, so the choice depends on the array alone.
"""

from __future__ import annotations

import zlib
from random import Random
from typing import Any

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, spec

# Its ranks are in another order than its places.
MESH = DeviceMesh("permuted", (2, 3), ("x", "y"), (3, 1, 5, 0, 4, 2))
# Two devices have the larger half of a dimension, or all of it, or every second row.
CUTS = (
    "x",
    "y",
    "x y",
    "y x",
    "x / y",
    "y / x",
    "x@cyclic1",
    "y@cyclic1",
    "x@balanced",
    "y@cyclic2",
)
AXES = {cut: set(cut) & {"x", "y"} for cut in ("-", *CUTS)}


def sharded(made: Any) -> Any:
    """The array in a sharding that its elements choose, contributions among them."""
    elements = np.asarray(made.to_dense())
    described = f"{elements.dtype}{elements.shape}".encode() + elements.tobytes()
    random = Random(zlib.crc32(described))
    if random.random() < 0.1:
        return made
    free, dims = {"x", "y"}, ["-"] * elements.ndim
    for dim in random.sample(range(elements.ndim), elements.ndim):
        dims[dim] = random.choice([cut for cut, axes in AXES.items() if axes <= free])
        free -= AXES[dims[dim]]
    cut = ", ".join(dims)
    pending = random.choice(sorted(free)) if free and random.random() < 0.5 else None
    # A sum that waits has no negative zero, and truth values are not added.
    if pending is None or elements.dtype == bool or _has_negative_zeros(elements):
        return made.shard(spec(MESH, cut))
    return _contributions(made, elements, cut, pending, random)


def _has_negative_zeros(elements: np.ndarray) -> bool:
    parts = [elements.real, elements.imag] if elements.dtype.kind == "c" else [elements]
    return any(
        bool(np.any((part == 0) & np.signbit(part))) for part in parts if part.dtype.kind == "f"
    )


def _contributions(made: Any, elements: np.ndarray, cut: str, axis: str, random: Random) -> Any:
    """Each element is one device's contribution, and zero is the others'."""
    size = MESH.axis_size(axis)
    owner = np.random.default_rng(random.getrandbits(32)).integers(size, size=elements.shape)
    parts = [
        sp.array(np.where(owner == part, elements, elements.dtype.type(0)), runner=made.runner)
        .shard(spec(MESH, cut))
        .shards
        for part in range(size)
    ]
    shards = {
        rank: parts[place[MESH.axis_names.index(axis)]][rank]
        for place, rank in zip(np.ndindex(*MESH.shape), MESH.devices, strict=True)
    }
    target = spec(MESH, f"{cut} | sum({axis})")
    return sp.from_shards(shards, elements.shape, target, runner=made.runner)
