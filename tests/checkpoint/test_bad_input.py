"""Bad input: a clear error that names file and tensor, before anything is written."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint_files import MANIFEST, split_file, tensor, with_header, write_file
from reshard import checkpoint
from reshard.checkpoint.conversion.plan import unwritten_target
from reshard.errors import CheckpointError, CoverageError, FormatError, ReshardError, UsageError

WEIGHT, BIAS = tensor("float32", (6, 4), 1), tensor("float32", (6,), 2)
SHARD = "shard-0000{}-model-00001-of-00001.safetensors"


def refused(source: Path, *says: str, kind: type[ReshardError] = CheckpointError) -> str:
    """The message with which a conversion of `source` is refused; nothing was written."""
    target = source.parent / "target"
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(kind) as caught:
        checkpoint.convert(source, target, to="full")
    assert sorted(source.parent.rglob("*")) == before
    message = str(caught.value)
    for text in says:
        assert re.search(text, message), (text, message)
    return message


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder with one file of whole tensors."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_file(folder / "model.safetensors", {"weight": WEIGHT, "bias": BIAS})
    return folder


def cut(whole: Path, **options: Any) -> Path:
    folder = whole.parent / "cut"
    checkpoint.convert(whole, folder, **{"to": "tp=3", "rules": ["*=tp, ..."], **options})
    return folder


@pytest.fixture
def shards(whole: Path) -> Path:
    """A folder of three shards without a manifest."""
    folder = cut(whole)
    (folder / MANIFEST).unlink()
    return folder


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    entries, data = split_file(path.read_bytes())
    change(entries)
    path.write_bytes(with_header(entries, data))


def set_offsets(path: Path, offsets: dict[str, list[int]]) -> None:
    info = json.dumps({name: {"saved_offsets": at} for name, at in offsets.items()})
    change_header(path, lambda entries: entries["__metadata__"].update(DCP_SHARDING_INFO=info))


# Paths


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "nothing of that name")


def test_a_name_too_long_for_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.open(tmp_path / ("x" * 300))


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(b"pickle")
    refused(tmp_path / "source", "pytorch_model.bin is a line of text")
    (tmp_path / "source" / "pytorch_model.bin").rename(tmp_path / "source" / "notes.txt")
    refused(tmp_path / "source", "expected `model.safetensors`", "it has notes.txt")


def test_files_that_nothing_joins(whole: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(whole / "model.safetensors", whole / name)
    (whole / "model.safetensors").unlink()
    refused(whole, "2 safetensors files", "index.json")


def test_a_target_inside_the_source(whole: Path) -> None:
    with pytest.raises(UsageError, match="inside the source"):
        checkpoint.convert(whole, whole / "deeper" / "target", to="full")
    assert os.listdir(whole) == ["model.safetensors"]


def test_a_target_inside_the_source_by_another_name(whole: Path) -> None:
    link = whole.parent / "link"
    link.symlink_to(whole)
    with pytest.raises(UsageError, match="inside the source"):
        checkpoint.convert(whole, link / "target", to="full")
    assert os.listdir(whole) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("source", "target"), [("whole", "WHOLE/deeper"), ("whole/inner", "WHOLE")]
)
def test_a_target_around_the_source_by_a_name_of_other_case(
    whole: Path, source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks of Macs ignore case, and paths are resolved without it; links play the other name."""
    folder = whole.parent / "whole"
    whole.rename(folder)
    (folder / "inner").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "inner")
    (whole.parent / "WHOLE").symlink_to(folder)
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path)
    with pytest.raises(UsageError, match="lies inside"):
        checkpoint.plan_conversion(whole.parent / source, whole.parent / target, to="full")


@pytest.mark.parametrize("name", ["loop", "loop/target"])
def test_a_target_that_is_a_link_to_itself(whole: Path, name: str) -> None:
    (whole.parent / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=r"loop.* is a link that leads back to itself"):
        checkpoint.plan_conversion(whole, whole.parent / name, to="full")


