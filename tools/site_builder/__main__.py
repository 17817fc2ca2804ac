"""`python -m site_builder gather` before the generator runs, `check` after it."""

from __future__ import annotations

import sys
from pathlib import Path

from site_builder.links import find_faults
from site_builder.pages import gather_pages
from site_builder.worked import write_worked_changes

ROOT = Path(__file__).parents[2]
SOURCE, BUILT = ROOT / "build" / "site-source", ROOT / "build" / "site"


def main(step: str) -> int:
    """Run one step, and return the exit code."""
    if step == "gather":
        gather_pages(ROOT, SOURCE)
        write_worked_changes(SOURCE / "worked")
        return 0
    faults = find_faults(BUILT)
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    sys.stderr.write(f"{len(faults)} faults in the links of the site\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
