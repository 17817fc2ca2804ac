"""A benchmark in two trees, taking turns: is the one as quick as the other?

    python benchmarks/compare.py ../older live.py --repeat 3 --ways out new

runs `benchmarks/live.py` of the other tree and of this one in turns, each with the Python of its
own `.venv`, and prints every number of its output as medians of both, and their ratio. The ways of
other programs, which both trees measure alike, say how much of a ratio is noise.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*")
HERE = Path(__file__).resolve().parents[1]
# A line of output without its numbers, how often that line came before, and which of its numbers.
Place = tuple[str, int, int]


def numbers_of(output: str) -> dict[Place, float]:
    """Every number of an output, by its place."""
    found: dict[Place, float] = {}
    seen: dict[str, int] = defaultdict(int)
    for line in output.splitlines():
        words = re.sub(r" +", " ", NUMBER.sub("#", line)).strip()
        for index, match in enumerate(NUMBER.finditer(line)):
            found[words, seen[words], index] = float(match.group().replace(",", ""))
        seen[words] += 1
    return found


def run_in(tree: Path, script: str, arguments: list[str]) -> dict[Place, float]:
    """The numbers that one run of a benchmark prints."""
    python = tree / ".venv" / "bin" / "python"
    command = [str(python), str(tree / "benchmarks" / script), *arguments]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return numbers_of(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a clone of another version, with its .venv")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("script", help="such as live.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    chosen = parser.parse_args()
    trees = {"other": chosen.other.resolve(), "this": HERE}
    found: dict[str, dict[Place, list[float]]] = {name: defaultdict(list) for name in trees}
    for turn in range(chosen.turns):
        # The tree that begins changes, so that neither always finds the warmer machine.
        for name in list(trees)[:: 1 if turn % 2 else -1]:
            for place, number in run_in(trees[name], chosen.script, chosen.arguments).items():
                found[name][place].append(number)
    print(f"{'other':>12} {'this':>12} {'ratio':>7}  {chosen.script}, medians of {chosen.turns}")
    for place, numbers in found["this"].items():
        if place not in found["other"]:
            continue
        before = statistics.median(found["other"][place])
        after = statistics.median(numbers)
        ratio = f"{after / before:7.2f}" if before else "      -"
        words, again, index = place
        which = f"number {index + 1} of: {words}" + (f" ({again + 1})" if again else "")
        print(f"{before:12.4g} {after:12.4g} {ratio}  {which}")


if __name__ == "__main__":
    main()
