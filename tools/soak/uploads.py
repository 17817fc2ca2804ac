"""Conversions to a bucket, killed at random points and run again, while the server goes wrong.

1. Each worker has a server of its own, and conversions of every kind in processes that are killed
   at a given system call or request (`tests/checkpoint/faulty_process.py`).
2. A seed chooses one, the call, whether an old target is replaced, the number of threads, what the
   server cannot answer, whether the run that goes on is killed too, and whether it is on a machine
   that has nothing of the first.
3. A reader sees the old target, the new one, or is told to wait; the same command makes the
   objects that a folder's files would be. What is in the store when a run begins is not put again
   by it, and within a run no part is put twice but those whose answers were lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import warnings
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from bucket_server import BUCKET, BucketServer, Request, bucket_server
from checkpoint.campaigns.small_checkpoints import CONVERSIONS
from checkpoint.faulty_process import FaultyProcesses, Outcome
from checkpoint.model_files import COLUMNS, ROWS, write_model
from reshard.checkpoint import convert, open_checkpoint
from reshard.checkpoint.blocks import grid as blocks
from reshard.errors import CheckpointError
from soak.wrong import Wrong

BLOCK_BYTES = 512
_LARGE = "rows to columns"
_SMALL = {row.name: row for row in CONVERSIONS}


class Uploads:
    """The campaign."""

    goal = "uploads"
    is_in_memory = False
    address = f"s3://{BUCKET}/some/model"
    faults: tuple[int | str | float, ...] = (500, 503, 429, "slam", "lost", 0.2)

    def __init__(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        self._folder = folder
        self._context = self._serve()
        self._server = self._context.__enter__()
        self._processes = FaultyProcesses()
        self._cases: dict[str, tuple[Path, dict[str, Any], dict[str, bytes], int]] = {}

    def _serve(self) -> AbstractContextManager[BucketServer]:
        return bucket_server(os.environ.__setitem__)

    def _find_case(self, name: str) -> tuple[Path, dict[str, Any], dict[str, bytes], int]:
        """Source and options of a conversion, the objects it gives, and how many calls it makes."""
        if name not in self._cases:
            folder = self._folder / name.replace(" ", "-")
            (folder / "made").mkdir(parents=True)
            if name == _LARGE:
                convert(write_model(folder / "made" / "whole"), folder / "made" / "rows", **ROWS)
                source, options = folder / "made" / "rows", {**COLUMNS, "part_bytes": 1 << 18}
            else:
                # So that there are several; digests of manifests are those of blocks.
                with mock.patch.object(blocks, "BLOCK_BYTES", BLOCK_BYTES):
                    source, options = _SMALL[name].make(folder / "made")
                options |= {"block_bytes": BLOCK_BYTES, "part_bytes": 2 * BLOCK_BYTES}
                options |= {"sync_bytes": 2 * BLOCK_BYTES}
            here = folder / "here"
            expected = self._processes.convert(source, here, **options)
            _expect(expected.error is None, expected.error)
            files = {
                f"some/model/{one.relative_to(here).as_posix()}": one.read_bytes()
                for one in here.rglob("*")
                if one.is_file()
            }
            self._server.empty()
            staging = str(folder / "staging")
            there = self._processes.convert(
                source, self.address, staging=staging, threads=1, **options
            )
            _expect(there.error is None, there.error)
            self._check(files)
            self._cases[name] = source, options, files, len(there.calls)
        return self._cases[name]

    def _check(self, files: dict[str, bytes]) -> None:
        found = self._server.objects
        _expect(found == files, {*found} ^ {*files} or "other bytes")
        _expect(self._server.pending == [], self._server.pending)

    def run(self, seed: int) -> Counter[str]:
        choose = random.Random(seed)
        name = _LARGE if choose.random() < 0.4 else choose.choice(sorted(_SMALL))
        source, options, files, calls = self._find_case(name)
        has_old, threads = choose.random() < 0.4, choose.choice([1, 1, 2, 4])
        is_elsewhere, is_faulty = choose.random() < 0.4, choose.random() < 0.4
        kills_wanted = choose.choice([1, 1, 2])
        place = self._folder / "place"
        place.mkdir()
        server = self._server
        server.empty()
        old = {"some/model/old.txt": b"old", "some/model/reshard.manifest.json": b"{}"}
        if has_old:
            for key, content in old.items():
                server.put(key, content)
            server.requests.clear()
        lost: set[tuple[str, int]] = set()
        if is_faulty:
            faults = {choose.randrange(1, 60): choose.choice(self.faults) for _ in range(4)}

            def go_wrong(number: int, request: Request) -> int | str | float | None:
                fault = faults.pop(number, None)
                if fault == "lost" and request.part is not None:
                    lost.add(request.part)
                return fault

            server.fault = go_wrong

        def convert_at(folder: str, kill_at: int | None = None) -> Outcome:
            return self._processes.convert(
                source,
                self.address,
                staging=str(place / folder),
                threads=threads,
                overwrite=has_old,
                kill_at=kill_at,
                **options,
            )

        kills = kept = 0
        try:
            for _ in range(kills_wanted):
                before = len(server.stored_parts)
                kills += convert_at("first", choose.randrange(calls)).was_killed
                server.settle()
                kept = self._count_kept(before, lost)
                self._look(files, old if has_old else {})
            before = len(server.stored_parts)
            again = convert_at("second" if is_elsewhere else "first")
            if again.error is not None:
                _expect("the target exists" in again.error, again.error)
            self._check(files)
            kept = self._count_kept(before, lost)
        finally:
            shutil.rmtree(place)
        found = {self.goal: kills, name: kills, "elsewhere": kills * is_elsewhere}
        return Counter(found | {"parts that were there": kept})

    def _count_kept(self, before: int, lost: set[tuple[str, int]]) -> int:
        """How many parts were there before a run, which put none of them again.

        `before` is how many had been put, `lost` those whose answers were lost.
        """
        there, put = self._server.stored_parts[:before], self._server.stored_parts[before:]
        twice = [one for one in put if one in there]
        _expect(not twice, f"put though they were there: {twice}")
        repeated = [one for one in put if put.count(one) > 1 and one not in lost]
        _expect(not repeated, f"put twice by one run: {repeated}")
        return len(there)

    def _look(self, files: dict[str, bytes], old: dict[str, bytes]) -> None:
        """Nothing of the new checkpoint is seen before all of it, but by who is told to wait."""
        server = self._server
        fault, server.fault = server.fault, lambda number, request: None
        requests = list(server.requests)
        found = server.objects
        seen = {key: one for key, one in found.items() if "/.reshard/" not in key}
        if seen not in (old, files):
            with contextlib.suppress(CheckpointError):
                raise Wrong(f"{open_checkpoint(self.address)} of {sorted(seen)} was read")
        server.fault, server.requests[:] = fault, requests


class AzureUploads(Uploads):
    """The campaign with Azure's protocol: `AZURITE` is the path of `azurite-blob`.

    Its package waits a quarter of a minute after what goes wrong, so here servers are only late.
    """

    goal = "azure-uploads"
    address = f"az://{BUCKET}/some/model"
    faults = (0.2, 0.5)

    def _serve(self) -> AbstractContextManager[BucketServer]:
        # Only this campaign needs the package.
        from azure_server import azure_server

        if "AZURITE" not in os.environ:
            raise SystemExit("no Azurite: AZURITE=.engines/stores/node_modules/.bin/azurite-blob")
        return azure_server(os.environ["AZURITE"], os.environ.__setitem__)


def _expect(is_so: bool, found: object) -> None:
    if not is_so:
        raise Wrong(str(found))
