"""Compare propagation with Shardy's passes on many random programs.

    PYTHONPATH=tests .venv/bin/python tools/propagation_campaign.py 5000

Prints what was compared, how often each deliberate difference came up, and every other one with
the seed that gives it.
"""

from __future__ import annotations

import argparse
import sys

from shardy_oracle import campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=int, help="how many; 1 or more")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    chosen = parser.parse_args()
    if chosen.programs < 1:
        parser.error(f"{chosen.programs} programs; give 1 or more")
    tally = campaign(range(chosen.seed, chosen.seed + chosen.programs))
    print(tally)
    print("\n\n".join(tally.unexplained))
    return bool(tally.unexplained)


if __name__ == "__main__":
    sys.exit(main())
