"""One rank of a job of three, one of which fails: all others must raise, and none may hang.

Argument: what happens.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from rank_cases import report_each, reported
from refit_models import CUTS, expect, expect_same, laid_out, layouts_of, values, zeros
from reshard.errors import PlanError, ReshardError, RunError
from reshard.torch import Refit, Transform, is_usable
from reshard.torch.exchange import transfer
from reshard.torch.exchange.consistency import mark_unusable

FAULTY = 1
TIMEOUT_S = 5
# Where all are meant to come, they may come late.
PATIENT_S = 60


class Faulty(Transform):
    """Copies, and fails on one rank, once, at one point."""

    def __init__(self, at: str, kills: bool, of: str = "") -> None:
        self.at = at
        self.kills = kills
        self.of = of
        self.is_armed = False

    def _fail(self, at: str, name: str) -> None:
        is_there = at == self.at and self.of in ("", name)
        if self.is_armed and is_there and dist.get_rank() == FAULTY:
            self.is_armed = False
            if self.kills:
                os._exit(7)
            raise ValueError("no more")

    def prepare_send(self, name: str, source: torch.Tensor, sent: torch.Tensor) -> None:
        self._fail("send", name)
        super().prepare_send(name, source, sent)

    def finish_receive(
        self, name: str, received: torch.Tensor, target: Mapping[str, torch.Tensor]
    ) -> None:
        self._fail("receive", name)
        super().finish_receive(name, received, target)


def prepared(
    transform: Transform | None, group: dist.ProcessGroup | None = None
) -> tuple[Refit, dict[str, object]]:
    rows = {name: cut if name != "down.weight" else "tp, -" for name, cut in CUTS.items()}
    target = laid_out(zeros(values()), layouts_of(3, rows))
    done = Refit.prepare(
        laid_out(values(), layouts_of(3)),
        target,
        transforms={"down.weight": transform} if transform else None,
        group=group,
    )
    done.run()
    return done, target


def new_group(timeout_s: float) -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))


def fails_in_the_middle(at: str, kills: bool) -> None:
    faulty = Faulty(at, kills)
    done, target = prepared(faulty, new_group(TIMEOUT_S if kills else PATIENT_S))
    faulty.is_armed = True
    begun_s = time.monotonic()
    try:
        done.run()
    except RunError as error:
        expect("not usable" in str(error), str(error))
        # What a transform raises is known to all at once, and not by their timeout.
        expect(kills or f"rank {FAULTY}: ValueError: no more" in str(error), str(error))
        own = error.__cause__.__cause__ if error.__cause__ else None
        is_own = dist.get_rank() == FAULTY
        expect(kills or isinstance(own, ValueError) == is_own, f"the cause is {own!r}")
    else:
        raise SystemExit("a rank failed, and this one knows nothing of it")
    expect(time.monotonic() - begun_s < 4 * TIMEOUT_S, "too late")
    expect(not done.is_usable, "a target that is partly new counts as usable")
    expect(not any(is_usable(t) for t, _ in target.values()), "its tensors count as usable")
    if kills:
        return
    done.renew(new_group(PATIENT_S))
    done.run()
    expect(done.is_usable, "not usable after a good run")
    expect(all(is_usable(t) for t, _ in target.values()), "its tensors do not count as usable")
    mark_unusable(next(iter(target.values()))[0])
    try:
        Refit.prepare(target, laid_out(zeros(values()), layouts_of(3))).run()
    except RunError as error:
        expect("embed.weight of the source is partly new and partly old" in str(error), str(error))
    else:
        raise SystemExit("a source that is partly new was taken")
    rows = {name: cut if name != "down.weight" else "tp, -" for name, cut in CUTS.items()}
    expect_same(target, laid_out(values(), layouts_of(3, rows)), "after a failure")


def all_ranks_raise_if_one_of_several_batches_fails() -> None:
    """Each tensor is a batch; after the first, in between and in the last a transform fails."""
    for at in ("send", "receive"):
        for of in CUTS:
            faulty = Faulty(at, False, of)
            target = laid_out(zeros(values()), layouts_of(3))
            options = {"transforms": {"*": faulty}, "extra_bytes": 4 << 10}
            done = Refit.prepare(laid_out(values(), layouts_of(3)), target, **options)
            expect(len(done.report.made_at_target) == len(CUTS), "not transformed")
            faulty.is_armed = True
            begun_s = time.monotonic()
            try:
                done.run()
            except RunError as error:
                expect(f"rank {FAULTY}: ValueError: no more" in str(error), str(error))
            else:
                raise SystemExit("a rank failed, and this one knows nothing of it")
            expect(time.monotonic() - begun_s < 4 * TIMEOUT_S, "too late")


def all_ranks_raise_if_a_comparison_fails() -> None:
    """All learn at once of what one rank's comparison fails at, and go on in another group."""
    done, _ = prepared(None, new_group(PATIENT_S))
    digest = transfer._digest

    def fail(pieces: object) -> bytes:
        raise MemoryError("no more")

    if dist.get_rank() == FAULTY:
        transfer._digest = fail
    begun_s = time.monotonic()
    try:
        done.verify()
    except RunError as error:
        expect(f"rank {FAULTY}" in str(error), str(error))
        expect("MemoryError: no more" in str(error), str(error))
    except MemoryError:
        expect(dist.get_rank() == FAULTY, "another rank's error")
    else:
        raise SystemExit("a rank failed, and this one knows nothing of it")
    expect(time.monotonic() - begun_s < PATIENT_S / 2, "too late")
    transfer._digest = digest
    done.renew(new_group(PATIENT_S))
    done.verify()


