"""One rank of a job in which something goes wrong; what it must raise is checked on every rank.

Argument: what goes wrong. Ranks that end another way than they should exit with 1.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import reshard
from rank_cases import reported
from rank_endings import end_last
from reshard.collectives import Program, find_program
from reshard.errors import PlanError, ReshardError, RunError, UsageError
from reshard.layout import Layout
from reshard.runs import IntArray
from reshard.system import has_ended
from reshard.topology import Link, Topology
from reshard.torch import is_usable, redistribute
from reshard.torch.exchange import rendezvous
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.consistency import mark_unusable
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES, MessageExchange
from reshard.torch.exchange.groups import RankGroup, rank_group
from reshard.torch.exchange.one_host.shared_memory import NearMessage

TIMEOUT_S = 3
# Where a rank fails, nobody waits for that long.
LONG_S = 60
# With its process number behind it.
CULPRIT = f"rank 1 (host {socket.gethostname()}, process "
SHAPE = (12, 12)


def expect_error(
    kind: type[Exception], text: str, action: Callable[[], Any], culprit: str = "", cause: str = ""
) -> None:
    """The action raises that error, in time, and says so; and who failed, where others did."""
    start_s = time.monotonic()
    try:
        found = action()
    except ReshardError as error:
        if type(error) is not kind or text not in str(error):
            raise SystemExit(f"{type(error).__name__}: {error}\nexpected {kind}: {text}") from error
        is_told = culprit in str(error) and cause in str(error)
        if dist.get_rank() != 1 and not is_told:
            raise SystemExit(f"{error}\nexpected {culprit}{cause}") from error
    else:
        raise SystemExit(f"no error, but {found}; expected {kind}: {text}")
    # Others may have been late by as much as the timeout, and this machine is busy.
    if time.monotonic() - start_s > 4 * TIMEOUT_S:
        raise SystemExit(f"it took {time.monotonic() - start_s} s to raise {kind}")


def layouts() -> tuple[Layout, Layout]:
    mesh = reshard.DeviceMesh.of(x=dist.get_world_size())
    rows, columns = (reshard.spec(mesh, text).layout(SHAPE) for text in ("x, -", "-, x"))
    return rows, columns


def own() -> torch.Tensor:
    return torch.ones(layouts()[0].local_shape(dist.get_rank()))


def arguments_differ_or_cannot_be_used() -> None:
    """Arguments that differ, or cannot be used: all ranks say which, and can go on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, columns = layouts()
    last = ranks - 1
    others = ", ".join(map(str, range(last)))
    with reported("targets_that_differ_between_ranks_are_named"):
        expect_error(
            PlanError,
            f"do not mean the same by 'target': ranks {others} mean `{columns} of shape "
            f"{[*SHAPE]}`; rank {last} mean `{rows} of shape {[*SHAPE]}`. Nothing was moved; give "
            "every rank the",
            lambda: redistribute(own(), rows if rank == last else columns, source=rows),
        )
        mesh = init_device_mesh("cpu", (ranks,))
        where = f"over the ranks {[*range(ranks)]} of shape {[5 * ranks]}"
        expect_error(
            PlanError,
            f"mean `{[Shard(0)]} {where}`; rank {last} mean `{[Replicate()]} {where}`",
            lambda: redistribute(
                torch.ones(5),
                (mesh, [Replicate() if rank == last else Shard(0)]),
                source=(mesh, [Shard(0)]),
                shape=(5 * ranks,),
            ),
        )
    with reported("sources_dtypes_and_limits_that_differ_between_ranks_are_refused"):
        other = Layout.whole((5,), [0], 1)
        expect_error(
            PlanError,
            "'source'",
            lambda: (
                redistribute(
                    torch.ones(5) if rank == 0 else None, other, source=other, dtype=torch.float32
                )
                if rank == 0
                else redistribute(own(), columns, source=rows)
            ),
        )
        expect_error(
            PlanError,
            "'dtype'",
            lambda: redistribute(
                own().to(torch.float64 if rank == 1 else None), columns, source=rows
            ),
        )
        expect_error(
            PlanError,
            "'extra_bytes'",
            lambda: redistribute(own(), columns, source=rows, extra_bytes=1000 + rank),
        )
    with reported("a_source_that_no_rank_gives_is_refused"):
        expect_error(UsageError, "no rank says", lambda: redistribute(None, columns))
    with reported("tensors_that_do_not_fit_the_source_are_refused"):
        expect_error(
            RunError,
            f"rank {last}: ShardError: tensor has local shape [1, 2]",
            lambda: redistribute(torch.ones(1, 2) if rank == last else own(), columns, source=rows),
        )
        expect_error(
            RunError,
            "rank 1: ShardError: tensor is None",
            lambda: redistribute(
                None if rank == 1 else own(), columns, source=rows, dtype=torch.float32
            ),
        )
        expect_error(
            RunError,
            "rank 1: UsageError: dtype=torch.float64, but the tensor is torch.float32",
            lambda: redistribute(
                own(), columns, source=rows, dtype=torch.float64 if rank == 1 else None
            ),
        )
        expect_error(
            RunError,
            "rank 1: UsageError: shape=[9, 9], but the source has shape [12, 12]",
            lambda: redistribute(own(), columns, source=rows, shape=(9, 9) if rank == 1 else None),
        )
        expect_error(
            RunError,
            "rank 1: UsageError: tensor is a int",
            lambda: redistribute(3 if rank == 1 else own(), columns, source=rows),
        )
    with reported("invalid_memory_limits_are_refused"):
        expect_error(
            RunError,
            "extra_bytes=63: too little",
            lambda: redistribute(own(), columns, source=rows, extra_bytes=63),
        )
        expect_error(
            RunError,
            "rank 1: UsageError",
            lambda: redistribute(
                own(), columns, source=rows, extra_bytes="1" if rank == 1 else DEFAULT_EXTRA_BYTES
            ),
        )
    with reported("outs_that_do_not_fit_are_refused"):
        expect_error(
            RunError,
            "rank 0: ShardError: out has local shape",
            lambda: redistribute(
                own(), columns, source=rows, out=torch.ones(1) if rank == 0 else None
            ),
        )
        expect_error(
            RunError,
            "rank 0: ShardError: out has shape",
            lambda: redistribute(
                own(),
                columns,
                source=rows,
                out=torch.ones(1, 1).expand(columns.local_shape(0)) if rank == 0 else None,
            ),
        )
    with reported("freed_tensors_of_other_types_are_refused"):
        freed = own().as_subclass(type("Weight", (torch.Tensor,), {}))
        if rank == 1:
            freed.untyped_storage().resize_(0)
        expect_error(
            RunError,
            "rank 1: ShardError: tensor: its storage was freed",
            lambda: redistribute(freed, columns, source=rows),
        )
    with reported("tensors_written_in_part_are_refused_until_filled"):
        tensor = own()
        if rank == 1:
            mark_unusable(tensor)
        expect_error(
            RunError,
            "rank 1: ShardError: tensor, torch.float32 of shape [4, 12], is partly new and "
            "partly old",
            lambda: redistribute(tensor, columns, source=rows),
        )
        tensor.fill_(1)
        redistribute(tensor, columns, source=rows)
        filled = torch.zeros(columns.local_shape(rank))
        mark_unusable(filled)
        redistribute(tensor, columns, source=rows, out=filled)
        assert is_usable(filled)
    with reported("an_out_that_shares_memory_with_the_tensor_is_refused"):
        expect_error(
            RunError,
            "out shares memory with the tensor itself",
            lambda: redistribute(tensor, rows, source=rows, out=tensor),
        )
    with reported("targets_that_the_ranks_cannot_hold_are_refused"):
        expect_error(
            RunError,
            "UsageError: a target of type str",
            lambda: redistribute(own(), "S(0)", source=rows),
        )
        far = Layout.whole(SHAPE, [ranks], ranks + 1)
        expect_error(
            RunError,
            f"the target has parts on ranks [{ranks}]",
            lambda: redistribute(own(), far, source=rows),
        )
        some = Layout.flat_ranges((12,), {0: (0, 5)})
        expect_error(
            RunError,
            "PlanError",
            lambda: redistribute(
                torch.ones(5) if rank == 0 else None,
                Layout.replicated((12,), ranks),
                source=some,
                dtype=torch.float32,
            ),
        )
    with reported("gradients_that_cannot_be_computed_are_refused"):
        expect_error(
            PlanError,
            "require gradients and others' do not",
            lambda: redistribute(own().requires_grad_(rank == 0), columns, source=rows),
        )
        expect_error(
            UsageError,
            "out= with a tensor that requires gradients",
            lambda: redistribute(own().requires_grad_(), columns, source=rows, async_op=True),
        )
        partial = reshard.spec(reshard.DeviceMesh.of(x=ranks), "-, - | max(x)").layout(SHAPE)
        expect_error(
            RunError,
            "a max of contributions has no gradient",
            lambda: redistribute(torch.ones(SHAPE, requires_grad=True), columns, source=partial),
        )
    with reported("redistribution_works_after_every_refusal"):
        found = redistribute(own(), columns, source=rows)
        assert torch.equal(found, torch.ones(columns.local_shape(rank)))


