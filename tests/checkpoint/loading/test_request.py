"""Loading by a request: the arrays that a conversion of the same request would have."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import tensor, write_file
from checkpoint.model_files import write_llama
from reshard import checkpoint
from reshard.checkpoint import Progress
from reshard.checkpoint.formats.safetensors.sharded import shard_file_name
from reshard.checkpoint.loading import arrays as loading_arrays
from reshard.errors import InterruptedRunError, RecipeError, UnmatchedError, UsageError
from reshard.layout import Layout

WHOLE = {
    "a.w": tensor("float32", (6, 4), 1),
    "a.v": tensor("float32", (4, 6), 2),
    "b": tensor("bfloat16", (5,), 3),
}
RULES = ["*.w=tp, -", "*.v=-, tp", "b=-"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source" / "model.safetensors", WHOLE)
    return tmp_path / "source"


def converted(source: Path, target: Path, rank: int, **request: Any) -> dict[str, np.ndarray]:
    """What a conversion gives a rank, read from its own layouts."""
    checkpoint.convert(source, target, **request)
    found = checkpoint.open(target)
    layouts = {name: one.layout for name, one in found.tensors.items()}
    return checkpoint.load(found, layouts, rank)


@pytest.mark.parametrize(
    "request_",
    [
        {"to": "tp=2", "rules": RULES},
        {"to": "tp=2,dp=2", "rules": RULES},
        {"to": 3, "strategy": "sharded"},
        {"to": 2, "strategy": "balanced"},
        {"to": 2},
        {"to": "full"},
    ],
    ids=str,
)
def test_the_same_as_a_conversion(source: Path, tmp_path: Path, request_: dict[str, Any]) -> None:
    ranks = 1 if request_["to"] == "full" else 2
    for rank in range(ranks):
        expected = converted(source, tmp_path / f"target{rank}", rank, **request_)
        found = checkpoint.load(source, rank=rank, **request_)
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert array.tobytes() == expected[name].tobytes()
            assert array.shape == expected[name].shape


def test_whole_tensors_without_anything(source: Path) -> None:
    found = checkpoint.load(source)
    assert {name: array.shape for name, array in found.items()} == {
        name: one.shape for name, one in WHOLE.items()
    }


def test_selected_and_renamed(source: Path) -> None:
    found = checkpoint.load(source, include=["a.*"], rename=["a.*=*"], dtype="bf16")
    assert {name: array.dtype.name for name, array in found.items()} == {
        "w": "bfloat16",
        "v": "bfloat16",
    }


def test_a_recipe_and_other_names(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model")
    found = checkpoint.load(source, to="tp=2", recipe="auto", target_names="megatron", rank=1)
    assert any("linear_qkv" in name for name in found)
    assert not any("q_proj" in name for name in found)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            {"to": "tp=2", "rules": RULES, "rank": 2},
            UsageError,
            "rank=2 with to='tp=2'; expected",
        ),
        ({"rank": 1}, UsageError, "rank=1 with to='full'"),
        ({"to": "tp=2", "rules": RULES[:1]}, UnmatchedError, "no rule"),
        ({"to": "tp=2", "recipe": "nobody"}, RecipeError, "unknown recipe"),
        ({"rules": RULES}, UsageError, "to 'full'"),
        ({"layouts": {}, "to": "tp=2"}, UsageError, "layouts, and 'to' too"),
        ({"stop": True}, UsageError, r"stop=True: expected a threading\.Event"),
    ],
)
def test_impossible_requests_are_refused(
    source: Path, arguments: Any, error: type, says: str
) -> None:
    with pytest.raises(error, match=says):
        checkpoint.load(source, **arguments)


def test_progress_is_reported(source: Path) -> None:
    told: list[Progress] = []
    found = checkpoint.load(source, progress=told.append)
    total = sum(array.nbytes for array in found.values())
    assert (told[-1].done_bytes, told[-1].total_bytes) == (total, total)
    assert [one.done_bytes for one in told] == sorted(one.done_bytes for one in told)
    assert {one.tensor for one in told} == {*WHOLE}


def test_a_load_is_stopped(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedRunError, match="stopped when 0 of 202 bytes were read"):
        checkpoint.load(source, stop=stop)
    stop.clear()
    # In the middle, by who is told of progress.
    with pytest.raises(InterruptedRunError, match="stopped when"):
        checkpoint.load(source, stop=stop, progress=lambda _: stop.set(), threads=1)
    out = {name: np.zeros(one.shape, one.dtype.numpy) for name, one in WHOLE.items()}
    layouts = {name: Layout.whole(one.shape, [0], 1) for name, one in WHOLE.items()}
    with pytest.raises(InterruptedRunError, match="`out` are filled in part"):
        checkpoint.load(source, layouts, out=out, stop=stop)
    assert loading_arrays.load_layouts(source, layouts)["b"].shape == (5,)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_reads_its_own_file_where_that_has_all_it_needs(
    source: Path, tmp_path: Path, rank: int
) -> None:
    cut: dict[str, Any] = {"to": "tp=2,dp=2", "rules": RULES}
    checkpoint.convert(source, tmp_path / "shards", **cut)
    own = shard_file_name(rank)
    for file in (tmp_path / "shards").glob("*.safetensors"):
        if file.name != own:
            content = bytearray(file.read_bytes())
            # Elements, and not the header, which is read of every file.
            content[4096:] = bytes(len(content) - 4096)
            file.write_bytes(content)
    opened = checkpoint.open(tmp_path / "shards", check_copies="none")
    found = checkpoint.load(opened, rank=rank, **cut)
    expected = checkpoint.load(source, rank=rank, **cut)
    assert found.keys() == expected.keys()
    assert all(array.tobytes() == expected[name].tobytes() for name, array in found.items())
