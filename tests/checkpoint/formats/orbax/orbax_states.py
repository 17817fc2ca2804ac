"""States that real Orbax saved (`tests/golden/engines/orbax.tar.xz`), as arrays and plain values.

They follow from a seed, so that the records have nothing but what Orbax wrote.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

RECORDS = Path(__file__).parents[3] / "golden" / "engines" / "orbax.tar.xz"
#: How the records were saved, by name.
VARIANTS: dict[str, dict[str, Any]] = {
    "ocdbt": {},
    "zarr": {"use_ocdbt": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "ocdbt-zarr3": {"use_zarr3": True},
    "uncompressed": {"use_compression": False},
    "uncompressed-zarr3": {"use_compression": False, "use_zarr3": True},
    "chunked": {"chunk_byte_size": 512},
    "chunked-zarr3": {"chunk_byte_size": 512, "use_zarr3": True},
}
#: Plain values beside the arrays, by name.
VALUES: dict[str, Any] = {
    "step": 7,
    "lr": 0.125,
    "flag": True,
    "title": "ä/b",
    "none": None,
    "nothing.dict": {},
    "nothing.list": [],
    "nothing.tuple": (),
    "groups": [{"lr": 0.5, "names": ["a", "b"]}, {"lr": 0.25}],
}
#: The axes of `x=4,y=2` that cut an array's dimensions.
CUTS: dict[str, tuple[Any, ...]] = {
    "params.layers.0.w": ("x", "y"),
    "params.layers.0.b": (("x", "y"),),
    "params.layers.1.w": (None, "x"),
    "params.fp8": ("x",),
}


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """The arrays by name."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(np.float32)

    return {
        "params.layers.0.w": normal(16, 32),
        "params.layers.0.b": normal(32).astype(ml_dtypes.bfloat16),
        "params.layers.1.w": normal(16, 32),
        "params.layers.1.b": normal(32).astype(ml_dtypes.bfloat16),
        "params.pair.0": np.arange(12, dtype=np.int32).reshape(3, 4),
        "params.pair.1": np.float32(2.5).reshape(()),
        "params.fp8": normal(16, 16).astype(ml_dtypes.float8_e4m3fn),
        "params.int4": np.arange(-8, 8).reshape(4, 4).astype(ml_dtypes.int4),
        "params.mask": np.arange(8) % 3 == 0,
        "params.host": random.standard_normal((5, 7)),
    }


def as_read(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array as reshard reads it: of int4 the bits, in the lower half of a byte."""
    if array.dtype == ml_dtypes.int4:
        return array.astype(np.int8).view(np.uint8) & 15
    return array


def extract(folder: Path) -> Path:
    """The recorded checkpoints in `folder`, one folder each."""
    with tarfile.open(RECORDS) as archive:
        archive.extractall(folder, filter="data")
    return folder