def methods_differ_or_cannot_be_used() -> None:
    """Methods that differ between ranks, or cannot be: all ranks say why, and can go on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = reshard.DeviceMesh.of(x=ranks)
    rows, columns = (reshard.spec(mesh, text) for text in ("x, -", "-, x"))
    described = {"source": rows, "shape": SHAPE}

    def moved(**options: Any) -> Any:
        return redistribute(own(), options.pop("target", columns), **(described | options))

    shortest = find_program(rows, columns, SHAPE)
    everywhere = reshard.spec(mesh, "-, -")
    halves = find_program(rows, everywhere, SHAPE), find_program(everywhere, columns, SHAPE)
    longer = Program(SHAPE, rows, columns, halves[0].steps + halves[1].steps)
    with reported("methods_and_programs_that_differ_between_ranks_are_refused"):
        expect_error(
            PlanError,
            "do not mean the same by 'method'",
            lambda: moved(method="program" if rank == 1 else "exchange"),
        )
        expect_error(
            PlanError,
            "do not mean the same by 'method'",
            lambda: moved(method=shortest if rank == 1 else longer),
        )
        fast, slow = (
            Topology.of(hosts=1, ranks_per_host=ranks, within_host=Link(1e9, latency_s))
            for latency_s in (0, 10)
        )
        whole, partial = reshard.spec(mesh, "-, -"), reshard.spec(mesh, "-, - | sum(x)")
        expect_error(
            PlanError,
            "do not mean the same by 'method'",
            lambda: redistribute(
                torch.ones(SHAPE),
                whole,
                source=partial,
                shape=SHAPE,
                topology=slow if rank == 1 else fast,
            ),
        )
    with reported("methods_that_cannot_be_used_are_refused"):
        expect_error(
            RunError, "UsageError: method='best'; it is one of", lambda: moved(method="best")
        )
        expect_error(RunError, "UsageError: topology is a str", lambda: moved(topology="gloo-host"))
        expect_error(
            RunError,
            "UsageError: method='program' and a target that is a Layout",
            lambda: moved(method="program", target=columns.layout(SHAPE)),
        )
        fewer = reshard.spec(reshard.DeviceMesh.of(x=ranks - 1), "-, x")
        expect_error(
            RunError,
            "PlanError: no program of collectives leads from `x, -`",
            lambda: moved(method="program", target=fewer),
        )
        expect_error(
            RunError,
            "which are not the source and target",
            lambda: moved(method=find_program(columns, rows, SHAPE)),
        )
        few = Topology.of(hosts=1, ranks_per_host=1, within_host=Link(1e9, 0))
        expect_error(RunError, "LayoutError: rank 1 of a topology", lambda: moved(topology=few))
    with reported("memory_limits_too_small_for_a_program_are_refused"):
        expect_error(
            RunError,
            "too little for <Program of [12, 12]: all-gather, slice>; give at least",
            lambda: moved(method=longer, extra_bytes=256),
        )
        large = {"source": rows, "shape": (256 * ranks, 1024), "extra_bytes": 64}
        expect_error(
            RunError,
            "would be sent in messages of 16, each of which takes about 0.1 ms; give at least",
            lambda: redistribute(torch.ones(256, 1024), columns, **large),
        )
    with reported("programs_run_after_every_refusal"):
        assert torch.equal(moved(method=longer), torch.ones(12, 4))
        assert torch.equal(moved(method="auto", topology=fast), torch.ones(12, 4))


def ranks_outside_the_group_call() -> None:
    """A rank that is none of the group's is told at once."""
    group = dist.new_group([0, 1])
    layout = Layout.replicated(SHAPE, 2)
    if dist.get_rank() > 1:
        expect_error(
            UsageError,
            f"rank {dist.get_rank()} is not in the group",
            lambda: redistribute(None, layout, source=layout, dtype=torch.float32, group=group),
        )
    else:
        tensor = torch.ones(SHAPE)
        assert torch.equal(redistribute(tensor, layout, source=layout, group=group), tensor)


