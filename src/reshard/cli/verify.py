"""`reshard verify`: do two checkpoints hold the same tensors?"""

from __future__ import annotations

import time
from typing import Any

import click

from reshard.checkpoint.comparison import Comparison, compare
from reshard.checkpoint.conversion import DEFAULT_THREADS
from reshard.cli.failures import DIFFERS, DONE
from reshard.cli.options import as_path, json_option, quiet_option, threads_option
from reshard.cli.output import printable, write, write_json
from reshard.cli.progress import shown_progress
from reshard.show.quantities import bytes_text, count_text, duration_text


@click.command()
@click.argument("left", callback=as_path)
@click.argument("right", callback=as_path)
@threads_option
@json_option
@quiet_option
def verify(left: str, right: str, threads: int | None, as_json: bool, quiet: bool) -> int:
    """Whether LEFT and RIGHT hold the same tensors.

    The same bit for bit, whatever the cuts and the formats. Every byte of both is read; names,
    dtypes and shapes count too. Exit code 0: the same; 1: they differ, and it is said where.

    \b
    Examples:
      reshard verify llama-3-8b llama-tp4
      reshard verify llama-3-8b llama-tp4 --quiet && echo same

    \b
    Keys of --json:
      left, right, same, compared_bytes, seconds_s
      differences [{tensor, problem, elements, first_index}]
      digests {tensor: digest} (of those that are the same)
    """
    began_s = time.monotonic()
    with shown_progress("comparing", quiet) as progress:
        found = compare(left, right, threads=threads or DEFAULT_THREADS, progress=progress)
    seconds_s = time.monotonic() - began_s
    if as_json:
        write_json(_as_json(left, right, found, seconds_s))
    elif not quiet:
        write("\n".join(_as_text(found, seconds_s)))
    return DONE if found.is_same else DIFFERS


def _as_text(found: Comparison, seconds_s: float) -> list[str]:
    lines = [
        f"{printable(difference.name)} {printable(difference.problem)}"
        if difference.elements is None
        else f"{printable(difference.name)}: {difference.problem}"
        for difference in found.differences
    ]
    compared = f"compared {bytes_text(found.compared_bytes)} in {duration_text(seconds_s)}"
    same = len(found.digests)
    if found.is_same:
        return [f"the same {count_text(same, 'tensor')}, bit for bit; {compared}"]
    return [*lines, f"{len(lines)} of {count_text(same + len(lines), 'tensor')} differ; {compared}"]


def _as_json(left: str, right: str, found: Comparison, seconds_s: float) -> dict[str, Any]:
    return {
        "left": left,
        "right": right,
        "same": found.is_same,
        "compared_bytes": found.compared_bytes,
        "seconds_s": seconds_s,
        "differences": [
            {
                "tensor": difference.name,
                "problem": difference.problem,
                "elements": difference.elements,
                "first_index": None
                if difference.first_index is None
                else list(difference.first_index),
            }
            for difference in found.differences
        ],
        "digests": found.digests,
    }
