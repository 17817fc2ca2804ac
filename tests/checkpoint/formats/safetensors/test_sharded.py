"""Shards in PyTorch's convention, read with and without a manifest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    MANIFEST,
    Tensor,
    read_file,
    read_metadata,
    small_folder,
    tensor,
    write_file,
)
from reshard import checkpoint
from reshard.checkpoint.formats.safetensors import header
from reshard.checkpoint.formats.safetensors.sharded import rank_of_file, shard_file_name
from reshard.checkpoint.formats.write_plan import WritePlan
from reshard.errors import CheckpointError, CoverageError, UsageError
from reshard.layout import Box
from strategies import partitions_into_boxes, shapes


def piece(whole: Tensor, box: Box) -> Tensor:
    window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return Tensor(whole.dtype, whole.bits[window or (...,)])


def write_boxes(folder: Path, whole: Tensor, boxes: list[Box], ranks: list[int]) -> None:
    folder.mkdir()
    for rank, box in zip(ranks, boxes, strict=True):
        info = {"w": {"saved_offsets": list(box.start)}}
        write_file(
            folder / shard_file_name(rank),
            {"w": piece(whole, box)},
            {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)},
        )


@st.composite
def box_checkpoints(draw: st.DrawFn) -> tuple[Tensor, list[Box], list[int]]:
    """A tensor in boxes that need form no grid, on ranks in any order with gaps."""
    shape = draw(shapes(max_rank=3))
    boxes = draw(partitions_into_boxes(shape))
    ranks = draw(st.lists(st.integers(0, 20), min_size=9, max_size=9, unique=True))[: len(boxes)]
    return tensor("float32", shape, 1), boxes, ranks


@given(box_checkpoints(), st.sampled_from([16, 1000]))
def test_boxes_that_cover_a_tensor_are_read(
    stored: tuple[Tensor, list[Box], list[int]], block_bytes: int
) -> None:
    whole, boxes, ranks = stored
    with small_folder(block_bytes) as folder:
        write_boxes(folder / "cut", whole, boxes, ranks)
        found = checkpoint.open(folder / "cut")
        assert found["w"].shape == whole.shape
        assert checkpoint.read_tensor(found, "w").tobytes() == whole.bits.tobytes()
        report = checkpoint.convert(folder / "cut", folder / "full", to="full")
        assert report.read_bytes == whole.size_bytes, "each byte is read once"
        assert read_file(folder / "full" / "model.safetensors") == {"w": whole}


@given(box_checkpoints(), st.data())
def test_a_box_that_is_missing_is_never_taken_for_zeros(
    stored: tuple[Tensor, list[Box], list[int]], data: st.DataObject
) -> None:
    whole, boxes, ranks = stored
    gone = data.draw(st.integers(0, len(boxes) - 1))
    left = [box for number, box in enumerate(boxes) if number != gone]
    if not left:
        return
    with small_folder() as folder:
        write_boxes(folder / "cut", whole, left, ranks[1:])
        shape = [max(stop) for stop in zip(*(box.stop for box in left), strict=True)]
        if sum(box.elements for box in left) == math.prod(shape):
            # The rest is a whole tensor by itself: nothing in the files can know of more.
            found = checkpoint.open(folder / "cut")
            assert list(found["w"].shape) == shape
            assert "if a last file is missing, they are too small" in found.notes[0]
            return
        with pytest.raises(CoverageError, match="no shard holds"):
            checkpoint.open(folder / "cut")


@given(box_checkpoints(), st.data())
def test_boxes_that_overlap_are_an_error(
    stored: tuple[Tensor, list[Box], list[int]], data: st.DataObject
) -> None:
    whole, boxes, ranks = stored
    filled = [box for box in boxes if box.elements]
    if not filled:
        return
    more = data.draw(st.sampled_from(filled))
    at = [data.draw(st.integers(a, b - 1)) for a, b in zip(more.start, more.stop, strict=True)]
    extra = Box(tuple(at), tuple(a + 1 for a in at))
    with small_folder() as folder:
        write_boxes(folder / "cut", whole, [*boxes, extra], [*ranks, 30])
        with pytest.raises(CoverageError, match="overlap"):
            checkpoint.open(folder / "cut")


def test_shards_are_written_with_their_offsets(tmp_path: Path) -> None:
    whole = {"w": tensor("float32", (5, 6), 1), "s": tensor("int64", (), 2)}
    write_file(tmp_path / "model.safetensors", whole, {"author": "us"})
    target = tmp_path / "made"
    checkpoint.convert(
        tmp_path / "model.safetensors",
        target,
        to="tp=2,dp=2",
        rules=["w=tp, dp@sizes[2,4]", "*=..."],
    )
    found = {}
    for rank in range(4):
        metadata = read_metadata(target / shard_file_name(rank))
        assert (metadata["format"], metadata["DCP_VERSION"]) == ("pt", "1.0")
        assert metadata["author"] == "us"
        info = json.loads(metadata["DCP_SHARDING_INFO"])
        assert set(info) == set(read_file(target / shard_file_name(rank)))
        found[rank] = info["w"]["saved_offsets"]
    assert found == {0: [0, 0], 1: [3, 0], 2: [0, 2], 3: [3, 2]}
    (target / MANIFEST).unlink()
    opened = checkpoint.open(target)
    assert opened.metadata == {"format": "pt", "author": "us"}
    assert (opened.mesh, opened.ranks) == (None, 4)
    assert checkpoint.compare(tmp_path / "model.safetensors", opened).is_same


@pytest.mark.parametrize("gone", range(4))
def test_our_files_know_of_each_other_without_a_manifest(tmp_path: Path, gone: int) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (8, 3), 1)})
    cut = tmp_path / "cut"
    checkpoint.convert(tmp_path / "model.safetensors", cut, to="tp=4", rules=["*=tp, -"])
    (cut / MANIFEST).unlink()
    assert checkpoint.open(cut).notes == ()
    (cut / shard_file_name(gone)).unlink()
    with pytest.raises(CoverageError, match="no shard holds" if gone < 3 else "one of 4 files"):
        checkpoint.open(cut)
    with pytest.raises(CoverageError, match=r"no shard holds|one of 4 files"):
        checkpoint.open(cut / shard_file_name((gone + 1) % 4))


def test_a_file_left_from_another_save_is_an_error(tmp_path: Path) -> None:
    whole = tensor("float32", (6, 3), 1)
    write_file(tmp_path / "model.safetensors", {"w": whole})
    cut = tmp_path / "cut"
    checkpoint.convert(tmp_path / "model.safetensors", cut, to="tp=2", rules=["*=tp, -"])
    (cut / MANIFEST).unlink()
    # It continues the tensor, so that only the number of files tells it.
    write_boxes(tmp_path / "other", whole, [Box((3, 0), (6, 3))], [2])
    name = shard_file_name(2)
    text = json.dumps({"w": {"saved_offsets": [6, 0]}})
    write_file(
        cut / name,
        read_file(tmp_path / "other" / name),
        {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": text},
    )
    with pytest.raises(CoverageError, match=r"one of 2 files.*here are 3"):
        checkpoint.open(cut)


def test_a_shard_is_opened_by_its_own_file(tmp_path: Path) -> None:
    whole = tensor("float32", (4, 4), 1)
    write_boxes(tmp_path / "cut", whole, [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))], [0, 1])
    assert checkpoint.open(tmp_path / "cut" / shard_file_name(0))["w"].shape == (2, 4)
    with pytest.raises(CoverageError, match=r"no shard holds \[0:2, 0:4\]"):
        checkpoint.open(tmp_path / "cut" / shard_file_name(1))


@pytest.mark.parametrize("rank", [0, 7, 99_998, 123_456])
def test_names_of_files_give_the_rank(rank: int) -> None:
    assert rank_of_file(shard_file_name(rank)) == rank


@pytest.mark.parametrize(
    "name",
    [
        "shard-00000-model-00001-of-00001.safetensors",
        "shard-00001-model-00001-of-00001.safetensors.tmp",
        f"shard-{'9' * 30}-model-00001-of-00001.safetensors",
        "model-00001-of-00001.safetensors",
    ],
)
def test_other_names_give_no_rank(name: str) -> None:
    assert rank_of_file(name) is None


@pytest.mark.parametrize("gone", [(), (1,)])
def test_files_of_ranks_are_no_whole_tensors(tmp_path: Path, gone: tuple[int, ...]) -> None:
    # Interleaved shards have no offsets in their files: alone they would pass for the tensor.
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_file(source / "model.safetensors", {"w": tensor("float32", (8, 3))})
    checkpoint.convert(source, target, to="tp=2", rules=["w=tp@cyclic2, -"])
    (target / "reshard.manifest.json").unlink()
    for rank in gone:
        (target / shard_file_name(rank)).unlink()
    with pytest.raises(CheckpointError, match=r"reshard\.manifest\.json does, and it is missing"):
        checkpoint.open(target)


NORMS = ["norm1", "norm2", "norm3"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {name: tensor("float32", (6,), number) for number, name in enumerate(NORMS)}
    write_file(tmp_path / "model.safetensors", {"w": tensor("bfloat16", (8, 6), 9), **tensors})
    return tmp_path / "model.safetensors"


def test_the_file_of_a_rank_has_all_that_the_rank_holds(model: Path, tmp_path: Path) -> None:
    report = checkpoint.convert(model, tmp_path / "cut", to="tp=4", rules=["w=tp, -", "*=..."])
    whole = read_file(model)
    for rank in range(4):
        held = read_file(tmp_path / "cut" / shard_file_name(rank))
        assert held == {
            "w": piece(whole["w"], Box((2 * rank, 0), (2 * rank + 2, 6))),
            **{name: whole[name] for name in NORMS},
        }
    assert report.read_bytes == report.size_bytes == 96 + 3 * 24, "each byte is read once"
    assert report.copy_bytes == 3 * (3 * 24)
    opened = checkpoint.open(tmp_path / "cut")
    assert opened.size_bytes == report.size_bytes
    assert [one.layout.holders for one in opened.tensors.values()] == 4 * [(0, 1, 2, 3)]
    # Copies are read once, whatever comes of them.
    for to in ("full", "tp=2", "2"):
        again = checkpoint.convert(tmp_path / "cut", tmp_path / f"to {to}", to=to, **RULES[to])
        assert again.read_bytes == report.size_bytes
        assert checkpoint.compare(model, tmp_path / f"to {to}").is_same


RULES: dict[str, dict[str, list[str]]] = {"full": {}, "2": {}, "tp=2": {"rules": ["*=..."]}}


def test_files_for_storage_and_those_of_other_programs_hold_each_part_once(model: Path) -> None:
    def plan(**arguments: Any) -> WritePlan:
        return checkpoint.plan_conversion(model, "new", **arguments).write_plan

    rules = ["w=tp, -", "*=..."]
    assert plan(to="tp=4", rules=rules).copy_bytes == 3 * (3 * 24)
    for arguments in (
        {"to": "full"},
        {"to": "tp=1", "rules": rules},
        {"to": "4"},
        {"to": "tp=4", "rules": rules, "replicas": "once"},
        {"to": "tp=4", "rules": rules, "format": "torch-dcp"},
        {"to": "tp=4", "rules": rules, "format": "orbax"},
    ):
        assert plan(**arguments).copy_bytes == 0
    with pytest.raises(UsageError, match="'full' cannot go together with replicas 'every'"):
        plan(to="full", replicas="every")


def test_copies_are_known_without_the_manifest(model: Path, tmp_path: Path) -> None:
    checkpoint.convert(model, tmp_path / "cut", to="tp=2,dp=2", rules=["w=tp, -", "*=..."])
    (tmp_path / "cut" / MANIFEST).unlink()
    report = checkpoint.convert(tmp_path / "cut", tmp_path / "whole", to="full")
    assert report.read_bytes == report.size_bytes
    assert checkpoint.compare(model, tmp_path / "whole").is_same
    # One that differs is found without digests too.
    file = tmp_path / "cut" / shard_file_name(3)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CoverageError, match="ranks hold copies"):
        checkpoint.load(tmp_path / "cut")
    # In files of other programs, the same box twice is no copy.
    for path in (tmp_path / "cut").glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(b"RESHARD_FILES", b"ANOTHER_FILES"))
    with pytest.raises(CoverageError, match="overlap"):
        checkpoint.open(tmp_path / "cut")


def test_opening_shards_reads_each_header_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tensor("float32", (40, 4), 1)
    write_boxes(tmp_path / "s", whole, [Box((0, 0), (20, 4)), Box((20, 0), (40, 4))], ranks=[0, 1])
    # Other names, which recognition has to look into.
    for rank in range(2):
        (tmp_path / "s" / shard_file_name(rank)).rename(tmp_path / "s" / f"{rank}.safetensors")
    reads: list[tuple[str, int]] = []
    read_json = header._read_header_json

    def count(path: Path, max_bytes: int = header.LARGEST_HEADER_BYTES) -> Any:
        reads.append((Path(path).name, max_bytes))
        return read_json(path, max_bytes)

    monkeypatch.setattr(header, "_read_header_json", count)
    assert checkpoint.open(tmp_path / "s").format == "sharded-safetensors"
    assert [name for name, size in reads if size > 1 << 16] == ["0.safetensors", "1.safetensors"]
    assert [name for name, size in reads if size <= 1 << 16] == ["0.safetensors"]


@pytest.mark.parametrize("padding", [0, 100_000])
def test_the_key_of_offsets_is_found_in_the_beginning_of_a_header(
    tmp_path: Path, padding: int
) -> None:
    metadata = {"first": '"DCP_SHARDING_INFO": ' + "x" * padding, "format": "pt"}
    # A tensor may have the name of the key.
    tensors = {"DCP_SHARDING_INFO": tensor("float32", (2,), 1)}
    write_file(tmp_path / "a", tensors, metadata)
    write_file(tmp_path / "b", tensors, metadata | {"DCP_SHARDING_INFO": ""})
    assert not header.has_metadata_key(tmp_path / "a", "DCP_SHARDING_INFO")
    assert header.has_metadata_key(tmp_path / "b", "DCP_SHARDING_INFO")


def test_a_header_without_metadata_is_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    write_file(path, {"w": tensor("float32", (2,), 1)})
    assert b"__metadata__" not in path.read_bytes()
    parsed: list[str] = []
    parse_text = header._parse_text

    def count(text: str, *places: Any) -> header.FileHeader:
        parsed.append(text)
        return parse_text(text, *places)

    monkeypatch.setattr(header, "_parse_text", count)
    assert checkpoint.open(tmp_path).format == "safetensors"
    assert len(parsed) == 1
