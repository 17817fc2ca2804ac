"""Random checkpoints, converted again and again, each result compared with the oracle.

1. A seed gives the choices of Hypothesis' strategies: tensors, a source in one of the formats,
   and up to four conversions in a row, of any format, cut or strategy, by 1 to 4 processes (here
   threads that stand for them) of one or several threads each.
2. Every target is read without reshard and compared with the oracle.
3. One seed in 50 has tensors of some hundred KiB on a real disk, for direct I/O.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.checkpoint_files import (
    TAGGED,
    Cut,
    Tensor,
    check_shards,
    cuts,
    tensor,
    tensors,
    write_file,
    write_ranks,
)
from checkpoint.thread_processes import ThreadProcess, in_processes
from reshard import checkpoint
from reshard.checkpoint.blocks import grid as blocks
from reshard.checkpoint.conversion.conversion import Conversion
from reshard.errors import ReshardError, UsageError
from reshard.recipes.rules import Rule
from soak.stored_elements import (
    check_placement,
    check_torch,
    pieces_of_ranks,
    torch_pieces,
    whole_tensors,
)
from soak.wrong import Wrong

from checkpoint import torch_checkpoints  # isort: skip
from checkpoint.formats.torch_dcp.test_reader import DTYPES, as_torch  # isort: skip
from torch.distributed.tensor import Replicate, Shard  # isort: skip

WHOLE, SHARDED, TORCH = "safetensors", "sharded-safetensors", "torch-dcp"
STRATEGIES = ("round_robin", "simple", "balanced", "sharded", "parallel")
LARGE_EVERY = 50
_CHOICES_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Leg:
    """One conversion. Either a cut, or a strategy over some ranks, or neither: whole tensors."""

    format: str
    cut: Cut | None
    strategy: str | None
    ranks: int
    replicas: str
    most_file_bytes: int | None
    processes: int
    threads: int


@st.composite
def legs(draw: st.DrawFn, wholes: Mapping[str, Tensor]) -> Leg:
    """A conversion of these tensors."""
    form = draw(st.sampled_from([WHOLE, SHARDED, TORCH]))
    way = draw(st.sampled_from(["cut", "cut", "strategy", "whole"]))
    if form == WHOLE:
        way = "whole"
    elif form == SHARDED and way == "whole":
        way = "cut"
    limits = st.sampled_from([None, None, 1, 100, 1000])
    copies = st.sampled_from(["once", "every"])
    return Leg(
        form,
        draw(cuts(wholes)) if way == "cut" else None,
        draw(st.sampled_from(STRATEGIES)) if way == "strategy" else None,
        draw(st.integers(1, 9)),
        draw(copies) if form == SHARDED and way == "cut" else "once",
        draw(limits) if form == WHOLE else None,
        draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        draw(st.integers(1, 3)),
    )


@st.composite
def large_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Tensors of up to some hundred KiB."""
    found = {}
    for number in range(draw(st.integers(1, 2))):
        shape = (draw(st.integers(1, 300)), draw(st.integers(100, 400)))
        found[f"t{number}"] = tensor(draw(st.sampled_from(TAGGED)).name, shape, number)
    return found