def a_rank_raises_before_it_calls() -> None:
    """One rank raises before it redistributes: the others do not wait for ever."""
    if dist.get_rank() == 1:
        outlive_others()
        return
    rows, columns = layouts()
    expect_error(RunError, "does not answer", lambda: redistribute(own(), columns, source=rows))


def a_rank_calls_alone() -> None:
    """Ranks meet again after one called more often, and joined no collective of the group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    rows, columns = layouts()

    def move() -> Any:
        return redistribute(own(), columns, source=rows, group=group)

    move()
    if rank == 1:
        # As after a call for which the others did not come. It opens connections anew.
        rank_group(group).break_off(RunError("nobody came"))
        with mock.patch.object(
            rendezvous, "timeout_of", return_value=datetime.timedelta(seconds=1)
        ):
            expect_error(RunError, "does not answer", move)
    dist.barrier()
    if rank != 1:
        expect_error(RunError, "nobody came", move)
    total = torch.full((1,), 10**rank)
    dist.all_reduce(total, group=group)
    assert total.item() == sum(10**other for other in range(ranks)), total
    for _ in range(2):
        assert torch.equal(move(), torch.ones(columns.local_shape(rank)))


def outlive_others() -> None:
    """Keep this process alive until the others have raised, so that they do not see it end."""
    board, limit_s = dist.distributed_c10d._get_default_store(), time.monotonic() + LONG_S
    # The store ends with rank 0.
    with contextlib.suppress(RuntimeError):
        while not board.check(["raised/0", "raised/2"]) and time.monotonic() < limit_s:
            time.sleep(0.05)


def in_the_middle(fail: Callable[[], None]) -> None:
    """Rank 1 does something else once messages travel; what others wrote into is not usable."""
    rows, columns = layouts()
    rank = dist.get_rank()
    finish = MessageExchange.finish

    def failing(self: MessageExchange) -> None:
        if rank == 1:
            fail()
        finish(self)

    MessageExchange.finish = failing  # type: ignore[method-assign]
    out = torch.zeros(columns.local_shape(rank))
    # Tiny messages: most are not yet posted when the rank fails.
    begun = redistribute(own(), columns, source=rows, out=out, async_op=True, extra_bytes=64)
    told = f"out, torch.float32 of shape {list(out.shape)}, is partly new and not usable"
    cause = ": out of memory" if fail is out_of_memory else " does not answer"
    expect_error(RunError, told if rank != 1 else "out of memory", begun.wait, CULPRIT, cause)
    expect_error(RunError, "not usable", begun.wait)
    assert not begun.is_usable
    assert not is_usable(out)
    # What the user writes is the user's.
    out.zero_()
    assert is_usable(out)


def out_of_memory() -> None:
    raise ReshardError("out of memory")


def a_rank_is_killed_while_it_moves() -> None:
    in_the_middle(lambda: os.kill(os.getpid(), signal.SIGKILL))


def a_rank_raises_while_it_sends() -> None:
    rank = dist.get_rank()
    if rank == 1:
        in_the_middle(out_of_memory)
        outlive_others()
    else:
        in_the_middle(out_of_memory)


def a_rank_raises_before_it_sends() -> None:
    """Rank 1 has no memory for its messages: the others do not wait for them."""
    rows, columns = layouts()
    rank = dist.get_rank()
    prepare = MessageExchange.__init__

    def failing(self: MessageExchange, *arguments: Any, **options: Any) -> None:
        if rank == 1:
            out_of_memory()
        prepare(self, *arguments, **options)

    MessageExchange.__init__ = failing  # type: ignore[method-assign]
    kind = ReshardError if rank == 1 else RunError
    expect_error(
        kind,
        "out of memory",
        lambda: redistribute(own(), columns, source=rows),
        CULPRIT,
        ": out of memory",
    )
    if rank == 1:
        outlive_others()


def await_word(board: Any, word: str) -> None:
    """Return once a rank has set the word. To wait at a store keeps other threads from it."""
    while not board.check([word]):
        time.sleep(0.05)


def in_a_message(sender: int, receiver: int) -> None:
    """Rank 1 is killed while a message of it, or to it, has gone in part."""
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), (64 << 20,)
    # What ranks share has gone at once.
    os.environ["RESHARD_SHARED_MEMORY"] = "never"
    processes: list[int] = [0] * ranks
    dist.all_gather_object(processes, os.getpid())
    start, board = MessageExchange.start, dist.distributed_c10d._get_default_store()

    def stopping(self: MessageExchange) -> None:
        # The other end has begun.
        time.sleep(0.3)
        start(self)
        board.set("stopping", "")
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill() -> None:
        await_word(board, "stopping")
        # The socket is full.
        time.sleep(0.5)
        os.kill(processes[1], signal.SIGKILL)

    if rank == 1:
        MessageExchange.start = stopping  # type: ignore[method-assign]
    elif rank == 2:
        threading.Thread(target=kill).start()
    source, target = (Layout.whole(shape, [one], ranks) for one in (sender, receiver))
    own = torch.ones(shape, dtype=torch.uint8) if rank == sender else None
    expect_error(
        RunError,
        " does not answer",
        lambda: redistribute(own, target, source=source, dtype=torch.uint8, extra_bytes=256 << 20),
        CULPRIT,
    )


def a_rank_is_killed_while_it_sends() -> None:
    in_a_message(1, 0)


def a_rank_is_killed_while_it_receives() -> None:
    in_a_message(0, 1)


def a_rank_is_killed_while_it_is_read() -> None:
    """Rank 1 is killed while another rank reads its memory, after one of several messages."""
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), (8 << 20,)
    os.environ["RESHARD_DIRECT_READS"] = "always"
    processes: list[int] = [0] * ranks
    dist.all_gather_object(processes, os.getpid())
    read, reads = NearMessage.read, 0

    def read_and_kill(self: NearMessage, into: IntArray) -> None:
        nonlocal reads
        reads += 1
        if reads == 2:
            os.kill(processes[1], signal.SIGKILL)
            while not has_ended(processes[1]):
                time.sleep(0.01)
        read(self, into)

    if rank == 0:
        NearMessage.read = read_and_kill  # type: ignore[method-assign]
    source, target = Layout.whole(shape, [1], ranks), Layout.whole(shape, [0], ranks)
    own = torch.ones(shape, dtype=torch.uint8) if rank == 1 else None
    out = torch.zeros(shape, dtype=torch.uint8) if rank == 0 else None
    expect_error(
        RunError,
        " does not answer",
        lambda: redistribute(own, target, source=source, dtype=torch.uint8, out=out),
        CULPRIT,
    )
    if out is not None:
        # Some of it has arrived, and nobody takes it for all.
        assert reads == 2 and out.any() and not is_usable(out)


def a_rank_is_killed_while_it_sends_to_all() -> None:
    """Rank 1 is killed while others have a part of something large that it tells all."""
    rank, large = dist.get_rank(), 64 << 20
    processes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    broadcast, board = RankGroup.broadcast, dist.distributed_c10d._get_default_store()

    def late(self: RankGroup, tensor: torch.Tensor, sender: int) -> None:
        board.set("late", "")
        # Rank 0 waits for it already, and reads nothing.
        time.sleep(1)
        broadcast(self, tensor, sender)

    def stop_and_kill() -> None:
        await_word(board, "late")
        time.sleep(0.5)
        os.kill(processes[0], signal.SIGSTOP)
        # The socket is full.
        time.sleep(1.5)
        os.kill(processes[1], signal.SIGKILL)
        os.kill(processes[0], signal.SIGCONT)

    def tell() -> None:
        gather(b"1" * large if rank == 1 else b"", None)
        # Rank 2 may have had all of it.
        gather(b"", None)

    if rank == 1:
        RankGroup.broadcast = late  # type: ignore[method-assign]
    elif rank == 2:
        threading.Thread(target=stop_and_kill).start()
    expect_error(RunError, "nothing was moved: ", tell, CULPRIT, " does not answer")


def a_rank_is_killed_while_another_is_late() -> None:
    """Rank 1 is killed while rank 2 is late: rank 0, which waits for rank 2, learns it at once."""
    rank, board = dist.get_rank(), dist.distributed_c10d._get_default_store()
    # Where ranks share memory, rank 0 hears rank 1 first.
    os.environ["RESHARD_SHARED_MEMORY"] = "never"
    rows, columns = layouts()
    redistribute(own(), columns, source=rows)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 2:
        await_word(board, "told")
    expect_error(
        RunError,
        "nothing was moved: ",
        lambda: redistribute(own(), columns, source=rows),
        CULPRIT,
        " does not answer",
    )
    if rank == 0:
        board.set("told", "")


def in_a_program(fail: Callable[[], None], is_slow: bool) -> None:
    """Rank 1 does something else in the second step of a program."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = reshard.DeviceMesh.of(x=ranks)
    source, target = reshard.spec(mesh, "-, - | sum(x)"), reshard.spec(mesh, "-, -")
    run = MessageExchange.run
    runs = 0

    def failing(self: MessageExchange) -> None:
        nonlocal runs
        runs += 1
        if runs == 2 and rank == 1:
            fail()
        run(self)

    MessageExchange.run = failing  # type: ignore[method-assign]
    begun = redistribute(
        torch.ones(SHAPE),
        target,
        source=source,
        shape=SHAPE,
        method="program",
        async_op=True,
        out=torch.zeros(SHAPE),
    )
    cause = ": out of memory" if fail is out_of_memory else " does not answer"
    words = "not usable" if rank != 1 else "out of memory"
    expect_error(RunError, words, begun.wait, CULPRIT, cause)
    expect_error(RunError, "not usable", begun.wait)
    if is_slow and rank == 1:
        outlive_others()


