"""Runs of conversions: staged bytes count only if nobody else can have changed them."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import tensor, write_file
from reshard import checkpoint
from reshard.checkpoint.conversion.conversion import ConversionReport
from reshard.checkpoint.conversion.staging import staging_folder
from reshard.errors import InterruptedRunError

WHOLE = {f"layers.{i}.weight": tensor("float32", (16, 48), i) for i in range(4)}


def convert(
    folder: Path, name: str, rules: list[str], replicas: str, *, stops: bool = False
) -> ConversionReport:
    stop = threading.Event()
    return checkpoint.convert(
        folder / "model.safetensors",
        folder / name,
        to="tp=2",
        rules=rules,
        replicas=replicas,
        threads=1,
        stop=stop,
        progress=lambda done: stop.set() if stops and done.done_bytes > 5_000 else None,
    )


def open_to_others(root: Path) -> None:
    root.chmod(0o755)


def copy(root: Path) -> None:
    shutil.copytree(root, root.with_name("copy"))
    shutil.rmtree(root)
    os.rename(root.with_name("copy"), root)


def leave(root: Path) -> None:
    pass


def change_elements(path: Path) -> None:
    """Flip bits of the first 100 bytes that are no header."""
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin : begin + 100] = bytes(byte ^ 1 for byte in content[begin : begin + 100])
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("rules", "replicas"),
    [(["*=tp, -"], "once"), (["*=-, tp"], "once"), (["*=..."], "every")],
    ids=["rows", "columns", "copies"],
)
@pytest.mark.parametrize("touch", [open_to_others, copy])
@pytest.mark.usefixtures("small_blocks")
def test_staged_blocks_that_others_could_change_are_compared(
    tmp_path: Path, rules: list[str], replicas: str, touch: Callable[[Path], None]
) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    with pytest.raises(InterruptedRunError):
        convert(tmp_path, "out", rules, replicas, stops=True)
    root = staging_folder(tmp_path / "out")
    touch(root)
    for path in (root / "content").glob("*.safetensors"):
        change_elements(path)

    report = convert(tmp_path, "out", rules, replicas)

    assert any("were done again" in note for note in report.notes)
    convert(tmp_path, "undisturbed", rules, replicas)
    for path in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("touch", [leave, open_to_others])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_that_nobody_changed_are_not_done_again(
    tmp_path: Path, touch: Callable[[Path], None]
) -> None:
    write_file(tmp_path / "model.safetensors", WHOLE)
    with pytest.raises(InterruptedRunError):
        convert(tmp_path, "out", ["*=-, tp"], "once", stops=True)
    touch(staging_folder(tmp_path / "out"))

    report = convert(tmp_path, "out", ["*=-, tp"], "once")

    assert report.resumed_bytes >= 5_000
    assert ("0 of them were done again" in "".join(report.notes)) == (touch is open_to_others)
