"""A tree of arrays in shardings of many kinds, and what is in them."""

from __future__ import annotations

from typing import Any

import numpy as np

import reshard.spmd as sp
from reshard import DeviceMesh, spec

MESH = DeviceMesh.of(x=2, y=2)
HALF = DeviceMesh.of(z=2, devices=(2, 3))
TURNED = DeviceMesh.of(t=4, devices=(3, 1, 0, 2))

# Name, shape, element type, and sharding.
KINDS: list[tuple[str, tuple[int, ...], str, Any]] = [
    ("weights.up", (7, 5), "float32", spec(MESH, "x, y")),
    ("weights.down", (9,), "float64", spec(MESH, "x y")),
    ("layers.0", (8, 6), "float32", spec(MESH, "x@cyclic1, -")),
    ("layers.1", (12, 2), "float32", spec(MESH, "x@zigzag, y")),
    ("layers.2", (3000, 2), "float32", spec(MESH, "x y@cyclic1, -")),
    ("whole", (6, 6), "bfloat16", spec(MESH, "-, -")),
    ("everywhere", (5,), "int32", None),
    ("half", (4, 4), "float16", spec(HALF, "z, -")),
    ("halo", (8, 3), "float32", spec(MESH, "x@halo[1,1], -")),
    ("empty", (0, 3), "float32", spec(MESH, "x, -")),
    ("scalar", (), "float64", None),
    ("sizes", (10, 3), "float32", spec(TURNED, "t@sizes[1,4,0,5], -")),
    ("truth", (4,), "bool", spec(MESH, "y")),
]


def elements_of(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    seed = sum(map(ord, name))
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * 10)


def make_tree() -> dict[str, Any]:
    """The arrays, a pending sum, and a place without any."""
    made = {
        name: sp.astype(sp.array(elements_of(name, shape), cut), dtype)
        for name, shape, dtype, cut in KINDS
    }
    left, right = elements_of("left", (3, 4)), elements_of("right", (4, 2))
    product = sp.array(left, spec(MESH, "-, x")) @ sp.array(right, spec(MESH, "x, -"))
    assert "sum(x)" in str(product.spec)
    return {
        "weights": {"up": made.pop("weights.up"), "down": made.pop("weights.down")},
        "layers": [made.pop(f"layers.{number}") for number in range(3)],
        **made,
        "pending": product,
        "nothing": None,
    }


def expect_elements(found: dict[str, Any]) -> None:
    """Fail where a tree has other elements than `make_tree` gave it."""
    for name, shape, dtype, _ in KINDS:
        one = found
        for key in name.split("."):
            one = one[int(key)] if key.isdigit() else one[key]
        expected = sp.astype(sp.array(elements_of(name, shape)), dtype).to_dense()
        assert one.dtype.name == dtype
        assert np.asarray(one.to_dense() == expected).all(), name
    product = elements_of("left", (3, 4)) @ elements_of("right", (4, 2))
    np.testing.assert_allclose(np.asarray(found["pending"].to_dense()), product, 1e-12)
    assert found["nothing"] is None
