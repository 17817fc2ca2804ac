"""A rank of two jobs of the example `examples/link.py`: two of the trainer, then two of the engine.

Arguments: the address where they meet; a port for each job's own rendezvous.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "link.py")

if __name__ == "__main__":
    url, *ports = sys.argv[1:]
    job, rank = divmod(int(os.environ["RANK"]), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_PORT": ports[job],
    }
    sys.argv = [EXAMPLE, ("trainer", "engine")[job], url]
    runpy.run_path(EXAMPLE, run_name="__main__")
