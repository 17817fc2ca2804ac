"""A conversion allocates what it may and no more, whatever the size of its tensors.

Measured from outside of our own accounting: the kernel's high-water mark of a process of its
own (`VmHWM`), set back to what is resident when all is imported. The mark misses no moment, as
samples would, and counts a little too much: pages of libraries that are first touched in the
run. The sources are files of holes, which take no space and are read like others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from checkpoint.checkpoint_files import write_holes
from reshard.checkpoint import plan_conversion
from selection import keep_spread

MIB = 1 << 20
SLACK_BYTES = 64 * MIB
pytestmark = pytest.mark.linux_only(reason="memory is read from /proc")

PROGRAM = """
import json, sys
import numpy, xxhash
from reshard.checkpoint import plan_conversion, run_conversion

def status(name):
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[name].split()[0]) * 1024

order = json.loads(sys.argv[1])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
baseline_bytes = status("VmRSS")
conversion = plan_conversion(order["source"], order["target"], **order["how"])
report = run_conversion(conversion, **order["options"])
print(json.dumps({
    "peak_bytes": status("VmHWM") - baseline_bytes,
    "promised_bytes": conversion.extra_bytes(**order["options"]),
    "written_bytes": report.written_bytes,
}))
"""


def cut_holes(whole: Path, folder: Path, to: str, rule: str) -> Path:
    """The same in shards, which take no space either."""
    folder.mkdir()
    conversion = plan_conversion(whole, folder.with_name("nowhere"), to=to, rules=[rule])
    for file in conversion.write_plan.files:
        (folder / file.stored.name).write_bytes(b"".join(piece for _, piece in file.known_bytes()))
        os.truncate(folder / file.stored.name, file.stored.size_bytes)
    return folder


def measure(source: Path, target: Path, how: Mapping[str, object], **options: int) -> int:
    """The most memory that a conversion takes, in bytes."""
    order = {"source": str(source), "target": str(target), "how": how, "options": options}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(order)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    # Temporary folders of tests are kept for a while.
    shutil.rmtree(target, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["written_bytes"] >= sum(file.stat().st_size for file in source.iterdir()) * 0.99
    assert answer["promised_bytes"] <= options.get("extra_bytes", 256 * MIB)
    return int(answer["peak_bytes"])


COLUMNS = {"to": "tp=2", "rules": ["*=-, tp"]}


@pytest.mark.parametrize("limit_mib", keep_spread(1, (64, None), "a gigabyte for the larger limit"))
def test_rows_to_columns(tmp_path: Path, limit_mib: int | None) -> None:
    whole = write_holes(
        tmp_path / "whole", {f"w{i}": (8192, 2048) for i in range(16 if limit_mib is None else 5)}
    )
    source = cut_holes(whole, tmp_path / "rows", "tp=4", "*=tp, -")
    options = {} if limit_mib is None else {"extra_bytes": limit_mib * MIB}
    peak_bytes = measure(source, tmp_path / "target", COLUMNS, **options)
    assert peak_bytes < (limit_mib or 256) * MIB + SLACK_BYTES


@pytest.mark.parametrize("how", keep_spread(1, (COLUMNS, {"to": "full"}), "the same rows, joined"))
def test_rows_larger_than_the_limit(tmp_path: Path, how: dict[str, object]) -> None:
    whole = write_holes(tmp_path / "whole", {"large": (3, 26 * MIB), "flat": (30 * MIB,)})
    source = cut_holes(whole, tmp_path / "rows", "tp=3", "*=tp, ...")
    how = {**how, "rules": ["large=-, tp", "flat=tp"]} if how is COLUMNS else how
    peak_bytes = measure(source, tmp_path / "target", how, extra_bytes=32 * MIB)
    assert peak_bytes < 32 * MIB + SLACK_BYTES


def test_columns_dealt_out_one_by_one(tmp_path: Path) -> None:
    """Index lists are made for such a copy, and what they select is put together in between."""
    whole = write_holes(tmp_path / "whole", {f"w{i}": (8192, 2048) for i in range(4)})
    how = {"to": "tp=2", "rules": ["*=-, tp@cyclic1"]}
    peak_bytes = measure(whole, tmp_path / "target", how, extra_bytes=64 * MIB)
    assert peak_bytes < 64 * MIB + SLACK_BYTES
