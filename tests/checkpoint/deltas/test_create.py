"""Deltas: what they say, how much they read, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.checkpoint_files import Tensor, tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.blocks.block_io import BlockReader
from reshard.errors import DigestError, UsageError
from selection import keep_spread

WHOLE = {
    "a": tensor("float32", (40, 20), 1),
    "b": tensor("bfloat16", (33, 7), 2),
    "c": tensor("float64", (), 3),
    "d": tensor("int8", (0, 3), 4),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)


def changed(whole: Tensor, *places: int) -> Tensor:
    bits = whole.bits.copy()
    for place in places:
        bits.reshape(-1)[place] ^= bits.dtype.type(1)
    return Tensor(whole.dtype, bits)


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    write_file(folder / "model.safetensors", tensors)
    return folder


def test_the_contents_of_a_delta(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {**WHOLE, "gone": WHOLE["b"], "other": WHOLE["a"]})
    after = {
        **WHOLE,
        "a": changed(WHOLE["a"], 3, 700),
        "other": tensor("float32", (40, 21), 1),
        "new": tensor("int16", (9,), 9),
    }
    b = write(tmp_path / "b", after)
    report = checkpoint.diff(a, b, tmp_path / "delta")
    assert report.changed == ("a",)
    assert (report.added, report.replaced, report.removed) == (("new",), ("other",), ("gone",))
    assert report.changed_bytes == 8
    found = checkpoint.read_delta(tmp_path / "delta")
    kinds = {name: one.kind for name, one in found.tensors.items()}
    assert kinds == {
        **dict.fromkeys("bcd", "kept"),
        "a": "changed",
        "other": "replaced",
        "new": "added",
    }
    assert set(found.removed) == {"gone"}
    assert len(found.records_of(found.tensors["a"])) == 2
    assert report.size_bytes == (tmp_path / "delta").stat().st_size == found.size_bytes
    digests = checkpoint.check_digests(b).digests
    assert (
        digests["a"]
        == blocks.tensor_digest(
            bytes(one) for one in found.digests[found.tensors["a"].blocks]
        ).tensor.hex()
    )
    assert os.listdir(tmp_path) == ["a", "b", "delta"] or len(os.listdir(tmp_path)) == 3


def test_the_delta_of_equal_checkpoints_has_no_payload(tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE)
    report = checkpoint.diff(a, a, tmp_path / "delta")
    assert not (report.changed or report.added or report.replaced or report.removed)
    assert report.changed_blocks == report.payload_bytes == 0
    checkpoint.apply(a, tmp_path / "delta", tmp_path / "out")
    assert checkpoint.compare(a, tmp_path / "out").is_same


def read_bytes(tmp_path: Path, a: Path, b: Path, trust: bool = True) -> int:
    report = checkpoint.diff(a, b, tmp_path / "delta", overwrite=True, trust_digests=trust)
    assert report.changed == ("a",)
    checkpoint.apply(a, tmp_path / "delta", tmp_path / "out", overwrite=True)
    assert checkpoint.compare(b, tmp_path / "out").is_same
    return report.read_bytes


def test_trusted_digests_of_manifests_spare_reads(tmp_path: Path) -> None:
    plain = [write(tmp_path / "pa", WHOLE)]
    plain.append(write(tmp_path / "pb", {**WHOLE, "a": changed(WHOLE["a"], 3)}))
    known = []
    for path in plain:
        known.append(tmp_path / f"k{path.name}")
        checkpoint.convert(path, known[-1], to="full")
    total = sum(one.size_bytes for one in WHOLE.values())
    assert read_bytes(tmp_path, *plain, trust=False) == 2 * total
    # One block of 240 bytes changed.
    assert read_bytes(tmp_path, *known) == 2 * 240
    assert read_bytes(tmp_path, known[0], plain[1]) == total + 240
    assert read_bytes(tmp_path, plain[0], known[1]) == total + 240
    for pair in ((known[0], known[1]), (known[0], plain[1]), (plain[0], known[1])):
        assert read_bytes(tmp_path, *pair, trust=False) == 2 * total


def test_a_block_that_differs_from_its_manifest_is_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE)
    b = tmp_path / "b"
    checkpoint.convert(write(tmp_path / "pb", {**WHOLE, "a": changed(WHOLE["a"], 3)}), b, to="full")
    path = b / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[checkpoint.open(b)["a"].file_range(0).start_bytes] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(DigestError, match="tensor 'a', is not what was written"):
        checkpoint.diff(a, b, tmp_path / "delta")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "pb"]


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_bytes_that_contradict_equal_digests_are_an_error(tmp_path: Path, damaged: str) -> None:
    write(tmp_path / "plain", WHOLE)
    for name in "ab":
        checkpoint.convert(tmp_path / "plain", tmp_path / name, to="full")
    path = tmp_path / damaged / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[checkpoint.open(tmp_path / damaged)["b"].file_range(0).start_bytes] ^= 255
    path.write_bytes(bytes(content))
    pair = tmp_path / "a", tmp_path / "b"
    with pytest.raises(DigestError, match=f"{damaged}/model.*tensor 'b', is not what was written"):
        checkpoint.diff(*pair, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    assert not checkpoint.diff(*pair, tmp_path / "delta", trust_digests=True).changed


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_deltas_do_not_depend_on_the_order_of_threads(
    tmp_path: Path, compression: str | None
) -> None:
    a = write(tmp_path / "a", WHOLE)
    b = write(tmp_path / "b", {**WHOLE, "a": changed(WHOLE["a"], *range(0, 800, 7))})
    found = []
    for threads in (1, 4):
        checkpoint.diff(
            a, b, tmp_path / "delta", threads=threads, overwrite=True, compression=compression
        )
        delta = checkpoint.read_delta(tmp_path / "delta")
        found.append((delta.digests.tobytes(), delta.records[["block", "words", "size"]].tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"compression": "gzip"}, "compression 'gzip'; expected one of zstd"),
        ({"extra_bytes": 1000}, "a memory limit of 1000 bytes; a thread needs"),
        ({"threads": 0}, "threads 0"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    a = write(tmp_path / "a", WHOLE)
    with pytest.raises(UsageError, match=told):
        checkpoint.diff(a, a, tmp_path / "delta", **arguments)
    assert os.listdir(tmp_path) == ["a"]


def test_an_existing_file_is_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE)
    (tmp_path / "delta").write_text("mine")
    with pytest.raises(UsageError, match="exists; give --overwrite"):
        checkpoint.diff(a, a, tmp_path / "delta")
    assert (tmp_path / "delta").read_text() == "mine"
    with pytest.raises(UsageError, match="is a folder"):
        checkpoint.diff(a, a, a, overwrite=True)
    with pytest.raises(UsageError, match="is not a folder; create it first"):
        checkpoint.diff(a, a, tmp_path / "no" / "delta")


def test_elements_of_every_width(tmp_path: Path) -> None:
    names = ["uint8", "float8_e4m3fn", "bfloat16", "float32", "float64", "complex64", "bool"]
    whole = {name: tensor(name, (50, 30), 1) for name in names}
    a = write(tmp_path / "a", whole)
    b = write(
        tmp_path / "b",
        {
            name: Tensor(
                one.dtype,
                np.where(
                    np.arange(1500).reshape(50, 30) % 9, one.bits, tensor(name, (50, 30), 2).bits
                ),
            )
            for name, one in whole.items()
        },
    )
    for compression in (None, "zstd"):
        checkpoint.diff(a, b, tmp_path / "delta", compression=compression, overwrite=True)
        checkpoint.apply(a, tmp_path / "delta", tmp_path / "out", overwrite=True)
        assert checkpoint.compare(b, tmp_path / "out").is_same


PROGRAM = """
import sys
import numpy, xxhash
from reshard.checkpoint import apply, diff

