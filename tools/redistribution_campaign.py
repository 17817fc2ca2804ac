"""Redistribute between all placements and all shard orders on 2x2x2, one by one, on 8 processes.

    PYTHONPATH=tests .venv/bin/python tools/redistribution_campaign.py

The tests have a sample of these 4,129 pairs one by one, and all of them in one exchange. Each is
compared with the oracle and, where DTensor can move it, with DTensor; and its bytes with the bound.
"""

from __future__ import annotations

import argparse
import sys
import time

from live_processes import run_ranks

RANKS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-s", type=float, default=1800, help="the most seconds to wait")
    chosen = parser.parse_args()
    begun_s = time.perf_counter()
    ended = run_ranks("redistribution_process.py", RANKS, "all", timeout_s=chosen.limit_s)
    failed = [f"rank {rank}: {one.output}" for rank, one in enumerate(ended) if one.code]
    print("\n".join(failed) or f"all are right, {time.perf_counter() - begun_s:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
