"""What the array API's own suite is run with: arrays in shards, and the lists of reasons."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).parent.parent / "tools"
ARRAYS = [np.arange(count) - first for count in (5, 12, 24) for first in range(24)]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


@pytest.fixture(params=["numpy", "torch"])
def namespace(request: pytest.FixtureRequest, tools: None) -> Any:
    pytest.importorskip(request.param)
    return import_module(f"array_api_suite.{request.param}_shards")


def test_arrays_are_cut_in_every_way_and_have_their_elements(namespace: Any) -> None:
    cuts = set()
    for data in ARRAYS:
        for dtype in ("int16", "float32", "complex128", "bool"):
            made = namespace.asarray(data.astype(dtype))
            assert np.array_equal(made.to_dense(), data.astype(dtype))
            assert made.dtype.name == dtype
            cuts.add(None if made.spec is None else str(made.spec))
    # Whole, copied, uneven, in another order of axes, nested, by turns, and sums that wait.
    expected = {"-", "y", "y x", "x / y", "x@cyclic1", "x@balanced", "y | sum(x)", "- | sum(y)"}
    assert expected | {None} <= cuts


def test_the_choice_depends_on_the_array_alone(namespace: Any) -> None:
    for data in ARRAYS[:20]:
        assert namespace.asarray(data).spec is namespace.asarray(data.copy()).spec


def test_negative_zeros_do_not_wait(namespace: Any) -> None:
    for count in range(1, 40):
        made = namespace.asarray(np.full(count, -0.0))
        assert made.spec is None or not made.spec.partial_axes
        assert np.all(np.signbit(np.asarray(made.to_dense())))


def test_every_entry_has_a_reason() -> None:
    for path in (TOOLS / "array_api_suite" / "reasons").glob("*.txt"):
        for block in path.read_text().strip().split("\n\n"):
            reason, *tests = block.splitlines()
            assert reason.startswith("# ") and tests
            assert all(test.startswith("array_api_tests/test_") for test in tests)


def test_types_that_a_library_lacks_are_left_out_where_the_suite_draws_types(
    tools: None, tmp_path: Path
) -> None:
    for folder in ("array_api_tests", "array-api/src"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    # What the suite's own conftest has of options.
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    for name in ('disable-deadline', 'hypothesis-derandomize'):\n"
        "        parser.addoption(f'--{name}', action='store_true')\n"
        "    for name in ('max-examples', 'xfails-file'):\n"
        "        parser.addoption(f'--{name}')\n"
    )
    (tmp_path / "array_api_tests" / "test_types.py").write_text(
        "import os\n"
        "def test_it():\n"
        "    left_out = os.environ.get('ARRAY_API_TESTS_SKIP_DTYPES')\n"
        "    assert left_out == {'numpy': None, 'torch': 'uint16,uint32,uint64'}[\n"
        "        os.environ['ARRAY_API_TESTS_MODULE'].split('.')[1].split('_')[0]]\n"
    )
    (tmp_path / "array_api_tests" / "test_other.py").write_text("def test_it(): assert False\n")
    options = ["--only", "numpy", "torch", "--processes", "0", "--tests", "test_types.py"]
    command = [sys.executable, "-m", "array_api_suite", str(tmp_path), *options]
    done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("1 passed")) == (0, 2), done.stdout + done.stderr


def test_a_folder_that_has_no_suite_is_told(tmp_path: Path, tools: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "array_api_suite", str(tmp_path)],
        cwd=TOOLS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "has no array_api_tests: git clone --recurse-submodules" in done.stderr