def status(name):
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[name].split()[0]) * 1024

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
baseline_bytes = status("VmRSS")
before, after, delta, out = sys.argv[1:]
diff(before, after, delta, extra_bytes=64 << 20)
print(status("VmHWM") - baseline_bytes)
apply(before, delta, out, extra_bytes=64 << 20)
print(status("VmHWM") - baseline_bytes)
"""


@pytest.mark.linux_only(reason="memory is read from /proc")
@pytest.mark.parametrize("share", keep_spread(1, (0.4, 0.03), "less that changed"))
def test_diff_takes_bounded_memory_whatever_changed(tmp_path: Path, share: float) -> None:
    """Whatever the size of tensors and of what changed."""
    rows = np.zeros((1 << 10, 1 << 14), np.uint16)
    bf16 = tensor("bfloat16", (1,)).dtype
    for name in ("a", "b"):
        write(tmp_path / name, {f"w{number}": Tensor(bf16, rows) for number in range(5)})
        rows = rows.copy()
        rows[np.random.default_rng(0).random(rows.shape, dtype=np.float32) < share] = 7
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(tmp_path / one for one in ("a", "b", "delta", "out"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    limit_bytes = (64 + 64) << 20
    assert [int(line) < limit_bytes for line in done.stdout.split()] == [True, True], done.stdout


def test_small_tensors_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 14)
    before = {f"{n:03}.up": tensor("float32", (4, 5), n) for n in range(80)}
    before |= {f"{n:03}.down": tensor("bfloat16", (7,), n) for n in range(80)}
    before |= {"large": tensor("float32", (80, 80), 1), "empty": tensor("int8", (0, 3), 4)}
    after = dict(before)
    for name in ("003.up", "041.up", "041.down", "079.down"):
        after[name] = changed(before[name], 2)
    after["large"] = changed(before["large"], 6000)
    after["050.up"] = tensor("float32", (5, 4), 50)
    del after["060.down"]
    after |= {f"new.{n}": tensor("int16", (9,), n) for n in range(20)}
    a, b = write(tmp_path / "a", before), write(tmp_path / "b", after)
    calls = []
    read = BlockReader.read

    def count(self: BlockReader, *arguments: Any) -> Any:
        calls.append(len(arguments[0]))
        return read(self, *arguments)

    monkeypatch.setattr(BlockReader, "read", count)
    report = checkpoint.diff(a, b, tmp_path / "delta")
    # Of 180 tensors afterwards: some batches of each checkpoint, and the blocks of the large one.
    assert len(calls) <= 20
    assert {*report.changed} == {"003.up", "041.up", "041.down", "079.down", "large"}
    assert report.added == tuple(name for name in after if name.startswith("new."))
    assert (report.replaced, report.removed) == (("050.up",), ("060.down",))
    assert report.changed_bytes == 4 + 4 + 2 + 2 + 4
    monkeypatch.undo()
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 14)
    checkpoint.apply(a, tmp_path / "delta", tmp_path / "applied")
    assert checkpoint.compare(tmp_path / "applied", b).is_same


def test_small_tensors_with_known_digests_are_read_from_one_side(tmp_path: Path) -> None:
    before = {f"{n:03}": tensor("float32", (4, 5), n) for n in range(40)}
    a = write(tmp_path / "a", before)
    b = write(tmp_path / "b", {**before, "007": changed(before["007"], 1)})
    checkpoint.convert(a, tmp_path / "known_a", to="full")
    checkpoint.convert(b, tmp_path / "known_b", to="full")
    size = 40 * 80
    for left, right, most in (
        ("known_a", "known_b", 2 * 80),
        ("a", "known_a", size),
        ("known_a", "a", size),
        ("a", "known_b", 2 * size),
    ):
        pair = tmp_path / left, tmp_path / right
        report = checkpoint.diff(*pair, tmp_path / f"{left}-{right}", trust_digests=True)
        assert report.changed == (("007",) if right == "known_b" else ())
        # Whole sectors are read.
        assert report.read_bytes <= most + 8192
