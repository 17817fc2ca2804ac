"""Progress of long work.

A terminal shows a bar; a log gets plain lines a few seconds apart. Both are on stderr, so that
stdout has only the result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from reshard.checkpoint.storage.threads import Progress, ProgressFunction
from reshard.cli import output
from reshard.text import bytes_text, duration_text, rate_text

LINES_EVERY_S = 5.0
# After a second of work, more than 100 seconds cannot be estimated: the first
# bytes are read while files are opened and buffers filled.
MAX_FORESIGHT = 100


def every_few_seconds(
    line: Callable[..., str],
    write_line: Callable[[str], None] = output.write_error,
    *,
    clock: Callable[[], float] = time.monotonic,
    every_s: float = LINES_EVERY_S,
) -> Callable[..., None]:
    """Return a function that writes a line at most every `every_s` seconds.

    It writes `line(*arguments, elapsed_s)` for its own arguments.

    >>> seconds = iter([0.0, 6.0])
    >>> show = every_few_seconds(progress_text, print, clock=lambda: next(seconds))
    >>> show(Progress(1_200_000_000, 9_800_000_000, 0, "wte"))
    12 % 1.20 GB of 9.80 GB, 200 MB/s, 43.0 s left
    """
    began_s = last_s = clock()

    def show(*arguments: Any) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s >= every_s:
            last_s = now_s
            write_line(line(*arguments, now_s - began_s))

    return show


def progress_text(progress: Progress, elapsed_s: float) -> str:
    """Describe the progress of a run after `elapsed_s`.

    >>> progress_text(Progress(75, 100, 50, "wte"), 5.0)
    '75 % 75 B of 100 B, 5 B/s, 5.00 s left'
    """
    done, total = progress.done_bytes, progress.total_bytes
    percent = 100 * done // total if total else 100
    text = f"{percent} % {bytes_text(done)} of {bytes_text(total)}"
    # Bytes of an earlier run would make the rate look too high.
    moved = done - progress.resumed_bytes
    if moved <= 0 or elapsed_s <= 0:
        return text
    left = left_text((total - done) * elapsed_s / moved, elapsed_s)
    return f"{text}, {rate_text(moved / elapsed_s)}" + (f", {left}" if left else "")


def left_text(left_s: float | None, elapsed_s: float) -> str:
    """Return the time that is left, or nothing if it is too early to estimate.

    >>> left_text(43.2, 6.0), left_text(900_000.0, 6.0), left_text(900_000.0, 9_000.0)
    ('43.2 s left', '', '10 d 10 h left')
    """
    if left_s is None or left_s > MAX_FORESIGHT * elapsed_s:
        return ""
    return f"{duration_text(left_s)} left"


@contextmanager
def shown_progress(verb: str, quiet: bool = False) -> Iterator[ProgressFunction | None]:
    """Show the progress of long work, by the yielded function; yield None if quiet."""
    if quiet or sys.stderr is None:
        yield None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(verb) as show:
            yield show
    else:
        yield every_few_seconds(progress_text, every_s=LINES_EVERY_S)


@contextmanager
def _bar(verb: str) -> Iterator[ProgressFunction]:
    # Imported here: rich takes long to load, and most commands draw no bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        ProgressColumn,
        Task,
        TaskID,
        TextColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar
    from rich.text import Text

    class TimeLeftColumn(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            return Text(left_text(task.time_remaining, task.elapsed or 0.0))

    task: TaskID | None = None
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeLeftColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:

        def show(progress: Progress) -> None:
            nonlocal task
            if task is None:
                # Bytes of an earlier run are not part of this run's rate.
                task = bar.add_task(
                    verb, total=progress.total_bytes, completed=progress.resumed_bytes
                )
            bar.update(task, completed=progress.done_bytes)

        yield show
