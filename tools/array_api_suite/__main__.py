"""Run the array API standard's own suite, which is in a folder, on arrays of every kind.

    make array-api SUITE=~/array-api-tests

Ends with 1 where a test fails that is in no list of reasons.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import reshard.spmd as sp

KINDS = {
    "whole": ("reshard.spmd", "numpy.txt"),
    "numpy": ("array_api_suite.numpy_shards", "numpy.txt"),
    "torch": ("array_api_suite.torch_shards", "torch.txt"),
}
# PyTorch has no arithmetic of these, so that tests which draw them would show nothing else.
LEFT_OUT = {"torch": ("uint16", "uint32", "uint64")}
REASONS = Path(__file__).parent / "reasons"
FETCH = (
    "git clone --recurse-submodules https://github.com/data-apis/array-api-tests; give its folder"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="array_api_suite", description=__doc__)
    parser.add_argument("suite", type=Path, help="the folder of the suite")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--max-examples", type=int, default=20, help="of each random test")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--tests", nargs="+", default=[""], metavar="FILE", help="some of its files"
    )
    chosen = parser.parse_args()
    suite = chosen.suite.expanduser().resolve()
    for needed in ("array_api_tests", "array-api/src"):
        if not (suite / needed).is_dir():
            parser.error(f"{suite} has no {needed}: {FETCH}")
    return max(run_kind(kind, suite, chosen) for kind in chosen.only)


def run_kind(kind: str, suite: Path, chosen: argparse.Namespace) -> int:
    """Runs the suite on arrays of a kind; what pytest ends with."""
    module, reasons = KINDS[kind]
    print(f"== {kind}: {module}", flush=True)
    # Paths of this process: relative ones are none in the suite's folder.
    paths = [str(Path(one).resolve()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "ARRAY_API_TESTS_MODULE": module,
        "ARRAY_API_TESTS_VERSION": sp.__array_api_version__,
    }
    if kind in LEFT_OUT:
        environment["ARRAY_API_TESTS_SKIP_DTYPES"] = ",".join(LEFT_OUT[kind])
    # Without -c, the path of the reasons would make this repository's configuration the suite's.
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q"]
    command += [
        "-n",
        str(chosen.processes),
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--tb=short",
        "-r",
        "fEX",
    ]
    # Every run has the same examples, so that the lists of reasons hold. Special cases alone draw
    # one number by chance.
    command += ["--disable-deadline", "--hypothesis-derandomize"]
    command += ["--max-examples", str(chosen.max_examples), "--xfails-file", str(REASONS / reasons)]
    command += [f"array_api_tests/{one}" for one in chosen.tests]
    return subprocess.run(command, cwd=suite, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
