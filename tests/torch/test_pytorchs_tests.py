"""PyTorch's own tests of storage pass with the storage of reshard in the place of PyTorch's.

They are no part of this repository: RESHARD_PYTORCH_TESTS names a folder with PyTorch's
`test/distributed/checkpoint`, of the version that is installed. They need the package expecttest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

FOLDER = os.environ.get("RESHARD_PYTORCH_TESTS", "")
# Those of storage; many of the others need several GPUs and skip by themselves.
FILES = (
    "test_file_system_checkpoint_cpu.py",
    "test_file_system_checkpoint.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_save_load_api.py",
)
# An extension of streams that PyTorch has for its tests: reshard refuses what it does not know.
REFUSED = r"TestDistributedStateDictSaveLoadRot13"


@pytest.mark.skipif(not FOLDER, reason="RESHARD_PYTORCH_TESTS names no folder of PyTorch's tests")
@pytest.mark.parametrize("name", FILES)
def test_pytorchs_tests_pass(name: str) -> None:
    path = Path(FOLDER) / name
    if not path.exists():
        pytest.skip(f"{FOLDER} has no {name}")
    pytest.importorskip("expecttest")
    script = Path(__file__).with_name("pytorch_test_process.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, path, "-v"],
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(path.parent), *sys.path]),
        },
    )
    failed = re.findall(r"^(?:ERROR|FAIL): \S+ \(([\w.]+)\)", done.stderr, re.MULTILINE)
    assert re.search(r"^Ran \d+ tests? in", done.stderr, re.MULTILINE), done.stderr[-2000:]
    assert not [one for one in failed if not re.search(REFUSED, one)], done.stderr[-4000:]
