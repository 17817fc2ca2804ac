"""`python -m soak`: run the campaigns, print what was done, exit 1 where anything was wrong."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from soak.bad_disks import BadDisks
from soak.campaign import Campaign, Outcome, reproduce, run_campaign
from soak.conversions import Conversions
from soak.fuzzing import Fuzzing
from soak.jobs import Jobs
from soak.kills import Kills
from soak.link_failures import LinkFailures
from soak.link_leaks import LinkLeaks
from soak.mutations import Mutations
from soak.uploads import AzureUploads, Uploads

# The campaign, its goal, and its share of the time.
CAMPAIGNS: tuple[tuple[type[Campaign], int, float], ...] = (
    (Kills, 200, 3),
    (Uploads, 200, 3),
    # Of none where nobody asks, since it takes Azurite.
    (AzureUploads, 0, 3),
    (BadDisks, 400, 3),
    (Jobs, 6, 2),
    (LinkFailures, 30, 3),
    (LinkLeaks, 200, 3),
    (Fuzzing, 5, 3),
    (Mutations, 100_000, 4),
    (Conversions, 10_000, 10),
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    for kind, count, _ in CAMPAIGNS:
        parser.add_argument(
            f"--{kind.goal}", type=int, default=count, metavar="N", help=f"{count} if not given"
        )
    parser.add_argument("--seconds", type=float, default=900, help="for all; 900 if not given")
    parser.add_argument("--seed", type=int, help="the first seed; chosen if not given")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--only", choices=[kind.goal for kind, _, _ in CAMPAIGNS])
    return parser.parse_args()


def _show(outcome: Outcome) -> None:
    done = f"{outcome.counts[outcome.goal]} of {outcome.wanted}"
    ended = "" if outcome.is_done or outcome.failures else ", the time was up"
    print(f"{outcome.goal}: {done} in {outcome.seconds_s:.0f} s{ended}")
    for name, count in sorted(outcome.counts.items()):
        if name != outcome.goal:
            print(f"    {count:8,}  {name}")
    for failure in outcome.failures:
        print(f"\nFAILED {outcome.goal}, seed {failure.seed}\n{failure.text}")
        print(reproduce(outcome.goal, failure.seed))
    sys.stdout.flush()


def _show_progress(outcome: Outcome) -> None:
    """One line: a campaign that is ended from outside has told what it did."""
    counts = sorted(outcome.counts.items())
    others = "".join(f", {count:,} {name}" for name, count in counts if name != outcome.goal)
    failed = f", {len(outcome.failures)} FAILED" if outcome.failures else ""
    print(
        f"  {outcome.seconds_s:.0f} s: {outcome.goal} {outcome.counts[outcome.goal]:,} of "
        f"{outcome.wanted:,}{failed}{others}",
        flush=True,
    )


def main() -> int:
    arguments = _arguments()
    chosen = [
        (kind, getattr(arguments, kind.goal.replace("-", "_")), share)
        for kind, _, share in CAMPAIGNS
        if arguments.only in (None, kind.goal)
        and getattr(arguments, kind.goal.replace("-", "_")) > 0
    ]
    # A prefix of its own, so that the seeds of two runs do not overlap.
    seed = random.randrange(1, 10**6) * 100_000 if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.workers} workers, at most {arguments.seconds:g} s")
    sys.stdout.flush()
    end_s = time.monotonic() + arguments.seconds
    outcomes = []
    while chosen:
        (kind, wanted, share), *rest = chosen
        left_s = max(1.0, end_s - time.monotonic())
        share_s = left_s * share / (share + sum(other[2] for other in rest))
        outcomes.append(
            run_campaign(kind, wanted, seed, share_s, arguments.workers, _show_progress)
        )
        _show(outcomes[-1])
        chosen = rest
    failed = sum(len(outcome.failures) for outcome in outcomes)
    print(f"{failed} failed" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
