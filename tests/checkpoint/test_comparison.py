"""Comparison and digests: bits count, not numbers; a flipped byte is found and located."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    MANIFEST,
    Tensor,
    cuts,
    list_open_files,
    small_folder,
    tensor,
    tensors,
    write_file,
    write_ranks,
)
from reshard import checkpoint
from reshard.checkpoint.comparison import DamagedBlock
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.dtypes import dtype
from reshard.errors import DigestError, FormatError, SourceChangedError, UsageError


def floats(values: list[float] | np.ndarray) -> Tensor:
    return Tensor(dtype("float32"), np.array(values, dtype=np.float32).view(np.uint32))


def two(folder: Path, left: dict[str, Tensor], right: dict[str, Tensor]) -> checkpoint.Comparison:
    write_file(folder / "left.safetensors", left)
    write_file(folder / "right.safetensors", right)
    return checkpoint.compare(folder / "left.safetensors", folder / "right.safetensors")


def problems(comparison: checkpoint.Comparison) -> dict[str, str]:
    assert comparison.is_same == (not comparison.differences)
    return {difference.name: difference.problem for difference in comparison.differences}


def test_equal_checkpoints_are_the_same_in_any_order(tmp_path: Path) -> None:
    whole = {"a": tensor("bfloat16", (3, 4), 1), "b": tensor("int8", (), 2)}
    found = two(tmp_path, whole, dict(reversed(whole.items())))
    assert found.is_same
    assert set(found.digests) == {"a", "b"}
    assert found.compared_bytes == 25


def test_names_shapes_and_types(tmp_path: Path) -> None:
    left = {"only left": floats([1]), "shape": floats([1, 2]), "dtype": floats([1])}
    right = {
        "only right": floats([1]),
        "shape": Tensor(left["shape"].dtype, left["shape"].bits.reshape(2, 1)),
        "dtype": Tensor(dtype("int32"), left["dtype"].bits),
    }
    found = problems(two(tmp_path, left, right))
    assert set(found) == {"only left", "only right", "shape", "dtype"}
    assert "only in" in found["only left"]
    assert found["shape"] == "has shapes [2] and [2, 1]"
    assert found["dtype"] == "has dtypes float32 and int32"


def test_options_compare_other_names_and_elements(tmp_path: Path) -> None:
    left, right = tmp_path / "left.safetensors", tmp_path / "right.safetensors"
    found = two(tmp_path, {"a.w": floats([1, 2]), "a.v": floats([3])}, {"b.w": floats([1, 2])})
    assert not found.is_same
    given: dict[str, Any] = {"rename": ["a.*=b.*"], "exclude": ["*.v"]}
    assert checkpoint.compare(left, right, **given).is_same
    assert checkpoint.compare(left, right, checkpoint.CompareOptions(**given)).is_same
    table = {"b.w": "w"}
    assert checkpoint.compare(
        checkpoint.select(checkpoint.open(left), rename=["a.*=*"], include=["a.w"]),
        right,
        right_names=table,
    ).is_same
    checkpoint.convert(left, tmp_path / "bf16", to="full", dtype="bf16")
    assert not checkpoint.compare(left, tmp_path / "bf16").is_same
    assert checkpoint.compare(left, tmp_path / "bf16", dtype="bf16").is_same
    assert checkpoint.compare(left, tmp_path / "bf16", dtype="bf16", include=["*.w"]).is_same


def test_options_do_not_change_a_planned_conversion(tmp_path: Path) -> None:
    left = tmp_path / "left.safetensors"
    write_file(left, {"a": floats([1, 2])})
    planned = checkpoint.plan_conversion(left, tmp_path / "planned", to="full")
    assert checkpoint.compare(planned, left).is_same
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rename": ["a=b"]}, r"rename \['a=b'\] for a conversion"),
        ({"dtype": "bf16"}, "dtype 'bf16' for a conversion"),
        ({"left_names": {"a": "b"}}, "left_names or recipe for a conversion"),
    ]
    for options, problem in cases:
        with pytest.raises(UsageError, match=problem):
            checkpoint.compare(planned, left, **options)


def test_zeros_of_both_signs_and_the_bits_of_nans_differ(tmp_path: Path) -> None:
    quiet = np.array([0x7FC00000, 0x7FC00000], dtype=np.uint32)
    other = np.array([0x7FC00000, 0x7FC00001], dtype=np.uint32)
    left = {"zero": floats([0.0, 0.0]), "nan": Tensor(dtype("float32"), quiet)}
    right = {"zero": floats([-0.0, 0.0]), "nan": Tensor(dtype("float32"), other)}
    found = two(tmp_path, left, right)
    assert problems(found) == {
        "zero": "1 of 2 elements differ, the first at [0]",
        "nan": "1 of 2 elements differ, the first at [1]",
    }
    assert found.digests == {}
    assert two(tmp_path, {"nan": left["nan"]}, {"nan": left["nan"]}).is_same


@given(st.data(), tensors(), st.sampled_from([16, 64, 1000]))
def test_a_differing_element_is_found_in_any_sharding(
    data: st.DataObject, whole: dict[str, Tensor], block_bytes: int
) -> None:
    mesh, specs = data.draw(cuts(whole))
    filled = [name for name, t in whole.items() if t.bits.size]
    with small_folder(block_bytes) as folder:
        write_ranks(folder / "cut", whole, mesh, specs)
        changed = dict(whole)
        if filled:
            name = data.draw(st.sampled_from(filled))
            at = data.draw(st.integers(0, whole[name].bits.size - 1))
            raw = bytearray(whole[name].bits.tobytes())
            raw[at * whole[name].dtype.itemsize_bytes] ^= 1
            bits = np.frombuffer(bytes(raw), whole[name].bits.dtype).reshape(whole[name].shape)
            changed[name] = Tensor(whole[name].dtype, bits)
        write_file(folder / "model.safetensors", changed)
        found = checkpoint.compare(folder / "cut", folder / "model.safetensors", threads=2)
        if not filled:
            assert found.is_same
            return
        (difference,) = found.differences
        index = tuple(int(i) for i in np.unravel_index(at, whole[name].shape))
        assert (difference.name, difference.elements) == (name, 1)
        assert difference.first_index == index
        assert set(found.digests) == set(whole) - {name}


def test_the_first_of_many_differences_is_named(tmp_path: Path, small_blocks: int) -> None:
    left = floats(np.arange(1000))
    bits = left.bits.copy()
    bits[[333, 17, 999, 500]] ^= 1
    found = two(tmp_path, {"w": left}, {"w": Tensor(left.dtype, bits)})
    assert problems(found) == {"w": "4 of 1000 elements differ, the first at [17]"}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("to", ["tp=2", "full"])
def test_a_flipped_byte_is_found_at_its_element(tmp_path: Path, small_blocks: int, to: str) -> None:
    whole = {"a": tensor("float32", (8, 8), 1), "b": tensor("bfloat16", (6,), 2)}
    write_file(tmp_path / "model.safetensors", whole)
    cut = tmp_path / "cut"
    rules = [] if to == "full" else ["a=-, tp"]
    checkpoint.convert(
        tmp_path / "model.safetensors", cut, to=to, rules=[*rules, "*=..."] if rules else []
    )
    assert checkpoint.check_digests(cut).damaged == ()
    # Element [5, 6] of `a`: in the third of its blocks of 64 bytes, on the second of two ranks.
    path = cut / (
        "model.safetensors" if to == "full" else "shard-00002-model-00001-of-00001.safetensors"
    )
    content = path.read_bytes()
    element = whole["a"].bits[5, 4:8].tobytes() if to == "tp=2" else whole["a"].bits[5].tobytes()
    at = content.index(element) + (2 if to == "tp=2" else 6) * 4 + 1
    flip(path, at)

    (damaged,) = checkpoint.check_digests(cut).damaged
    assert isinstance(damaged, DamagedBlock)
    assert (damaged.tensor, damaged.box) == ("a", "[4:6, 0:8]")
    assert damaged.expected != damaged.found
    ranges = [re.fullmatch(r"(.*) bytes (\d+):(\d+)", place) for place in damaged.places]
    assert any(
        match and match[1] == path.name and int(match[2]) <= at < int(match[3]) for match in ranges
    )

    found = checkpoint.compare(tmp_path / "model.safetensors", cut)
    assert problems(found) == {"a": "1 of 64 elements differ, the first at [5, 6]"}

    target = tmp_path / "target"
    with pytest.raises(DigestError, match=r"\[4:6, 0:8\] of tensor 'a', is not what was written"):
        checkpoint.convert(cut, target, to="full")
    assert not target.exists()
    with pytest.raises(DigestError, match="'a'"):
        checkpoint.read_tensor(checkpoint.open(cut), "a")
    assert checkpoint.read_tensor(checkpoint.open(cut), "b").nbytes == 12

    # Without the manifest there is nothing to check against.
    (cut / MANIFEST).unlink()
    report = checkpoint.check_digests(cut)
    assert report.damaged == ()
    assert set(report.without_digest) == {"a", "b"}


def test_digests_are_those_of_the_tensors(tmp_path: Path) -> None:
    whole = {"a": tensor("float32", (8, 8), 1), "b": tensor("bfloat16", (6,), 2)}
    write_file(tmp_path / "model.safetensors", whole)
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "cut", to="dp=2")
    report = checkpoint.check_digests(tmp_path / "cut")
    assert report.digests == checkpoint.check_digests(tmp_path / "model.safetensors").digests
    assert report.digests == checkpoint.compare(tmp_path / "cut", tmp_path / "cut").digests
    assert report.digests == {
        name: t.digest.tensor.hex() for name, t in checkpoint.open(tmp_path / "cut").tensors.items()
    }
    assert (report.read_bytes, report.without_digest) == (8 * 8 * 4 + 12, ())


def test_a_digest_that_is_not_that_of_its_blocks(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"w": tensor("float32", (8, 8), 1)})
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "made", to="full")
    manifest = tmp_path / "made" / MANIFEST
    content = json.loads(manifest.read_text())
    content["tensors"]["w"]["digest"] = "0" * 32
    manifest.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="digest of 'w' is not that of its blocks"):
        checkpoint.check_digests(tmp_path / "made")


def test_progress_counts_to_the_end(tmp_path: Path, small_blocks: int) -> None:
    write_file(tmp_path / "model.safetensors", {"a": tensor("float32", (50, 8), 1)})
    seen: list[checkpoint.Progress] = []
    checkpoint.compare(
        tmp_path / "model.safetensors", tmp_path / "model.safetensors", progress=seen.append
    )
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(set(done))
    assert (done[-1], {progress.total_bytes for progress in seen}) == (1600, {1600})


def test_an_error_in_the_loop_stops_the_threads_before_the_files_close(
    tmp_path: Path, small_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": tensor("float32", (5000, 8), 1)})
    close, working = SourceFile.close, []

    def watched_close(file: SourceFile) -> None:
        working.extend(t.name for t in threading.enumerate() if t.name.startswith("reshard-"))
        close(file)

    def stop(progress: checkpoint.Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SourceFile, "close", watched_close)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.compare(path, path, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.check_digests(path, progress=stop)
    assert working == []
    assert list_open_files(tmp_path) == []


def test_a_file_that_shrank_since_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": tensor("float32", (5000, 8), 1)})
    found = checkpoint.open(path)
    os.truncate(path, 5000)
    with pytest.raises(SourceChangedError, match=re.escape(str(path))):
        checkpoint.compare(found, found)


def test_many_small_tensors_are_compared_together(tmp_path: Path) -> None:
    whole = {
        f"w{number:03}": tensor("float32" if number % 3 else "bfloat16", (6, number % 7), number)
        for number in range(300)
    }
    changed = {name: Tensor(one.dtype, one.bits.copy()) for name, one in whole.items()}
    for name, at in (("w008", [(0, 0)]), ("w100", [(2, 1), (5, 0)]), ("w299", [(5, 4)])):
        for index in at:
            changed[name].bits[index] ^= 1
    del changed["w007"]
    changed["w012"] = tensor("float16", (6, 5), 12)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_file(tmp_path / "a" / "model.safetensors", whole)
    write_file(tmp_path / "b" / "model.safetensors", changed)
    checkpoint.convert(tmp_path / "b", tmp_path / "cut", to="tp=4", rules=["*=tp, -"])
    for other in ("b", "cut"):
        found = checkpoint.compare(tmp_path / "a", tmp_path / other, threads=3)
        assert {one.name: (one.elements, one.first_index) for one in found.differences} == {
            "w007": (None, None),
            "w012": (None, None),
            "w008": (1, (0, 0)),
            "w100": (2, (2, 1)),
            "w299": (1, (5, 4)),
        }
        assert {*found.digests} == {*whole} - {one.name for one in found.differences}
    digests = checkpoint.open(tmp_path / "cut").tensors
    for name, digest in found.digests.items():
        known = digests[name].digest
        assert known is not None
        assert known.tensor.hex() == digest


def test_damage_of_a_small_tensor_among_many_is_found(tmp_path: Path) -> None:
    whole = {f"w{number:03}": tensor("float32", (6, 5), number) for number in range(300)}
    write_file(tmp_path / "model.safetensors", whole)
    checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "full", to="full")
    assert not checkpoint.check_digests(tmp_path / "full").damaged
    place = checkpoint.open(tmp_path / "full")["w123"].file_range(0)
    with (tmp_path / "full" / place.path).open("r+b") as file:
        file.seek(place.start_bytes + 7)
        byte = file.read(1)[0]
        file.seek(place.start_bytes + 7)
        file.write(bytes([byte ^ 1]))
    (damaged,) = checkpoint.check_digests(tmp_path / "full").damaged
    assert (damaged.tensor, damaged.box) == ("w123", "[0:6, 0:5]")
    assert damaged.places == (f"{place.path} bytes {place.start_bytes}:{place.start_bytes + 120}",)