class Conversions:
    """The campaign."""

    goal = "conversions"
    is_in_memory = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[str] = Counter()
        warnings.simplefilter("ignore")

        @settings(database=None, deadline=None)
        @given(st.data())
        def journey(data: st.DataObject) -> None:
            self._journey(data)

        self._run = journey.hypothesis.fuzz_one_input
        self._is_large = False
        self._seed = 0

    def run(self, seed: int) -> Counter[str]:
        self._counts = Counter()
        self._seed, self._is_large = seed, seed % LARGE_EVERY == LARGE_EVERY - 1
        self._run(random.Random(seed).randbytes(_CHOICES_BYTES))
        return self._counts

    def _journey(self, data: st.DataObject) -> None:
        wholes = data.draw(large_tensors() if self._is_large else tensors())
        sizes = [64 << 10, 256 << 10] if self._is_large else [16, 64, 1000, 4 << 20]
        block_bytes = data.draw(st.sampled_from(sizes))
        folder = Path(tempfile.mkdtemp(dir=None if self._is_large else self._folder))
        try:
            with mock.patch.object(blocks, "BLOCK_BYTES", block_bytes):
                source = self._write_source(folder, wholes, data)
                for number in range(data.draw(st.integers(1, 4))):
                    leg = data.draw(legs(wholes))
                    source = self._convert(source, folder / str(number), leg, wholes)
        finally:
            shutil.rmtree(folder)

    def _write_source(self, folder: Path, wholes: dict[str, Tensor], data: st.DataObject) -> Path:
        kind = data.draw(st.sampled_from(["one file", "by hand", "by hand", "PyTorch"]))
        source = folder / "source"
        if kind == "by hand":
            write_ranks(source, wholes, *data.draw(cuts(wholes)))
        elif kind == "PyTorch" and all(whole.dtype.name in DTYPES for whole in wholes.values()):
            ranks = data.draw(st.integers(1, 4))
            dims = {
                name: data.draw(st.sampled_from([None, *range(len(whole.shape))]))
                for name, whole in wholes.items()
            }

            def state(rank: int) -> dict[str, object]:
                mesh = torch_checkpoints.mesh_of(ranks)
                return {
                    name: torch_checkpoints.cut(
                        as_torch(whole),
                        mesh,
                        [Replicate() if dims[name] is None else Shard(dims[name])],
                    )
                    for name, whole in wholes.items()
                }

            torch_checkpoints.save(source, ranks, state)
        else:
            kind = "one file"
            source.mkdir()
            write_file(source / "model.safetensors", wholes)
        self._counts[f"sources: {kind}"] += 1
        return source

    def _convert(self, source: Path, target: Path, leg: Leg, wholes: dict[str, Tensor]) -> Path:
        specs = leg.cut[1] if leg.cut else None

        def plan() -> Conversion:
            to = leg.cut[0] if leg.cut else leg.ranks if leg.strategy else "full"
            rules = [Rule(name, str(spec) or "...") for name, spec in (specs or {}).items()]
            return checkpoint.plan_conversion(
                source,
                target,
                to=to,
                rules=rules,
                strategy=leg.strategy,
                format=leg.format,
                replicas=leg.replicas,
                most_file_bytes=leg.most_file_bytes,
            )

        def convert(process: ThreadProcess) -> None:
            conversion = plan()
            only = process if leg.processes > 1 else None
            checkpoint.run_conversion(
                conversion, threads=leg.threads, sync_bytes=10_000, processes=only
            )

        unknown = {whole.dtype.name for whole in wholes.values()} - set(DTYPES)
        if leg.format == TORCH and unknown:
            try:
                plan()
            except UsageError as error:
                if not any(name in str(error) for name in unknown):
                    raise
                self._counts["refused, since PyTorch has not the type"] += 1
                return source
            raise Wrong(f"{unknown} is no type of PyTorch, and was planned")
        try:
            in_processes(leg.processes, convert)
        except ReshardError as error:
            raise Wrong(f"{leg} of {wholes} refused") from error
        self._check(target, leg, wholes)
        self._counts["conversions"] += 1
        self._counts[f"targets: {leg.format}"] += 1
        way = leg.strategy or ("rules" if leg.cut else "whole tensors")
        self._counts[f"cuts: {way}"] += 1
        self._counts[f"processes: {leg.processes}"] += 1
        return target

    def _check(self, target: Path, leg: Leg, wholes: dict[str, Tensor]) -> None:
        specs = leg.cut[1] if leg.cut else None
        if leg.format == WHOLE and whole_tensors(target) != wholes:
            raise Wrong(f"{leg}: {whole_tensors(target)}, expected {wholes}")
        if leg.format == SHARDED and specs is not None:
            check_shards(target, wholes, specs, leg.replicas)
        if leg.format == TORCH:
            check_torch(target, wholes, specs)
        if leg.strategy is not None:
            placed = pieces_of_ranks(target) if leg.format == SHARDED else {}
            for rank, name, _, content in torch_pieces(target) if leg.format == TORCH else ():
                placed.setdefault(name, {})[rank] = content
            check_placement(placed, wholes, leg.strategy, leg.ranks)
        left = sorted(path.name for path in target.parent.iterdir() if path.name.startswith("."))
        if left:
            raise Wrong(f"{left} is left beside the target")