def a_rank_raises_in_a_program() -> None:
    in_a_program(out_of_memory, is_slow=True)


def a_rank_is_killed_in_a_program() -> None:
    in_a_program(lambda: os.kill(os.getpid(), signal.SIGKILL), is_slow=False)


def a_rank_is_killed_that_another_does_not_need() -> None:
    """A rank that receives all it needs still learns that another one failed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Rank 0 sends to rank 1 and to the last; rank 1 fails.
    source, target = Layout.whole(SHAPE, [0], ranks), Layout.whole(SHAPE, [1, ranks - 1], ranks)
    finish = MessageExchange.finish

    def failing(self: MessageExchange) -> None:
        finish(self)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    MessageExchange.finish = failing  # type: ignore[method-assign]
    own = torch.ones(SHAPE) if rank == 0 else None
    expect_error(
        RunError,
        "some rank did not finish: rank 1 (host",
        lambda: redistribute(own, target, source=source, dtype=torch.float32),
    )


def main(fault: str) -> None:
    limit_s = TIMEOUT_S if fault == "a_rank_raises_before_it_calls" else LONG_S
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit_s))
    faults = (
        arguments_differ_or_cannot_be_used,
        methods_differ_or_cannot_be_used,
        ranks_outside_the_group_call,
        a_rank_raises_before_it_calls,
        a_rank_calls_alone,
        a_rank_is_killed_while_it_moves,
        a_rank_is_killed_while_it_sends,
        a_rank_is_killed_while_it_receives,
        a_rank_is_killed_while_it_is_read,
        a_rank_is_killed_while_it_sends_to_all,
        a_rank_is_killed_while_another_is_late,
        a_rank_raises_before_it_sends,
        a_rank_raises_while_it_sends,
        a_rank_raises_in_a_program,
        a_rank_is_killed_in_a_program,
        a_rank_is_killed_that_another_does_not_need,
    )
    {one.__name__: one for one in faults}[fault]()
    # Rank 1 is the one that fails, whom nobody waits for.
    if dist.get_rank() != 1:
        dist.distributed_c10d._get_default_store().set(f"raised/{dist.get_rank()}", "")
        end_last([2])


if __name__ == "__main__":
    main(sys.argv[1])