def a_failed_rank_is_refused_on_all() -> None:
    """A rank whose run failed cannot go on, and all ranks are told."""
    done, _ = prepared(None)
    done.is_usable = dist.get_rank() != FAULTY
    try:
        done.run()
    except RunError as error:
        expect("an earlier run failed" in str(error), str(error))
        expect(f"rank {FAULTY}" in str(error), str(error))
    else:
        raise SystemExit("a run followed one that failed")


def a_different_refit_of_one_rank_is_refused() -> None:
    """One rank runs another refit than the others."""
    done, _ = prepared(None)
    other = Refit.prepare(values(), zeros(values()))
    try:
        (other if dist.get_rank() == FAULTY else done).run()
    except PlanError as error:
        expect("refit" in str(error), str(error))
        expect(done.is_usable and other.is_usable, "nothing was written")
    else:
        raise SystemExit("different refits ran")
    done.run()


def an_absent_rank_is_named() -> None:
    """One rank ends before it prepares, once all others are connected."""
    dist.barrier()
    if dist.get_rank() == FAULTY:
        time.sleep(0.5)
        os._exit(7)
    try:
        prepared(None)
    except ReshardError as error:
        expect("does not answer" in str(error), str(error))
        return
    raise SystemExit("a rank was not there, and none asked")


def lives_on() -> None:
    """Run the failures after which a job continues."""
    report_each([a_failed_rank_is_refused_on_all, a_different_refit_of_one_rank_is_refused])
    for action in ("send", "receive"):
        with reported(f"all_ranks_raise_if_a_rank_raises_in_a_{action}"):
            fails_in_the_middle(action, kills=False)
    report_each(
        [all_ranks_raise_if_one_of_several_batches_fails, all_ranks_raise_if_a_comparison_fails]
    )


FAULTS = {
    "it is killed while it sends": lambda: fails_in_the_middle("send", kills=True),
    "it is killed while it receives": lambda: fails_in_the_middle("receive", kills=True),
    "it raises and continues": lives_on,
    "it ends before it prepares": an_absent_rank_is_named,
}


def main(fault: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENT_S))
    FAULTS[fault]()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
