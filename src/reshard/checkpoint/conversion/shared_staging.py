"""How do several processes write into one staging folder?

::

    .llama-tp4.reshard-staging/
      content/          written by all, each its own blocks
      journal           of process 0, which owns the folder
      journal.1         of process 1: the blocks it has finished
      journal.2         ...

1. Process 0 opens the folder, alone. What journals of other processes an earlier run left, it
   takes over into its own: so a run may go on with another number of processes.
2. It says where the folder is, or why it could not be opened.
3. Each of the others begins a journal of its own. At the end process 0 reads them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.checkpoint.conversion.journal import (
    FinishedBlocks,
    Journal,
    JournalRecord,
    read_journal,
)
from reshard.checkpoint.conversion.processes import Processes
from reshard.checkpoint.conversion.staging import Staging
from reshard.checkpoint.files.durability import refusals_explained
from reshard.errors import ReshardError, RunError


@dataclass(frozen=True, slots=True)
class SharedStaging:
    """A staging folder, seen from one process. Only process 0 has the `owner`.

    `journal` is this process's own, None when an earlier run had done everything. `finished`
    are the blocks that earlier runs recorded; only process 0 knows them.
    """

    content: Path
    journal: Journal | None
    owner: Staging | None
    finished: Mapping[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def already_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.journal is None

    @property
    def own_journal(self) -> Journal:
        """This process's journal. Raises RunError where there is nothing to do."""
        if self.journal is None:
            raise RunError(f"the conversion in {self.content.parent} is complete")
        return self.journal

    def other_records(self) -> Iterator[JournalRecord]:
        """What the journals of the processes beside the first say."""
        root = self.content.parent
        with refusals_explained("look for the journals of the processes", root):
            paths = sorted(root.glob("journal.*"))
        for path in paths:
            record = None if path.name.endswith(".new") else read_journal(path)
            if record is not None:
                yield record


@contextmanager
def open_shared(
    processes: Processes,
    target: Path,
    conversion_id: str,
    description: Any,
    *,
    overwrite: bool,
    restart: bool,
) -> Iterator[SharedStaging]:
    """The staging folder of a conversion, opened by all processes together.

    Raises what `Staging.open` raises, on process 0; RunError with its message on the others.
    """
    if processes.rank > 0:
        message, place, complete = processes.share(None)
        if message is not None:
            raise RunError(f"process 0 could not begin: {message}")
        content = Path(place)
        if complete:
            yield SharedStaging(content, None, None)
            return
        path = content.parent / f"journal.{processes.rank}"
        with Journal.open(path, conversion_id, description) as journal:
            yield SharedStaging(content, journal, None)
        return
    try:
        staging = Staging.open(
            target, conversion_id, description, overwrite=overwrite, restart=restart
        )
    except ReshardError as error:
        processes.share((str(error), "", False))
        raise
    with staging:
        if staging.already_complete:
            processes.share((None, str(staging.target), True))
            yield SharedStaging(staging.target, None, staging)
            return
        finished = _take_over(staging, conversion_id)
        shared = SharedStaging(staging.content, staging.journal, staging, finished)
        processes.share((None, str(staging.content), False))
        yield shared


def _take_over(staging: Staging, conversion_id: str) -> FinishedBlocks:
    """All that earlier runs recorded; what other processes did is now in process 0's journal."""
    journal = staging.journal
    root = staging.content.parent
    with refusals_explained("take over the journals of an earlier run", root):
        for path in sorted(root.glob("journal.*")):
            record = None if path.name.endswith(".new") else read_journal(path)
            if record is not None and record.conversion_id == conversion_id:
                journal.append_blocks(
                    (tensor, block, digest) for (tensor, block), digest in record.finished.items()
                )
            path.unlink()
    record = read_journal(journal.path)
    return record.finished if record is not None else journal.finished
