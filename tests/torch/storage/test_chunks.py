"""Chunks are the boxes that supply a tensor, and any box of it is found in them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.errors import UsageError
from reshard.layout import Box

torch = pytest.importorskip("torch")

from reshard.dtypes import dtype  # noqa: E402
from reshard.torch.storage import chunks  # noqa: E402

WHOLE = {
    "w": tensor("float32", (12, 10), 1),
    "s": tensor("float64", (), 2),
    "e": tensor("int8", (0, 3), 3),
}


def stored(folder: Path, rule: str, to: str = "tp=3", **how: str) -> checkpoint.Checkpoint:
    write_file(folder / "model.safetensors", WHOLE)
    checkpoint.convert(
        folder / "model.safetensors", folder / "cut", to=to, rules=[f"w={rule}", "*=..."], **how
    )
    return checkpoint.open(folder / "cut")


@pytest.mark.parametrize(
    ("rule", "boxes"),
    [
        ("tp, -", 3),
        ("-, tp", 3),
        ("tp@stride2, -", 6),
        ("tp@windows[0:6,4:8,7:12], -", 3),
        ("tp@pad7, -", 2),
        ("...", 1),
    ],
)
@pytest.mark.parametrize("replicas", ["once", "every"])
def test_chunks_cover_a_tensor_once(tmp_path: Path, rule: str, boxes: int, replicas: str) -> None:
    found = stored(tmp_path, rule, replicas=replicas)
    described = chunks.describe_contents(found)["w"]
    count = np.zeros((12, 10), dtype=int)
    for chunk in described.chunks:
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        count[tuple(slice(a, a + n) for a, n in ends)] += 1
    assert (count == 1).all()
    assert len(described.chunks) == boxes
    assert described.size == torch.Size([12, 10])
    assert described.properties.dtype == torch.float32


def test_scalars_and_empty_tensors_have_one_chunk(tmp_path: Path) -> None:
    described = chunks.describe_contents(stored(tmp_path, "tp, -"))
    (scalar,) = described["s"].chunks
    (empty,) = described["e"].chunks
    assert scalar.offsets == scalar.sizes == torch.Size([])
    assert (empty.offsets, empty.sizes) == (torch.Size([0, 0]), torch.Size([0, 3]))


def test_too_many_boxes_are_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stored(tmp_path, "tp@stride2, -")
    monkeypatch.setattr(chunks, "MOST_CHUNKS", 5)
    (chunk,) = chunks.describe_contents(found)["w"].chunks
    assert chunk.sizes == torch.Size([12, 10])


@pytest.mark.parametrize("rule", ["tp, -", "tp@stride2, -", "-, tp@stride5"])
def test_parts_make_up_any_box(tmp_path: Path, rule: str) -> None:
    found = stored(tmp_path, rule, "tp=2")["w"]
    generator = np.random.default_rng(0)
    for _ in range(20):
        low = [int(generator.integers(0, n)) for n in (12, 10)]
        high = [int(generator.integers(a, n + 1)) for a, n in zip(low, (12, 10), strict=True)]
        box = Box(tuple(low), tuple(high))
        count = np.zeros(box.shape, dtype=int)
        for part in chunks.list_parts(found, box):
            count[part.inside] += 1
        assert (count == 1).all()


def test_a_lazy_dict_makes_what_is_asked_for() -> None:
    made: list[str] = []

    def make(key: str) -> int:
        made.append(key)
        return len(key)

    lazy = chunks.LazyDict(["a", "bb", "ccc"], make)
    assert "bb" in lazy and len(lazy) == 3 and [*lazy] == ["a", "bb", "ccc"]
    assert made == []
    assert lazy["bb"] == lazy["bb"] == 2
    assert made == ["bb"]
    assert lazy.get("x") is None and lazy.get("a") == 1
    lazy["d"] = 7
    assert lazy == {"a": 1, "bb": 2, "ccc": 3, "d": 7}
    with pytest.raises(KeyError):
        lazy["x"]
    assert pickle.loads(pickle.dumps(lazy)) == copy.deepcopy(lazy) == dict(lazy.items())


def test_types_that_torch_does_not_have() -> None:
    assert chunks.torch_type(dtype("bfloat16"), "w") is torch.bfloat16
    with pytest.raises(UsageError, match="'w' is float8_e3m4, a type that PyTorch does not have"):
        chunks.torch_type(dtype("float8_e3m4"), "w")
