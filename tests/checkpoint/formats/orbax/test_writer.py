"""New Orbax checkpoints, read back by ourselves and by TensorStore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import beside, tensor, write_file
from checkpoint.formats.orbax.orbax_states import VALUES, arrays, as_read
from reshard import checkpoint
from reshard.errors import UsageError

tensorstore = pytest.importorskip("tensorstore")

# Cuts of the recorded state: regular ones, uneven ones, and a stride.
CUTS: dict[str, tuple[str, list[str]]] = {
    "regular": ("a=2,b=2", ["*.w=a, b", "*.b=a b", "*=..."]),
    "uneven": ("a=3,b=2", ["*.w=a, b", "*.host=b, a", "*.b=a b", "*=..."]),
    "interleaved": ("a=2", ["*.w=a@stride2, -", "*=..."]),
    "replicated": ("a=4", ["*=..."]),
}


def open_by_tensorstore(folder: Path, name: str) -> np.ndarray[Any, Any]:
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": name}
    opened = tensorstore.open({"driver": "zarr", "kvstore": store}).result()
    found: np.ndarray[Any, Any] = opened.read().result()
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_a_written_checkpoint_is_read_by_reshard_and_by_tensorstore(
    saved: Path, tmp_path: Path, cut: str
) -> None:
    to, rules = CUTS[cut]
    target = tmp_path / "target"
    report = checkpoint.convert(saved / "ocdbt", target, to=to, rules=rules, format="orbax")
    found = checkpoint.open(target)
    assert dict(found.values) == VALUES
    assert dict(found.paths) == dict(checkpoint.open(saved / "ocdbt").paths)
    assert found.mesh is not None
    assert found.mesh.text == to
    for name, array in arrays().items():
        expected = as_read(array)
        assert checkpoint.read_tensor(found, name).tobytes() == expected.tobytes(), name
        theirs = open_by_tensorstore(target, name)
        assert theirs.dtype == array.dtype
        assert theirs.astype(array.dtype).tobytes() == array.tobytes(), name
    assert not checkpoint.check_digests(found).damaged
    assert not checkpoint.compare(saved / "ocdbt", target).differences
    assert report.files == len({one.rank for one in found.files})


def test_chunks_are_those_of_the_target(saved: Path, tmp_path: Path) -> None:
    to, rules = CUTS["regular"]
    checkpoint.convert(saved / "ocdbt", tmp_path / "t", to=to, rules=rules, format="orbax")
    found = checkpoint.open(tmp_path / "t")["params.layers.0.w"]
    assert found.spec == "a, b"
    assert found.layout.local_shape(3) == (8, 16)
    store = {"driver": "ocdbt", "base": f"file://{tmp_path / 't'}/", "path": "params.layers.0.w"}
    opened = tensorstore.open({"driver": "zarr", "kvstore": store}).result()
    assert opened.chunk_layout.write_chunk.shape == (8, 16)


def test_whole_tensors_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    wholes = {"model.w": tensor("float32", (6, 4), 1), "model.b": tensor("bfloat16", (6,), 2)}
    write_file(tmp_path / "s" / "model.safetensors", wholes)
    checkpoint.convert(tmp_path / "s", tmp_path / "t", to="full", format="orbax")
    tree = json.loads((tmp_path / "t" / "_METADATA").read_text())["tree_metadata"]
    assert {*tree} == {"('model.b',)", "('model.w',)"}
    assert checkpoint.compare(tmp_path / "s", tmp_path / "t").is_same


def test_types_that_jax_lacks_by_default_are_arrays_of_numpy(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    kinds = {"int32": "jax.Array", "bfloat16": "jax.Array", "int64": "np.ndarray"}
    wholes = {name: tensor(name, (6, 4), 1) for name in kinds}
    write_file(tmp_path / "s" / "model.safetensors", wholes)
    checkpoint.convert(tmp_path / "s", tmp_path / "t", to="a=2", rules=["*=a, -"], format="orbax")
    tree = json.loads((tmp_path / "t" / "_METADATA").read_text())["tree_metadata"]
    found = {name: tree[f"('{name}',)"]["value_metadata"]["value_type"] for name in kinds}
    assert found == kinds


def test_equal_conversions_make_equal_files(saved: Path, tmp_path: Path) -> None:
    to, rules = CUTS["uneven"]
    contents = []
    for name in ("one", "two"):
        checkpoint.convert(saved / "ocdbt", tmp_path / name, to=to, rules=rules, format="orbax")
        contents.append(
            {
                path.relative_to(tmp_path / name): path.read_bytes()
                for path in (tmp_path / name).rglob("*")
                if path.is_file()
            }
        )
    assert contents[0] == contents[1]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_tensors_without_elements_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_file(tmp_path / "model.safetensors", {"e": tensor("float32", shape, 1)})
    with pytest.raises(UsageError, match=r"'e'.*no elements"):
        checkpoint.convert(tmp_path, beside(tmp_path, "t"), to="full", format="orbax")


def test_random_keys_stay_such(saved: Path, tmp_path: Path) -> None:
    checkpoint.convert(saved / "composite", tmp_path / "t", to="full", format="orbax")
    found = checkpoint.open(tmp_path / "t")
    assert found.attributes == {"random_keys": {"key": "threefry2x32"}}
