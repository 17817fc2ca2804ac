"""One rank of a job of three: redistributions that go on while their ranks do something else."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import reshard
from rank_cases import run_cases
from refit_models import expect, part, whole
from reshard.errors import RunError
from reshard.layout import Layout
from reshard.torch import redistribute
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.exchange.groups import rank_group
from reshard.torch.exchange.transfer import Transfer

PATIENCE_S = 60
SHAPE = (96, 300)


def layouts() -> tuple[Layout, Layout]:
    mesh = reshard.DeviceMesh.of(tp=3)
    rows, columns = (reshard.spec(mesh, text).layout(SHAPE) for text in ("tp, -", "-, tp"))
    return rows, columns


def own(seed: int, layout: Layout) -> torch.Tensor:
    found = part(whole(seed, *SHAPE), layout, dist.get_rank())
    if found is None:
        raise SystemExit("a rank without a part")
    return found


def tensors_arrive_though_no_rank_waits() -> None:
    """All of it arrives in a fraction of its own memory, though nobody waits for it."""
    rows, columns = layouts()
    out = torch.zeros(columns.local_shape(dist.get_rank()) or ())
    begun = redistribute(
        own(0, rows), columns, source=rows, out=out, async_op=True, extra_bytes=1024
    )
    expect(begun.extra_bytes <= 1024 < begun.received_bytes // 20, "all of it fits")
    end_s = time.monotonic() + PATIENCE_S
    while not begun.has_arrived:
        expect(time.monotonic() < end_s, "it stands still")
        time.sleep(0.01)
    expect(torch.equal(out, own(0, columns)), "what arrived is something else")
    expect(begun.wait() is out and begun.wait() is out, "another result")


def concurrent_redistributions_do_not_mix() -> None:
    """Two, and messages and collectives of the program's own on the same group, do not mix."""
    rows, columns = layouts()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for turn in range(3):
        with torch.inference_mode():
            out = torch.zeros(rows.local_shape(rank) or ())
        first = redistribute(own(turn, rows), columns, source=rows, async_op=True, extra_bytes=4096)
        second = redistribute(
            own(9 + turn, columns), rows, source=columns, out=out, async_op=True, extra_bytes=4096
        )
        mine, theirs = torch.full((1000,), float(rank)), torch.zeros(1000)
        sent = dist.isend(mine, (rank + 1) % ranks)
        dist.recv(theirs, (rank - 1) % ranks)
        sent.wait()
        expect(bool((theirs == (rank - 1) % ranks).all()), "a message of its own is another")
        dist.all_reduce(mine)
        expect(bool((mine == sum(range(ranks))).all()), "a sum of its own is another")
        expect(torch.equal(second.wait(), own(9 + turn, rows)), "the second")
        expect(torch.equal(first.wait(), own(turn, columns)), "the first")


def ranks_may_wait_at_different_times() -> None:
    """Whether a rank goes on is its own affair: the others need not do the same."""
    rows, columns = layouts()
    rank = dist.get_rank()
    for turn in range(4):
        goes_on = rank == turn
        # "auto" would take a program for who waits.
        found = redistribute(
            own(turn, rows), columns, source=rows, async_op=goes_on, method="exchange"
        )
        expect(torch.equal(found.wait() if goes_on else found, own(turn, columns)), f"{turn}")


def results_are_compared_with_the_source() -> None:
    """`verify` finds an element that changed on either side, and leaves out what was combined."""
    rows, columns = layouts()
    source = own(0, rows)
    begun = redistribute(source, columns, source=rows, async_op=True)
    result = begun.wait()
    found = begun.verify()
    expect(found.compared_bytes == result.nbytes and not found.left_out, f"{found}")
    value = float(result[0, 0])
    if dist.get_rank() == 1:
        result[0, 0] = value + 1
    try:
        begun.verify()
    except RunError as error:
        expect("rank 1: not the source's: the tensor (from rank 0)" in str(error), str(error))
    else:
        raise SystemExit("a difference was not found")
    if dist.get_rank() == 1:
        result[0, 0] = value
    begun.verify()
    # A single element, whose stride is that of a wider tensor.
    single, ranks = torch.zeros(1, 2)[:, 1], range(dist.get_world_size())
    begun = redistribute(
        torch.ones(1) if dist.get_rank() == 0 else None,
        Layout.whole((1,), ranks, len(ranks)),
        source=Layout.whole((1,), [0], 1),
        dtype=torch.float32,
        out=single,
        async_op=True,
    )
    expect(begun.wait().item() == 1 and not begun.verify().left_out, f"{single}")
    terms = reshard.spec(reshard.DeviceMesh.of(x=dist.get_world_size()), "- | sum(x)")
    begun = redistribute(
        torch.ones(8),
        reshard.spec(terms.mesh, "x"),
        source=terms,
        shape=(8,),
        async_op=True,
    )
    begun.wait()
    expect(begun.verify().left_out == ("the tensor",), "combined contributions were compared")


def wait_raises_the_errors_of_the_thread() -> None:
    """What the thread raises is raised by `wait`, again and again; a thread runs once at a time."""
    rows, columns = layouts()
    start = MessageExchange.start

    def failing(self: MessageExchange) -> None:
        start(self)
        self.finish()
        raise MemoryError("no memory left")

    MessageExchange.start = failing  # type: ignore[method-assign]
    begun = redistribute(own(0, rows), columns, source=rows, async_op=True)
    for kind, told in ((MemoryError, "no memory left"), (RunError, "not usable")):
        try:
            begun.wait()
        except kind as error:
            expect(told in str(error), str(error))
        else:
            raise SystemExit("an error was lost")
    MessageExchange.start = start  # type: ignore[method-assign]
    cpu = torch.device("cpu")
    transfer = Transfer.prepare(
        lambda: MessageExchange([], None, cpu), rank_group(None), in_background=True
    )
    expect(not transfer.has_arrived, "done before it began")
    for _ in range(2):
        transfer.start()
        try:
            transfer.start()
        except RunError as error:
            expect("runs already" in str(error), str(error))
        else:
            raise SystemExit("a thread ran twice at once")
        transfer.finish()
        expect(transfer.is_done and not transfer.has_failed, "not done")


if __name__ == "__main__":
    run_cases(
        [
            tensors_arrive_though_no_rank_waits,
            concurrent_redistributions_do_not_mix,
            ranks_may_wait_at_different_times,
            results_are_compared_with_the_source,
            wait_raises_the_errors_of_the_thread,
        ]
    )
