"""A conversion that is killed and run again, and what must hold of what it leaves."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint.faulty_process import FaultyProcesses, Outcome, lose_what_was_not_synced
from checkpoint.model_files import contents
from reshard import system
from reshard.checkpoint.conversion.staging import staging_folder
from reshard.checkpoint.manifest import MANIFEST_NAME


class Case:
    """A conversion of `source` in processes that can be killed, and what it gives undisturbed.

    `options` are those of `plan_any`, and `block_bytes`, `sync_bytes`.
    """

    def __init__(
        self, folder: Path, processes: FaultyProcesses, source: Path, **options: Any
    ) -> None:
        self.processes = processes
        self.folder = folder
        self.source = source
        self.options = options
        self.undisturbed = self.run(folder / "undisturbed", has_old=False)
        assert self.undisturbed.error is None, self.undisturbed.error
        self.expected = contents(folder / "undisturbed")
        self.calls = cache(self._calls)

    def run(self, target: Path, has_old: bool, **options: Any) -> Outcome:
        return self.processes.convert(
            self.source,
            target,
            **{"overwrite": has_old, "sync_bytes": 256 * 1024, **self.options, **options},
        )

    def _calls(self, has_old: bool, threads: int) -> list[str]:
        """The calls that an undisturbed run makes."""
        target = self.folder / f"{has_old}-{threads}"
        if has_old:
            write_old(target)
        return self.run(target, has_old, threads=threads).calls


def can_exchange_names() -> bool:
    """Return whether the system swaps two names in one call."""
    return any(system._find_function(name) for name in ("renameat2", "renamex_np"))


def write_old(target: Path) -> None:
    (target / "inner").mkdir(parents=True)
    (target / "old.safetensors").write_bytes(bytes(10_000))
    # Only a checkpoint is replaced, and its manifest shows one.
    (target / MANIFEST_NAME).write_text("{}")
    (target / "inner" / "old.safetensors").write_text("old")


def run_again(case: Case, target: Path, has_old: bool, old: dict[str, str] | None) -> Outcome:
    """The same call after a kill, which finds one or the other whole and makes it the new."""
    seen = contents(target)
    if not can_exchange_names() and not os.path.lexists(target) and old:
        # Killed between the two renames of a system that cannot exchange names.
        assert contents(staging_folder(target) / "previous") == old
    else:
        assert seen in (old, case.expected)
    again = case.run(target, has_old)
    if again.error is not None:
        # Killed when nothing was left to do but to remove the emptied staging folder.
        assert "UsageError: the target exists" in again.error
        assert seen == case.expected
    assert os.listdir(target.parent) == [target.name]
    assert contents(target) == case.expected
    return again


def run_until_the_power_fails(case: Case, target: Path, has_old: bool, kill_at: int) -> Outcome:
    """As a kill, but what was not synced is lost: data, sizes and the names of new files."""
    durable_before = {path.stat().st_ino for path in [target.parent, *target.parent.rglob("*")]}
    synced = target.parent / "synced"
    synced.mkdir()
    outcome = case.run(target, has_old, synced=synced, kill_at=kill_at)
    for folder in (target, staging_folder(target)):
        lose_what_was_not_synced(folder, synced, durable_before)
    for copy in synced.iterdir():
        copy.unlink()
    synced.rmdir()
    return outcome