def test_a_source_that_is_a_link_to_itself(whole: Path) -> None:
    (whole.parent / "loop").symlink_to("loop")
    assert unwritten_target(whole.parent / "loop").name == "loop.planned"
    with pytest.raises(CheckpointError, match="a link to loop"):
        checkpoint.open(whole.parent / "loop")


@pytest.mark.parametrize(
    "call",
    [
        lambda whole, bad: checkpoint.open(bad),
        lambda whole, bad: checkpoint.open(f"file://{whole}%00"),
        lambda whole, bad: checkpoint.plan_conversion(whole, bad, to="full"),
        lambda whole, bad: checkpoint.convert(whole, bad, to="full", overwrite=True),
        lambda whole, bad: checkpoint.compare(whole, bad),
        lambda whole, bad: checkpoint.diff(whole, bad, whole.parent / "new.delta"),
        lambda whole, bad: checkpoint.diff(whole, whole, bad),
        lambda whole, bad: checkpoint.read_delta(bad),
        lambda whole, bad: checkpoint.apply(whole, bad, whole.parent / "made"),
    ],
)
def test_a_path_with_a_null_character(whole: Path, call: Callable[[Path, Path], object]) -> None:
    with pytest.raises(UsageError, match="null character"):
        call(whole, whole.parent / "a\0b")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: not a regular file"):
        checkpoint.open(tmp_path / "pipe")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (MANIFEST, "is not JSON|Expecting value"),
        ("config.json", "config.json is not JSON"),
        ("latest_checkpointed_iteration.txt", "expected the number of the last step"),
    ],
)
def test_a_device_has_no_content(whole: Path, name: str, says: str) -> None:
    """A link to `/dev/zero`, which has as many bytes as are asked for."""
    if name.startswith("latest"):
        (whole / "model.safetensors").unlink()
    (whole / name).symlink_to("/dev/zero")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), limits[1]))
    try:
        with pytest.raises((CheckpointError, FormatError), match=says):
            checkpoint.plan_conversion(whole, whole.parent / "t", to="tp=2", recipe="auto")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_name_that_utf_8_cannot_say(whole: Path) -> None:
    """What a shell gives that is no text is half of a UTF-16 pair in Python."""
    for options in ({"to": "full"}, {"to": "dp=2"}):
        with pytest.raises(UsageError, match="UTF-8"):
            checkpoint.plan_conversion(
                whole, whole.parent / "made", rename=["bias=\udcff"], **options
            )


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_source_inside_the_target(whole: Path, overwrite: bool) -> None:
    with pytest.raises(UsageError, match="inside the target"):
        checkpoint.convert(whole, whole.parent, to="full", overwrite=overwrite)
    with pytest.raises(UsageError, match="inside the target"):
        checkpoint.convert(whole / "model.safetensors", whole, to="full", overwrite=overwrite)
    assert os.listdir(whole.parent) == ["source"]


def test_a_target_beside_a_source_that_is_one_file(whole: Path) -> None:
    checkpoint.convert(whole / "model.safetensors", whole / "target", to="full")
    assert checkpoint.compare(whole / "model.safetensors", whole / "target").is_same


def test_a_target_that_exists(whole: Path) -> None:
    target = whole.parent / "target"
    target.mkdir()
    (target / "precious").write_text("mine")
    refused(whole, "overwrite", kind=UsageError)
    assert (target / "precious").read_text() == "mine"


# One safetensors file


def test_a_file_that_is_cut_off(whole: Path) -> None:
    path = whole / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(whole, re.escape(str(path)), str(size), kind=FormatError)


