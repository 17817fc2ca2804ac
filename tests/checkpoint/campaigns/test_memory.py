"""Every format is read and written in the memory that a conversion may take.

All is measured in one process of its own, where what each conversion takes follows from what it
allocates: `memory_process.py` says how.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from checkpoint.campaigns import memory_process as program
from reshard.checkpoint import shipped_formats
from reshard.checkpoint.formats.registry import written_names
from selection import choose

#: What is allocated beside the buffers of a run: rows of plans, headers, the pages of code that
#: nothing has touched before. No tensor of 48 MiB goes into it.
SLACK_BYTES = 8 * program.MIB


#: Names of the checkpoints whose memory is measured: every fourth one by default.
MEASURED = [row.name for row in (*program.WRITTEN, *program.READ)][:: choose(4, 1)]


def test_no_format_is_missing() -> None:
    assert {row.format for row in program.WRITTEN} == {*written_names()}
    read = {row.format for row in (*program.WRITTEN, *program.READ)}
    assert read == {one.name for one in shipped_formats()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("memory")
    done = subprocess.run(
        [sys.executable, program.__file__, folder, *MEASURED],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **program.ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("way", ["written", "read"])
def test_what_a_conversion_takes_is_within_its_limit(
    measured: list[dict[str, Any]], way: str
) -> None:
    rows = {"written": program.WRITTEN, "read": (*program.WRITTEN, *program.READ)}[way]
    limits = {row.name: row.limit_bytes for row in rows if row.name in MEASURED}
    found = {one["name"]: one for one in measured if one["way"] == way}
    assert found.keys() == limits.keys()
    for name, one in found.items():
        assert one["promised_bytes"] <= limits[name], name
        assert one["peak_bytes"] <= one["promised_bytes"] + SLACK_BYTES, name
    # The measure sees what is allocated: blocks are of 4 MiB.
    assert max(one["peak_bytes"] for one in found.values()) >= 2 * program.MIB
