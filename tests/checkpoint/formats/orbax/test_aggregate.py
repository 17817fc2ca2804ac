"""The one file of older saves, written by hand as MessagePack says."""

from __future__ import annotations

import contextlib
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import beside
from checkpoint.formats.orbax.orbax_states import arrays
from reshard import checkpoint
from reshard.checkpoint.formats.orbax.aggregate import read_aggregate
from reshard.errors import CheckpointError, FormatError, ReshardError


def pack(value: Any) -> bytes:
    """MessagePack of a value, arrays as Flax has them."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value) if not 0 <= value < 128 else bytes([value])
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        content = value.encode()
        return struct.pack(">BH", 0xDA, len(content)) + content
    if isinstance(value, bytes):
        return struct.pack(">BI", 0xC6, len(value)) + value
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, dict):
        entries = b"".join(pack(key) + pack(one) for key, one in value.items())
        return struct.pack(">BH", 0xDE, len(value)) + entries
    inner = pack([list(value.shape), value.dtype.name, value.tobytes()])
    return struct.pack(">BIb", 0xC9, len(inner), 1) + inner


W = np.arange(12, dtype=np.float32).reshape(3, 4)
TREE = {"params": {"w": W, "i": np.int32(7).reshape(())}, "step": 300, "lr": 0.5, "names": ["a"]}
TREE |= {"none": None, "flag": True, "empty": {}}


def test_a_tree_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(pack(TREE))
    found = checkpoint.open(tmp_path)
    assert found.format == "orbax"
    assert {*found} == {"params.w", "params.i"}
    assert np.array_equal(checkpoint.read_tensor(found, "params.w"), W)
    assert checkpoint.read_tensor(found, "params.i") == 7
    assert dict(found.values) == {
        "step": 300,
        "lr": 0.5,
        "names": ["a"],
        "none": None,
        "flag": True,
        "empty": {},
    }
    checkpoint.convert(tmp_path, beside(tmp_path, "t"), to="full", format="orbax")
    assert checkpoint.compare(tmp_path, beside(tmp_path, "t")).is_same


@pytest.mark.parametrize("variant", ["ocdbt", "zarr"])
def test_arrays_beside_it(saved: Path, tmp_path: Path, variant: str) -> None:
    """As versions before `_METADATA` saved: placeholders for what is in Zarr."""
    folder = shutil.copytree(saved / variant, tmp_path / "old")
    (folder / "_METADATA").unlink()
    name = "params.layers.0.w"
    tree = {"params": {"layers": {"0": {"w": f"PLACEHOLDER://{name}"}}}, "step": 9}
    (folder / "checkpoint").write_bytes(pack(tree))
    found = checkpoint.open(folder)
    assert {*found} == {name}
    assert np.array_equal(checkpoint.read_tensor(found, name), arrays()[name])
    assert dict(found.values) == {"step": 9}


def test_every_place_where_it_is_cut_off(tmp_path: Path) -> None:
    content = pack(TREE)
    path = tmp_path / "checkpoint"
    for size in range(1, len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(FormatError):
            read_aggregate(path)


def test_flipped_bytes_are_errors_of_ours_or_values(tmp_path: Path) -> None:
    content = pack(TREE)
    path = tmp_path / "checkpoint"
    for at in range(len(content)):
        for other in (0, 0xFF, content[at] ^ 1, content[at] ^ 0x80):
            path.write_bytes(content[:at] + bytes([other]) + content[at + 1 :])
            with contextlib.suppress(ReshardError):
                read_aggregate(path)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"w": {"__msgpack_chunked_array__": True, "shape": {"0": 4}}}, "in pieces"),
        ({"w": np.zeros(2, dtype="U3")}, "not known here"),
    ],
)
def test_what_is_not_known(tmp_path: Path, tree: Any, says: str) -> None:
    (tmp_path / "checkpoint").write_bytes(pack(tree))
    opened = checkpoint.open(tmp_path)
    assert not opened.tensors
    with pytest.raises(CheckpointError, match=says):
        _ = opened["w"]


def test_what_goes_deep(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"\x81\xa1a" * 1000 + b"\xc0")
    with pytest.raises(FormatError, match="levels deep"):
        checkpoint.open(tmp_path)