def test_a_file_with_something_behind(whole: Path) -> None:
    with (whole / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(whole, "model.safetensors", kind=FormatError)


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes"),
    "too short": (b"\x08\0\0", "3 bytes"),
    "longer than the file": (struct.pack("<Q", 5000) + b"{}", "5000 bytes, but only 2"),
    "over 100 MB": (struct.pack("<Q", 100_000_001) + b"{}", "100000001.*at most 100000000"),
    "a web page": (b"<!DOCTYPE html><html>", "web page"),
    "not JSON": (with_header(b"{nonsense", b""), "not JSON"),
    "a list": (with_header([], b""), "expected a JSON object"),
    "not UTF-8": (with_header(b'{"\xff": 1}', b""), "UTF-8"),
    "deep": (with_header(b'{"a":' + b"[" * 100_000, b""), "not JSON"),
    "twice": (
        with_header(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"ab",
        ),
        "'a' is there twice",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(whole: Path, name: str) -> None:
    content, says = HEADERS[name]
    (whole / "model.safetensors").write_bytes(content)
    refused(whole, re.escape(str(whole / "model.safetensors")), says, kind=FormatError)


ENTRIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "overlap": ({"bias": {"data_offsets": [92, 116]}}, ["bias", "weight"]),
    "hole": (
        {"bias": {"data_offsets": [100, 120], "shape": [5]}, "weight": {"data_offsets": [0, 96]}},
        ["bias", "4 bytes from .* belong to no tensor"],
    ),
    "outside": (
        {"bias": {"data_offsets": [96, 128], "shape": [8]}},
        ["bias", "8 bytes are missing"],
    ),
    "backwards": ({"bias": {"data_offsets": [120, 96]}}, ["bias", r"\[120, 96\]"]),
    "negative": ({"weight": {"data_offsets": [-4, 96]}}, ["weight", "-4"]),
    "huge": ({"weight": {"data_offsets": [0, 2**63]}}, ["weight", str(2**63)]),
    "dtype": ({"bias": {"dtype": "F33"}}, ["bias", "F33", "F32"]),
    "dtype of half a byte": ({"bias": {"dtype": "F4"}}, ["bias", "F4"]),
    "size": ({"bias": {"shape": [7]}}, ["bias", "24", "28"]),
    "negative shape": ({"bias": {"shape": [-6]}}, ["bias", "-6"]),
    "shape of text": ({"bias": {"shape": "6"}}, ["bias"]),
    "shape of floats": ({"bias": {"shape": [6.0]}}, ["bias"]),
    "overflow": ({"bias": {"shape": [2**40, 2**40]}}, ["bias"]),
    "other key": ({"bias": {"strides": [1]}}, ["bias", "strides"]),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries(whole: Path, name: str) -> None:
    entries, says = ENTRIES[name]

    def change(header: dict[str, Any]) -> None:
        for tensor_name, fields in entries.items():
            header[tensor_name].update(fields)

    change_header(whole / "model.safetensors", change)
    refused(whole, re.escape(str(whole / "model.safetensors")), *says, kind=FormatError)


# Several files with an index


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder with an index, as Hugging Face writes it."""
    folder = tmp_path / "indexed"
    folder.mkdir()
    write_file(folder / "model-00001-of-00002.safetensors", {"weight": WEIGHT}, {"format": "pt"})
    write_file(folder / "model-00002-of-00002.safetensors", {"bias": BIAS}, {"format": "pt"})
    set_index(
        folder,
        {
            "weight": "model-00001-of-00002.safetensors",
            "bias": "model-00002-of-00002.safetensors",
        },
    )
    return folder


def set_index(folder: Path, weight_map: object) -> None:
    content = {"metadata": {"total_size": 120}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_the_index_itself_is_right(indexed: Path) -> None:
    assert checkpoint.open(indexed)["weight"].shape == (6, 4)


def test_a_missing_file_of_an_index(indexed: Path) -> None:
    (indexed / "model-00002-of-00002.safetensors").unlink()
    refused(indexed, "model-00002-of-00002.safetensors", "missing", "1 tensors")


@pytest.mark.parametrize(
    "file", ["../source/x.safetensors", "/etc/passwd", "..", "", "a\\b", "sub/model.safetensors"]
)
def test_an_index_that_leads_outside(indexed: Path, file: str) -> None:
    set_index(indexed, {"weight": file, "bias": "model-00002-of-00002.safetensors"})
    refused(indexed, "index.json", "'weight'", "leads outside", kind=FormatError)


def test_an_index_that_lists_a_tensor_twice(indexed: Path) -> None:
    (indexed / "model.safetensors.index.json").write_text(
        '{"weight_map": {"weight": "model-00001-of-00002.safetensors",'
        ' "weight": "model-00002-of-00002.safetensors"}}'
    )
    refused(indexed, "index.json", "'weight' appears twice", kind=FormatError)


def test_an_index_and_a_file_that_both_have_a_tensor(indexed: Path) -> None:
    write_file(indexed / "model-00002-of-00002.safetensors", {"bias": BIAS, "weight": WEIGHT})
    refused(indexed, "model-00002", "'weight'", "says is in model-00001", kind=FormatError)


def test_a_tensor_that_the_index_does_not_list(indexed: Path) -> None:
    write_file(indexed / "model-00002-of-00002.safetensors", {"bias": BIAS, "other": BIAS})
    refused(indexed, "'other'", "does not list", kind=FormatError)


def test_a_tensor_that_is_not_in_its_file(indexed: Path) -> None:
    write_file(indexed / "model-00002-of-00002.safetensors", {"other": BIAS})
    refused(indexed, "'bias' is in model-00002", "it is not", kind=FormatError)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff"]
)
def test_what_is_no_index(indexed: Path, content: bytes) -> None:
    (indexed / "model.safetensors.index.json").write_bytes(content)
    refused(indexed, "index.json", kind=FormatError)


def test_a_file_name_in_an_index_too_long_for_the_file_system(indexed: Path) -> None:
    set_index(indexed, {"weight": "x" * 300, "bias": "model-00002-of-00002.safetensors"})
    refused(indexed, "cannot read|missing")


# Shards without a manifest


def test_the_shards_themselves_are_right(shards: Path) -> None:
    assert checkpoint.open(shards)["weight"].shape == (6, 4)


def test_a_missing_shard_in_the_middle(shards: Path) -> None:
    (shards / SHARD.format(2)).unlink()
    refused(shards, "weight", r"\[2:4, 0:4\]", "ranks 0, 2", str(shards), kind=CoverageError)


def test_a_missing_file_of_several_a_rank(shards: Path) -> None:
    for rank in (1, 2, 3):
        name = f"shard-0000{rank}-model-00002-of-00002.safetensors"
        (shards / SHARD.format(rank)).rename(shards / name)
    refused(shards, "file 1 of 2", str(shards))


def test_shards_of_two_saves(shards: Path) -> None:
    (shards / SHARD.format(3)).rename(shards / "shard-00003-model-00001-of-00002.safetensors")
    refused(shards, "of 1 and of 2 files", kind=CoverageError)


def test_a_stale_shard(shards: Path) -> None:
    shutil.copy(shards / SHARD.format(3), shards / SHARD.format(4))
    refused(shards, "is one of 3 files", "here are 4", "left over", kind=CoverageError)


def test_shards_that_overlap(shards: Path) -> None:
    set_offsets(shards / SHARD.format(3), {"weight": [3, 0], "bias": [4]})
    message = refused(shards, "weight", "overlap", kind=CoverageError)
    assert "[2:4, 0:4]" in message
    assert "[3:5, 0:4]" in message


def test_shards_with_a_hole(shards: Path) -> None:
    set_offsets(shards / SHARD.format(3), {"weight": [5, 0], "bias": [4]})
    refused(shards, "weight", r"\[7, 4\]", r"\[4:5, 0:4\]", kind=CoverageError)


def test_as_many_elements_as_needed_do_not_prove_coverage(shards: Path) -> None:
    # Shard 3 turned into columns beside shard 2: no overlap, and 24 elements of a 4 x 8.
    write_file(
        shards / SHARD.format(3),
        {"weight": tensor("float32", (2, 4)), "bias": tensor("float32", (2,))},
        {"format": "pt"},
    )
    change_header(shards / SHARD.format(3), lambda entries: None)
    set_offsets(shards / SHARD.format(3), {"weight": [2, 4], "bias": [4]})
    refused(shards, "weight", r"\[0:2, 4:8\]", kind=CoverageError)


def test_shards_of_different_types(shards: Path) -> None:
    change_header(shards / SHARD.format(2), lambda entries: entries["weight"].update(dtype="I32"))
    refused(shards, "weight", "float32", "int32", "00001-model", "00002-model", kind=CoverageError)


def test_shards_of_different_rank(shards: Path) -> None:
    change_header(
        shards / SHARD.format(2), lambda entries: entries["weight"].update(shape=[2, 2, 2])
    )
    set_offsets(shards / SHARD.format(2), {"weight": [2, 0, 0], "bias": [2]})
    refused(shards, "weight", "2 dimensions", "3 dimensions", kind=CoverageError)


@pytest.mark.parametrize(
    "offsets", [[2], [2, 0, 0], [2, -1], [2, 0.0], ["2", 0], [True, 0], None, 2, [2**63, 0]]
)
def test_offsets(shards: Path, offsets: Any) -> None:
    set_offsets(shards / SHARD.format(2), {"weight": offsets, "bias": [2]})
    refused(shards, "weight|offsets", str(shards))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"weight": 1, "bias": 2}', "[" * 99999])
def test_sharding_information(shards: Path, text: str) -> None:
    change_header(
        shards / SHARD.format(2),
        lambda entries: entries["__metadata__"].update(DCP_SHARDING_INFO=text),
    )
    refused(shards, "DCP_SHARDING_INFO", "00002-model", kind=FormatError)


def test_a_whole_file_among_shards(shards: Path) -> None:
    write_file(shards / "extra.safetensors", {"more": BIAS})
    refused(shards, "extra.safetensors", "DCP_SHARDING_INFO", kind=FormatError)


def test_two_files_of_one_rank_with_the_same_tensor(shards: Path) -> None:
    for rank in (1, 2, 3):
        (shards / SHARD.format(rank)).rename(
            shards / f"shard-0000{rank}-model-00001-of-00002.safetensors"
        )
    shutil.copy(
        shards / "shard-00001-model-00001-of-00002.safetensors",
        shards / "shard-00001-model-00002-of-00002.safetensors",
    )
    refused(shards, "rank 0 has two shards", kind=CoverageError)


# Shards with a manifest


def test_a_missing_shard_beside_a_manifest(whole: Path) -> None:
    folder = cut(whole)
    (folder / SHARD.format(3)).unlink()
    refused(folder, "00003-model", "missing", "3 files")


def test_a_shard_that_is_cut_off_beside_a_manifest(whole: Path) -> None:
    folder = cut(whole)
    path = folder / SHARD.format(3)
    os.truncate(path, path.stat().st_size - 1)
    refused(folder, re.escape(str(path)), kind=FormatError)


def test_a_shard_of_another_save_beside_a_manifest(whole: Path) -> None:
    folder = cut(whole)
    shutil.copy(folder / SHARD.format(1), folder / SHARD.format(3))
    refused(folder, "00003-model", "begins at", kind=FormatError)


def test_a_shard_of_another_type_beside_a_manifest(whole: Path) -> None:
    folder = cut(whole)
    path = folder / SHARD.format(3)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"F32"', b'"I32"'))
    refused(folder, "00003-model", "int32", "float32", kind=FormatError)


def test_a_stale_shard_beside_a_manifest_is_left_out(whole: Path) -> None:
    folder = cut(whole)
    shutil.copy(folder / SHARD.format(3), folder / SHARD.format(4))
    found = checkpoint.open(folder)
    assert found.left_out == ((SHARD.format(4), "not a file of this checkpoint"),)
    assert checkpoint.compare(whole, found).is_same
    checkpoint.convert(folder, whole.parent / "target", to="full")
    assert checkpoint.compare(whole, whole.parent / "target").is_same


def test_a_file_replaced_by_one_of_another_shape_beside_a_manifest(whole: Path) -> None:
    folder = cut(whole, to="full", rules=[])
    path = folder / "model.safetensors"
    content = path.read_bytes()
    assert content.count(b"[6,4]") == 1
    path.write_bytes(content.replace(b"[6,4]", b"[4,6]"))
    refused(folder, "'weight'", r"\[4, 6\]", r"\[6, 4\]", kind=FormatError)


# Arguments


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "0"}, "at least 1"),
        ({"to": "many"}, "cannot read the target"),
        ({"to": "²"}, "cannot read the target"),
        ({"to": "full", "rules": ["*=tp, -"]}, "rules cannot go together"),
        ({"to": "full", "format": "sharded-safetensors"}, "cannot go together"),
        ({"to": "full", "strategy": "simple"}, "cannot go together"),
        ({"to": "tp=2", "format": "safetensors"}, "cannot go together"),
        ({"to": "tp=2", "format": "numpy"}, "unknown format 'numpy'"),
        ({"to": "tp=2", "most_file_bytes": 100}, "cannot go together"),
        ({"to": "2", "rules": ["*=tp, -"]}, "cannot go together"),
        ({"to": "tp=2", "replicas": "twice"}, "replicas 'twice'"),
        ({"to": "full", "extra_bytes": 1000}, "memory limit of 1000 bytes"),
        ({"to": "tp=2", "rules": ["*=-, -, - | sum(tp)"]}, "3"),
        ({"to": "tp=2", "rules": ["weight=-, - | sum(tp)", "*=..."]}, "partial"),
        ({"to": "tp=2", "rules": ["weight=xx, -"]}, "xx"),
        ({"to": "tp=2", "recipe": "auto"}, "config.json"),
        ({"to": "tp=2", "rules": "*=tp, -"}, "give a list of them"),
        ({"to": "tp=2", "rules": None}, "give a list of them"),
        ({"to": "tp=2", "rules": [("*", "tp, -")]}, "expected a text pattern=spec"),
        ({"to": "tp=2", "recipe": 3}, "give a name, or the path of a TOML file"),
        ({"to": "tp=2", "recipe": "llama", "options": {"vocabulary": 3}}, "expected a text"),
        ({"to": "tp=2", "recipe": "llama", "options": "vocabulary=pad"}, "give a dict, or a list"),
        ({"to": "2", "strategy": 3}, "a strategy named 3"),
        ({"to": "full", "most_file_bytes": -1}, "whole number from 1"),
        ({"to": "full", "most_file_bytes": "5GB"}, "whole number from 1"),
        ({"to": "full", "extra_bytes": "64MiB"}, "whole number from 0"),
        ({"to": "full", "threads": 0}, "whole number from 1"),
        ({"to": "full", "threads": -2}, "whole number from 1"),
    ],
)
def test_arguments(whole: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ReshardError, match=says):
        checkpoint.convert(whole, whole.parent / "target", **options)
    assert os.listdir(whole.parent) == ["source"]


@pytest.mark.parametrize("path", [None, 3, b"model", ["model"]])
def test_what_is_no_path(whole: Path, path: Any) -> None:
    with pytest.raises(UsageError, match="expected a path"):
        checkpoint.open(path)
    if not isinstance(path, bytes):
        with pytest.raises(UsageError, match="give a path"):
            checkpoint.plan_conversion(whole, path, to="full")
