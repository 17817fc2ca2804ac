"""A small mesh, and arrays of every element type on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import reshard
from reshard.dtypes import DType
from reshard.layout import Layout

MESH = reshard.DeviceMesh.of(x=2, y=3, devices=[7, 0, 2, 1, 5, 3])
Shards = dict[int, Any]


def plan_of(source: str, target: str, shape: tuple[int, ...]) -> reshard.Plan:
    return reshard.plan(*(reshard.spec(MESH, text).layout(shape) for text in (source, target)))


def random_bits(kind: DType, shape: tuple[int, ...], seed: int = 0) -> NDArray[Any]:
    """Elements of any bit pattern, as a NumPy array of bare storage."""
    size = (*shape, kind.itemsize_bytes)
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if kind.name == "bool":
        data &= 1
    return data.view(kind.storage).reshape(shape)


def to_torch(bits: NDArray[Any], kind: DType) -> torch.Tensor:
    carrier = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
    name = carrier[kind.itemsize_bytes]
    return torch.from_numpy(bits.view(name).copy()).view(getattr(torch, kind.name))


def torch_bits(tensor: torch.Tensor, kind: DType) -> NDArray[Any]:
    carrier = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
    plain = tensor.contiguous().view(getattr(torch, carrier[kind.itemsize_bytes]))
    return plain.numpy().view(kind.storage)


def cut(bits: NDArray[Any], layout: Layout) -> dict[int, NDArray[Any]]:
    found = {}
    for slot in layout.holders:
        (box,) = layout.boxes(slot)
        found[slot] = bits[tuple(slice(a, b) for a, b in zip(*box, strict=True))]
    return found


def array_of(values: list[float], kind: DType, module: str) -> Any:
    if module == "torch":
        return torch.tensor(values, dtype=torch.float64).to(getattr(torch, kind.name))
    return np.array(values).astype(kind.numpy)


def numbers(array: Any) -> list[float]:
    if isinstance(array, torch.Tensor):
        return array.to(torch.float64).tolist()
    return array.astype(np.float64).tolist()
