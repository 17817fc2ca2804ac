"""Do estimates hold after `reshard calibrate`, and is what they choose the quicker way?

Four gloo ranks of this machine are calibrated, as `reshard calibrate` does it. Then every case of
`benchmarks/live.py` is measured by both ways, the direct exchange and the program of collectives,
both into memory that exists, in turns; and estimated, from the preset file alone. Cases and
calibration are minutes apart, so what else the machine does counts against the estimates.

Expected before the first run: estimates within 30 % of medians, and the choice the quicker way in
9 of 10 cases. Where both ways send the same messages, which is quicker is decided by noise; a
choice counts as right where it takes at most 10 % longer, and how many are right to the letter is
printed beside.

    python benchmarks/calibration.py [--seconds 60] [--largest-mib 64] [--sizes-mib 256 16]
                                     [--repeat 5] [--passes 2] [--preset FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from live import CASES, MIB, RANKS, measured, shape_of, sides_of, ways_of
from ranks import is_rank, run_as_ranks

MARGIN = 1.1
WITHIN = 0.3


@dataclass(frozen=True)
class Row:
    """One case by both ways; the program's are None where there is none."""

    case: str
    size_mib: int
    exchange_s: float
    exchange_estimate_s: float
    program_s: float | None
    program_estimate_s: float | None
    chosen: str

    @property
    def ratios(self) -> list[float]:
        """Estimates over medians."""
        ratios = [self.exchange_estimate_s / self.exchange_s]
        if self.program_s is not None and self.program_estimate_s is not None:
            ratios.append(self.program_estimate_s / self.program_s)
        return ratios

    @property
    def loses(self) -> float:
        """What was chosen over the quicker way."""
        if self.program_s is None:
            return 1.0
        chosen_s = self.program_s if self.chosen == "program" else self.exchange_s
        return chosen_s / min(self.program_s, self.exchange_s)

    def __str__(self) -> str:
        cells = [f"{self.case:14} {self.size_mib:4} MiB"]
        pairs = [
            (self.exchange_s, self.exchange_estimate_s),
            (self.program_s, self.program_estimate_s),
        ]
        for seconds_s, estimate_s in pairs:
            if seconds_s is None or estimate_s is None:
                cells.append(f"{'-':>27}")
                continue
            ratio = estimate_s / seconds_s
            cells.append(f"{seconds_s * 1e3:8.1f} {estimate_s * 1e3:8.1f} ms {ratio:6.2f}")
        return "  ".join([*cells, f"{self.chosen:8} {self.loses:5.2f}"])


def run_as_rank(options: argparse.Namespace) -> None:
    """Calibration and all cases, on one rank of the job."""
    import torch
    import torch.distributed as dist

    from reshard.cost import load_preset, preset_text
    from reshard.torch.calibration import calibrate

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch._logging.set_logs(all=40)
    is_first = dist.get_rank() == 0
    if options.preset is None:
        found = calibrate(seconds_s=options.seconds, largest_bytes=options.largest_mib * MIB)
        text = preset_text(found.preset)
        if is_first:
            print(text)
            print(f"{found.rounds} rounds, half within {found.fitted.typical_error:.0%}\n")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "calibrated.toml"
            path.write_text(text)
            topology = load_preset(path).topology()
    else:
        topology = load_preset(options.preset).topology()
    taken: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(options.passes):
        for size_mib in options.sizes_mib:
            for case in options.cases:
                ways = ways_of(case, size_mib, 64 * MIB, ("out", "program"))
                for turn in range(options.repeat + 1):
                    for way, (action, result_bytes) in ways.items():
                        seconds_s = measured(action, result_bytes).seconds_s
                        if turn:
                            taken.setdefault((case, size_mib, way), []).append(seconds_s)
    medians = {key: statistics.median(times) for key, times in taken.items()}
    # All ranks together make the meshes of torch that a row needs.
    rows = [row_of(case, size, medians, topology) for case, size, way in medians if way == "out"]
    if is_first:
        report(rows)
        if options.json:
            Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def row_of(
    case: str, size_mib: int, medians: dict[tuple[str, int, str], float], topology: object
) -> Row:
    """Both ways of a case, measured and estimated."""
    from reshard.collectives import choose

    (_, _, before), (_, _, after) = sides_of(case)
    choice = choose(before, after, shape_of(size_mib), "float32", topology, library="gloo")
    program_s = medians.get((case, size_mib, "program"))
    return Row(
        case,
        size_mib,
        medians[case, size_mib, "out"],
        choice.exchange_estimate.seconds_s,
        program_s,
        None if program_s is None else choice.program_estimate.seconds_s,
        choice.method,
    )


def report(rows: list[Row]) -> None:
    """The table, and how often the estimates and the choice hold."""
    head = f"{'median':>8} {'estimate':>8}    {'ratio':>6}"
    print(f"{'case':14} {'size':>8}  {'exchange: ' + head:>27}  {'program: ' + head:>27}  chosen")
    for row in rows:
        print(row)
    ratios = [ratio for row in rows for ratio in row.ratios]
    close = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    print(f"{close} of {len(ratios)} estimates are within {WITHIN:.0%} of the median")
    both = [row for row in rows if row.program_s is not None]
    right = sum(row.loses <= MARGIN for row in both)
    exact = sum(row.loses == 1 for row in both)
    print(
        f"the choice is the quicker way in {right} of {len(both)} cases with a program, give or "
        f"take {MARGIN - 1:.0%}; in {exact} to the letter",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of calibration")
    parser.add_argument("--largest-mib", type=int, default=64, help="of a rank, in calibration")
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[256, 16])
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way in a pass")
    parser.add_argument("--passes", type=int, default=2, help="over all cases")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--preset", help="a file of an earlier calibration, instead of a new one")
    parser.add_argument("--json", help="a file for the rows")
    options = parser.parse_args()
    if is_rank():
        run_as_rank(options)
    else:
        run_as_ranks(RANKS)


if __name__ == "__main__":
    main()
