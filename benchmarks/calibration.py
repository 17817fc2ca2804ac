"""Do estimates hold after `reshard calibrate`, and is what they choose the quicker way?

Four gloo ranks of this machine are calibrated, as `reshard calibrate` does it. Then every case of
`benchmarks/live.py` is measured by both ways, the direct exchange and the program of collectives,
both into memory that exists, in turns; and estimated, from the preset file alone. Cases and
calibration are minutes apart, so what else the machine does counts against the estimates.

Expected before the first run: estimates within 30 % of medians, and the choice the quicker way in
9 of 10 cases. Where both ways send the same messages, which is quicker is decided by noise; a
choice counts as right where it takes at most 10 % longer, and how many are right to the letter is
printed beside.

With `--folder` the preset and every measurement are kept there as soon as they are taken. A run
that is called again goes on behind them, and only reports where nothing is left. Nothing more is
measured after `--budget` seconds.

    python benchmarks/calibration.py [--seconds 60] [--largest-mib 64] [--sizes-mib 256 16]
                                     [--repeat 5] [--passes 2] [--preset FILE] [--json FILE]
                                     [--folder FOLDER] [--budget 330]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
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


class Times:
    """Measurements by case, size and way. Those of a folder are read from there, and kept there."""

    def __init__(self, folder: Path | None, is_kept: bool) -> None:
        self._path = None if folder is None else folder / "times.jsonl"
        self._is_kept = is_kept
        self.taken: dict[tuple[str, int, str], list[float]] = {}
        if self._path is not None and self._path.exists():
            whole, newline, rest = self._path.read_text().rpartition("\n")
            for line in whole.splitlines():
                self._add(*json.loads(line))
            if rest and is_kept:
                # An interrupted run has left a part of a line.
                self._path.write_text(whole + newline)

    def _add(self, case: str, size_mib: int, way: str, seconds_s: float) -> None:
        self.taken.setdefault((case, size_mib, way), []).append(seconds_s)

    def add(self, case: str, size_mib: int, way: str, seconds_s: float) -> None:
        self._add(case, size_mib, way, seconds_s)
        if self._path is not None and self._is_kept:
            with self._path.open("a") as file:
                file.write(json.dumps([case, size_mib, way, seconds_s]) + "\n")

    def least(self, case: str, size_mib: int) -> int:
        """How often every way of a case was measured that was measured at all; 0 for none."""
        of = [
            len(s) for (name, size, _), s in self.taken.items() if (name, size) == (case, size_mib)
        ]
        return min(of, default=0)

    @property
    def medians(self) -> dict[tuple[str, int, str], float]:
        return {key: statistics.median(times) for key, times in self.taken.items()}


def run_as_rank(options: argparse.Namespace) -> None:
    """Calibration and all cases, on one rank of the job."""
    import torch
    import torch.distributed as dist

    begun_s = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch._logging.set_logs(all=40)
    is_first = dist.get_rank() == 0
    folder = None if options.folder is None else Path(options.folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    times = Times(folder, is_first)
    topology = topology_of(options, folder, is_first)
    is_over = torch.zeros(1)
    for turns in range(options.repeat, options.passes * options.repeat + 1, options.repeat):
        for size_mib in options.sizes_mib:
            for case in options.cases:
                is_over[0] = (
                    options.budget is not None and time.monotonic() - begun_s > options.budget
                )
                # The first rank's clock counts, so that all end together.
                dist.broadcast(is_over, 0)
                if is_over or times.least(case, size_mib) >= turns:
                    continue
                ways = ways_of(case, size_mib, 64 * MIB, ("out", "program"))
                for turn in range(options.repeat + 1):
                    for way, (action, result_bytes) in ways.items():
                        seconds_s = measured(action, result_bytes).seconds_s
                        if turn:
                            times.add(case, size_mib, way, seconds_s)
    medians = times.medians
    # All ranks together make the meshes of torch that a row needs.
    rows = [row_of(case, size, medians, topology) for case, size, way in medians if way == "out"]
    if is_first:
        report(rows)
        turns = Counter(len(of) for of in times.taken.values())
        told = ", ".join(f"{n} medians of {of}" for of, n in sorted(turns.items()))
        print(told + ("; the time is over, call it again to go on" if is_over else ""), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def topology_of(options: argparse.Namespace, folder: Path | None, is_first: bool) -> object:
    """What is measured of this machine now, or was before."""
    import torch.distributed as dist

    from reshard.cost import load_preset, preset_text
    from reshard.torch.calibration import calibrate

    kept = None if folder is None else folder / "preset.toml"
    if options.preset is not None:
        return load_preset(options.preset).topology()
    if kept is not None and kept.exists():
        return load_preset(kept).topology()
    # No rank may find the file that another writes.
    dist.barrier()
    found = calibrate(seconds_s=options.seconds, largest_bytes=options.largest_mib * MIB)
    text = preset_text(found.preset)
    if is_first:
        print(text)
        print(f"{found.rounds} rounds, half within {found.fitted.typical_error:.0%}\n")
        if kept is not None:
            kept.write_text(text)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "calibrated.toml"
        path.write_text(text)
        return load_preset(path).topology()


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
        f"take {MARGIN - 1:.0%}; in {exact} to the letter"
    )
    for way, size_mib in itertools.product(
        ("exchange", "program"), sorted({r.size_mib for r in rows})
    ):
        of = [
            (getattr(row, f"{way}_estimate_s") / getattr(row, f"{way}_s"), row.case)
            for row in rows
            if row.size_mib == size_mib and getattr(row, f"{way}_s") is not None
        ]
        mean = statistics.geometric_mean(ratio for ratio, _ in of) if of else 1.0
        far = ", ".join(f"{c} {r:.2f}" for r, c in sorted(of) if abs(r - 1) > WITHIN) or "none"
        print(f"{way:8} {size_mib:4} MiB: estimates are {mean:.2f} of the medians; far off: {far}")


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
    parser.add_argument(
        "--folder", help="where the preset and measurements are kept, to go on from"
    )
    parser.add_argument("--budget", type=float, help="seconds after which nothing is begun")
    options = parser.parse_args()
    if is_rank():
        run_as_rank(options)
    else:
        run_as_ranks(RANKS)


if __name__ == "__main__":
    main()
