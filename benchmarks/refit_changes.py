"""What does a refit save that sends only what changed since the run before?

Tensors in bfloat16, tensor parallel over 2 gloo ranks by rows, to 2 by columns. Before each turn a
share of the elements changes, scattered all over, or in rows that lie together; all ways then take
turns in one run, and each begins and ends at a barrier:

    whole      every element travels
    pays       `changed_only=True`, which compares nothing between ranks that share memory
    elements   `changed_only="elements"`
    blocks     `changed_only="blocks"`, which scattered changes defeat
    by hand    a copy of what was sent, `nonzero` of what differs, and int32 indices with values to
               every rank, which writes those that are its own: how trainers of reinforcement
               learning send deltas

Told are medians of seconds, of processor time of both ranks together, and the bytes that both
send.

Expected before the first run: three bytes for each element of two that changed, where by hand it is
six for each and rank, so 0.75 % of the bytes of the model at 1 %, which is 1.5 % of what travels; a
comparison reads what is sent twice, so that it may cost more than sending in one machine's memory.

    python benchmarks/refit_changes.py [--tensors 16] [--repeat 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from ranks import is_rank, run_as_ranks

RANKS = 2
SHAPE = (2048, 2048)
SHARES = (0.0, 0.01, 0.03, 0.1, 1.0)


def change(tensor: Any, share: float, is_together: bool) -> None:
    """Other values in a share of the elements."""
    import torch

    if is_together:
        rows = round(share * len(tensor))
        first = int(torch.randint(0, len(tensor) - rows + 1, ()))
        tensor[first : first + rows] += 1
    elif share:
        tensor[torch.rand(tensor.shape) < share] += 1


class HandWritten:
    """Indices and values of what changed, of rows on each rank, to all ranks.

    Args:
        sources: this rank's rows of each tensor.
        rank: this one.
    """

    def __init__(self, sources: list[Any], rank: int) -> None:
        import torch

        self._sources, self._rank = sources, rank
        self._rows, self._columns = len(sources[0]), SHAPE[1] // RANKS
        self._kept = [torch.full_like(one, float("nan")) for one in sources]
        self.targets = [torch.zeros(SHAPE[0], self._columns, dtype=torch.bfloat16) for _ in sources]
        self.kept_bytes = sum(one.nbytes for one in self._kept)
        self.sent_bytes = 0

    def run(self) -> None:
        """Send what changed, and write what of it this rank has."""
        import torch
        import torch.distributed as dist

        self.sent_bytes = 0
        other = 1 - self._rank
        for source, kept, target in zip(self._sources, self._kept, self.targets, strict=True):
            chosen = (source.view(-1) != kept.view(-1)).nonzero().view(-1)
            values = source.view(-1)[chosen]
            kept.view(-1)[chosen] = values
            # In the whole tensor, row by row.
            indices = (chosen + self._rank * source.numel()).to(torch.int32)
            count, theirs = torch.tensor([len(indices)]), torch.zeros(1, dtype=torch.int64)
            works = [dist.isend(count, other), dist.irecv(theirs, other)]
            for work in works:
                work.wait()
            got = torch.empty(int(theirs), dtype=torch.int32)
            got_values = torch.empty(int(theirs), dtype=values.dtype)
            pairs = [(indices, got), (values.view(torch.int16), got_values.view(torch.int16))]
            works = []
            for mine, incoming in pairs:
                if len(mine):
                    works.append(dist.isend(mine, other))
                if len(incoming):
                    works.append(dist.irecv(incoming, other))
            for work in works:
                work.wait()
            self.sent_bytes += count.nbytes + indices.nbytes + values.nbytes
            for at, written in ((indices, values), (got, got_values)):
                rows, columns = at // SHAPE[1], at % SHAPE[1] - self._rank * self._columns
                own = (columns >= 0) & (columns < self._columns)
                target[rows[own], columns[own]] = written[own]

    def cut(self, sources: list[Any]) -> list[Any]:
        """What the targets have to be."""
        import torch
        import torch.distributed as dist

        found = []
        for source in sources:
            parts = [torch.empty_like(source) for _ in range(RANKS)]
            # Gloo gathers no bfloat16 in every release.
            dist.all_gather([one.view(torch.uint8) for one in parts], source.view(torch.uint8))
            begin = self._rank * self._columns
            found.append(torch.cat(parts)[:, begin : begin + self._columns].contiguous())
        return found


def run_as_rank(options: argparse.Namespace) -> None:
    """The whole comparison, on one rank of the job."""
    import torch
    import torch.distributed as dist

    import reshard
    from reshard.torch import Refit

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = reshard.DeviceMesh.of(tp=RANKS)
    layouts = [reshard.spec(mesh, cut).layout(SHAPE) for cut in ("tp, -", "-, tp")]
    names = [f"layers.{number}.weight" for number in range(options.tensors)]
    torch.manual_seed(rank)

    def local(layout: Any) -> Any:
        return torch.rand(layout.local_shape(rank)).to(torch.bfloat16)

    source = {name: (local(layouts[0]), layouts[0]) for name in names}
    ways: dict[str, Any] = {
        "whole": False,
        "pays": True,
        "elements": "elements",
        "blocks": "blocks",
    }
    refits = {
        way: Refit.prepare(
            source, {name: (local(layouts[1]), layouts[1]) for name in names}, changed_only=only
        )
        for way, only in ways.items()
    }
    by_hand = HandWritten([tensor for tensor, _ in source.values()], rank)
    runs = {**{way: refit.run for way, refit in refits.items()}, "by hand": by_hand.run}
    for run in runs.values():
        run()
    for share, is_together in [(one, False) for one in SHARES] + [(0.03, True)]:
        taken: dict[str, list[tuple[float, float, float]]] = {way: [] for way in runs}
        for _ in range(options.repeat):
            for tensor, _ in source.values():
                change(tensor, share, is_together)
            for way, run in runs.items():
                dist.barrier()
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                run()
                dist.barrier()
                seconds = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
                spent = torch.tensor(
                    [time.process_time() - start_cpu_s, (refits.get(way) or by_hand).sent_bytes],
                    dtype=torch.float64,
                )
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                dist.all_reduce(spent)
                cpu_s, sent_bytes = spent.tolist()
                taken[way].append((seconds.item(), cpu_s, sent_bytes))
        if rank == 0:
            whole = [statistics.median(column) for column in zip(*taken["whole"], strict=True)]
            lie = "together" if is_together else "scattered"
            for way, rows in taken.items():
                found = [statistics.median(column) for column in zip(*rows, strict=True)]
                ratios = ", ".join(f"{a / b:.3f}" for a, b in zip(found, whole, strict=True))
                print(
                    f"{share:4.0%} {lie} {way:9} {found[0]:.3f} s, {found[1]:.3f} s of processor, "
                    f"{found[2] / 2**20:.3f} MiB: of whole {ratios}",
                    flush=True,
                )
    if rank == 0:
        kept = {way: round(refit.kept_bytes / 2**20, 1) for way, refit in refits.items()}
        print(f"kept on rank 0, MiB: {kept}, by hand {by_hand.kept_bytes / 2**20:.1f}")
    for refit in refits.values():
        refit.verify()
    expected = by_hand.cut([one for one, _ in source.values()])
    for made, right in zip(by_hand.targets, expected, strict=True):
        assert torch.equal(made.view(torch.int16), right.view(torch.int16))
    dist.barrier()
    sys.stdout.flush()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=int, default=16, help="of 8 MiB each")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each way")
    options = parser.parse_args()
    if is_rank():
        run_as_rank(options)
    else:
        run_as_ranks(RANKS)


if __name__ == "__main__":
    main()
