"""One rank of a job of two: backends by device, threads of one group, failures known at once."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import reshard
from refit_models import expect, refused
from reshard.errors import PlanError, ReshardError, RunError, UsageError
from reshard.torch import Refit, Transform, redistribute
from reshard.torch.exchange.agreement import device_of
from reshard.torch.exchange.groups import rank_group
from reshard.torch.exchange.rendezvous import timeout_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MESH = reshard.DeviceMesh.of(x=2)
ROWS, COLUMNS = reshard.spec(MESH, "x, -"), reshard.spec(MESH, "-, x")
SIZE = 256


def own_rows(value: float) -> torch.Tensor:
    return torch.full((SIZE // 2, SIZE), float(value))


def tensors_travel_by_the_backend_of_their_device() -> None:
    """What carries a tensor is asked by its device, whatever the group is called."""
    dist.init_process_group("cpu:gloo,cuda:fake", timeout=datetime.timedelta(seconds=60))
    group = rank_group(None)
    expect((group.backend_of(CPU), group.backend_of(CUDA)) == ("gloo", "fake"), "combined")
    expect(device_of(None) == CPU, f"small tensors on {device_of(None)}")
    expect(timeout_of(dist.group.WORLD) == datetime.timedelta(seconds=60), "another timeout")
    found = redistribute(own_rows(dist.get_rank()), COLUMNS, source=ROWS, shape=(SIZE, SIZE))
    halves = torch.arange(2.0).repeat_interleave(SIZE // 2)[:, None].expand(SIZE, SIZE // 2)
    expect(torch.equal(found, halves), "over a group of several backends")
    few = dist.new_group(backend="gloo")
    refused(
        lambda: rank_group(few).backend_of(torch.device("xpu")),
        UsageError,
        "the group has no backend for tensors on xpu",
    )


def a_group_without_a_named_backend_has_one_for_each_device() -> None:
    """A group whose backend nobody named has one for each device."""
    dist.init_process_group(timeout=datetime.timedelta(seconds=60))
    expect(dist.get_backend() in ("undefined", "gloo"), dist.get_backend())
    expect(rank_group(None).backend_of(CPU) == "gloo", "not named")
    expect(device_of(None) == CPU, f"small tensors on {device_of(None)}")
    found = redistribute(own_rows(1), COLUMNS, source=ROWS, shape=(SIZE, SIZE))
    expect(bool((found == 1).all()), "over a group without a name")


def run_threads(
    actions: list[Callable[[], None]], names: list[str] | None = None
) -> list[BaseException]:
    """Actions in threads of their own, and what they raised. Without names they have numbers."""
    raised: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [
        threading.Thread(target=run, args=[action], name=names[number] if names else None)
        for number, action in enumerate(actions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def threads_of_one_group_keep_one_order_or_are_refused() -> None:
    """Two threads of one group: what is ordered alike follows, what is not is refused, on all."""
    begin()
    rank = dist.get_rank()
    wrong: list[float] = []

    def move(value: float, after_s: float) -> None:
        time.sleep(after_s)
        found = redistribute(own_rows(value), COLUMNS, source=ROWS, shape=(SIZE, SIZE))
        if not bool((found == value).all()):
            wrong.append(value)

    # 1. Both ranks begin the first one before the second, which one rank has waiting.
    late_s = [1.0 * rank, 1.0 * rank + 0.3]
    # 2. Rank 1 begins the second one before the first.
    wait_s = [0.0, 0.3][:: -1 if rank else 1]
    for names in (None, ["first", "second"]):
        raised = run_threads([lambda: move(1, late_s[0]), lambda: move(2, late_s[1])], names)
        expect(not wrong and not raised, f"{wrong} are mixed, {raised}")
        dist.barrier()
        raised = run_threads([lambda: move(3, wait_s[0]), lambda: move(4, wait_s[1])], names)
        expect(len(raised) == 2, f"{wrong} are mixed, {raised}")
        for error in raised:
            expect(isinstance(error, PlanError), f"{error!r}")
            expect("several threads use one group" in str(error), str(error))
        expect(not wrong, f"{wrong} are mixed")
        dist.barrier()
        move(5, 0)
        expect(not wrong, "the group does not go on")


def refits_in_another_order_are_refused() -> None:
    """Two refits that are alike: run in another order on one rank, neither runs."""
    begin()
    rank = dist.get_rank()
    layout = ROWS.layout((SIZE, SIZE)), COLUMNS.layout((SIZE, SIZE))
    targets = [torch.zeros(SIZE, SIZE // 2) for _ in range(2)]
    sources = [own_rows(number + 1.0) for number in range(2)]
    both = [
        Refit.prepare({"w": (source, layout[0])}, {"w": (target, layout[1])})
        for source, target in zip(sources, targets, strict=True)
    ]
    for refit in both:
        refit.run()
    for target in targets:
        target.zero_()
    refused(lambda: both[rank].run(), PlanError, "do not mean the same by 'refit'")
    expect(not any(bool(target.any()) for target in targets), "something was written")
    raised = run_threads([refit.run for refit in both])
    filled = [bool((target == n + 1).all()) for n, target in enumerate(targets)]
    expect(all(filled) or bool(raised), f"{filled}, and {raised}")
    mixed = [bool(target.any()) and not done for target, done in zip(targets, filled, strict=True)]
    expect(not any(mixed), "two refits at once are mixed")

    class Nested(Transform):
        def prepare_send(self, name: str, source: torch.Tensor, sent: torch.Tensor) -> None:
            both[0].run()

    nested = Refit.prepare(
        {"w": (sources[0], layout[0])},
        {"w": (targets[0], layout[1])},
        transforms={"w": Nested()},
    )
    refused(nested.run, RunError, "in the middle of a run")


def raises(where: str) -> None:
    """A rank that raises where no other looks, and lives: the other knows at once, and why."""
    begin(minutes=30)
    rank = dist.get_rank()
    layouts = ROWS.layout((SIZE, SIZE)), COLUMNS.layout((SIZE, SIZE))
    target = torch.zeros(SIZE, SIZE // 2)
    refit = Refit.prepare({"w": (own_rows(1), layouts[0])}, {"w": (target, layouts[1])})
    refit.run()
    if rank == 1:
        exchange = refit._transfer.batches[0].exchanges[0]

        def fail(*_: object) -> None:
            raise MemoryError("no memory left")

        setattr(exchange, where, fail)
    begun_s = time.monotonic()
    try:
        refit.run()
    except (ReshardError, MemoryError) as error:
        told = f"{type(error).__name__}: {error}"
    else:
        raise SystemExit("a rank raised, and this one knows nothing of it")
    expect(time.monotonic() - begun_s < 3, f"it took {time.monotonic() - begun_s} s")
    words = "MemoryError: no memory left" if rank == 1 else "rank 1 (host "
    expect(words in told and "no memory left" in told, told)
    expect(not refit.is_usable, "usable")
    if rank == 1:
        delattr(exchange, where)
    # The same group will do: its ranks live, and connect anew.
    refit.renew(None)
    refit.run()
    expect(bool((target == 1).all()) and refit.is_usable, "after it was renewed")


def begin(minutes: float = 1) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=minutes))


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        tensors_travel_by_the_backend_of_their_device,
        a_group_without_a_named_backend_has_one_for_each_device,
        threads_of_one_group_keep_one_order_or_are_refused,
        refits_in_another_order_are_refused,
    )
}
CASES |= {
    f"a rank that raises {when} is known at once": functools.partial(raises, where)
    for when, where in (
        ("while it posts", "_post_what_can_be"),
        ("while it waits", "_complete_alone"),
        ("at the end", "finish"),
    )
}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(40)
    CASES[sys.argv[1]]()
    dist.barrier()
    os._exit(0)
