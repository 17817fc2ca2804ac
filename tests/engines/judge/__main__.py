"""Judge families, and write their records: `python -m engines.judge [NAME...]`."""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import transformers

from .family import load_families
from .records import write_record
from .verdicts import judge_family


def main() -> int:
    """Judge, say what was found, and write the records of families that pass."""
    parser = argparse.ArgumentParser(prog="python -m engines.judge", description=__doc__)
    parser.add_argument("families", nargs="*", help="all when none is named")
    parser.add_argument("--no-record", action="store_true", help="leave the records as they are")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
    families = load_families()
    failed = []
    for name in given.families or sorted(families):
        began = time.perf_counter()
        record, failures = judge_family(families[name])
        verdicts = [verdict for case in record["cases"] for verdict in case["verdicts"].values()]
        refused = sum("refused" in verdict for verdict in verdicts)
        sys.stdout.write(
            f"{name}: {len(verdicts) - refused} equal, {refused} refused, {len(failures)} wrong, "
            f"{time.perf_counter() - began:.1f} s\n"
        )
        for failure in failures:
            sys.stdout.write(f"    {failure}\n")
        if failures:
            failed.append(name)
        elif not given.no_record:
            write_record(name, record)
    return 1 if failed else 0


sys.exit(main())
