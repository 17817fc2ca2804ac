"""One process of a link: a trainer of two ranks, an engine of two, and another of one.

Each is a job of its own that counts its ranks from 0; the last has no process group at all.
Arguments: a case, and three free ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from link_ends import (
    NAME,
    NUMBER,
    PORTS,
    RANK,
    RANKS,
    SIDE,
    TIMEOUT_S,
    begin_job,
    cut,
    expect_values,
    link,
    set_values,
)
from refit_models import CUTS, distributed, expect, expect_same, refused, values, zeros
from reshard.checkpoint.storage.threads import Progress
from reshard.errors import InterruptedRunError, LinkError, RunError, ShardError, UsageError
from reshard.layout import Box, Layout
from reshard.torch import BlockQuantized
from reshard.torch.exchange.changes import ChangeExchange
from reshard.torch.links.messages import RunOutcome
from reshard.torch.links.sync import WeightSync


def own_model(seed: int = 0) -> Any:
    """What this process has: rows of the trainer, columns of engine a, all of engine b."""
    given = values(seed) if SIDE == "trainer" else zeros(values())
    return given if NAME == "b" else cut(given)


def engines_get_the_weights_of_each_version() -> None:
    """Two engines, three steps; versions, reports, and the trainer's end."""
    with link() as end:
        if SIDE == "trainer":
            expect(sorted(end.engines) == ["a", "b"], f"engines {end.engines}")
        model = own_model()
        sync = end.prepare(model)
        expect(sync.version is None, "no version yet")
        for step in range(3):
            if SIDE == "trainer":
                set_values(model, step)
            report = sync.run(10 * step if SIDE == "trainer" and step else None)
            expect(report is not None and report.version == 10 * step, f"report {report}")
            expect(sync.version == 10 * step and sync.is_usable, "version")
            if SIDE == "trainer":
                expect(set(report.engines) == {"a", "b"} and not report.lost, f"{report}")
            else:
                expect_values(model, step)
        sync.verify()
        if NUMBER == 4:
            model["norm"][3] += 1
        if NAME == "a":
            sync.verify()
        else:
            refused(sync.verify, RunError, "rank 2: not the source's: norm (from rank")
        if NUMBER == 4:
            model["norm"][3] -= 1
        if SIDE == "engine":
            refused(sync.run, LinkError, "still has version 20: the trainer does not answer")
            expect(sync.version == 20 and sync.is_usable, "version after the end")
            expect_values(model, 2)


def runs_in_the_background_do_not_mix() -> None:
    """Runs in the background; two models in one link; an engine that one rank does not hear."""
    with link() as end:
        models = [own_model(), own_model()]
        syncs: list[WeightSync] = [end.prepare(model) for model in models]
        for step in range(2):
            for number, (model, sync) in enumerate(zip(models, syncs, strict=True)):
                if SIDE == "trainer":
                    set_values(model, 7 * number + step)
                expect(sync.run(async_op=True) is None, "a run beside")
            for number, (model, sync) in enumerate(zip(models, syncs, strict=True)):
                report = sync.wait()
                expect(report is not None and report.version == step, f"{report}")
                expect(sync.is_done, "done")
                if SIDE == "engine":
                    expect_values(model, 7 * number + step)
        lose_b(syncs[0])


def lose_b(sync: WeightSync) -> None:
    """Rank 1 of the trainer alone loses b, as b has all: both ranks report the same."""
    board, read = open_board(), RunOutcome.read

    def hear(kind: type[RunOutcome], texts: Any) -> RunOutcome:
        found = read(texts)
        if threading.current_thread().name == "reshard engine b":
            if RANK == 0:
                board.set("rank 0 heard b", "")
            else:
                board.wait(["rank 0 heard b", "b has all"])
                raise LinkError("not heard")
        return found

    if SIDE == "trainer":
        RunOutcome.read = classmethod(hear)  # type: ignore[assignment, method-assign]
    report = sync.run()
    RunOutcome.read = read  # type: ignore[method-assign]
    expect(report is not None and report.version == 2, f"{report}")
    if NAME == "b":
        board.set("b has all", "")
        refused(sync.run, LinkError, "still has version 2")
        return
    last = sync.run()
    if SIDE == "trainer":
        expect(sorted(report.engines) == ["a", "b"], f"{report}")
        expect(report.lost == {"b": "not heard"}, f"{report}")
        expect(list(last.engines) == ["a"] and not last.lost, f"{last}")
        told = [report.engines, report.fed_by, report.trainer_bytes, last.engines]
        both: list[Any] = [None, None]
        dist.all_gather_object(both, told)
        expect(both[0] == both[1], f"{both}")


def other_orders_of_models_are_refused() -> None:
    """Processes that run the models of a link in other orders are told so; nothing is written."""
    with link() as end:
        syncs: list[WeightSync] = [end.prepare(own_model()) for _ in range(2)]
        for sync in syncs:
            sync.run()
        told = "in one order on all processes"
        if NAME == "b":
            said = refused(syncs[1].run, LinkError, told)
            expect("still has version 0" in said and syncs[1].is_usable, said)
            return
        report = syncs[0].run()
        if SIDE == "trainer":
            expect(list(report.engines) == ["a"] and told in report.lost["b"], f"{report}")
        refused(syncs[NUMBER == 1].run, LinkError, told)
        expect(all(sync.is_usable for sync in syncs), "usable")
        # Why is told at the store of the link, which is in the trainer's first process.
        board = open_board()
        board.set(f"{NUMBER} knows", "")
        if NUMBER == 0:
            board.wait([f"{number} knows" for number in range(1, 4)])


def tensors_are_complete_bucket_by_bucket() -> None:
    """Tensors are complete bucket by bucket; a lock is held for each; runs are stopped."""
    with link() as end:
        model = own_model()
        sync = end.prepare(model, **({"buckets": 400} if SIDE == "trainer" else {}))
        told: list[Progress] = []
        lock, stop = CountedLock(), threading.Event()
        for step in range(2):
            if SIDE == "trainer":
                set_values(model, step)
                refused(lambda: sync.run(guard=lock), UsageError, "guard= on a trainer")
                refused(lambda: sync.run(stop=True), UsageError, "expected a threading.Event")
                sync.run(progress=told.append)
                expect(sync.buckets == (), "a trainer's weights are complete")
            else:
                sync.run(async_op=True, progress=told.append, guard=lock)
                events = sync.buckets
                expect([sorted(one.names) for one in events] == [[name] for name in CUTS], "names")
                for event in events:
                    expect(event.wait(TIMEOUT_S) and event.is_done, f"{event}")
                    with lock:
                        expect_values({name: model[name] for name in event.names}, step)
                sync.wait()
                expect_values(model, step)
                expect(sum(event.size_bytes for event in events) == told[-1].done_bytes, "bytes")
            done = [one.done_bytes for one in told]
            expect(done == sorted(set(done)), f"{told}")
            expect(told[-1].done_bytes == told[-1].total_bytes > 0, f"{told}")
            told.clear()
        # Four tensors, twice, by the run and by this thread.
        expect(SIDE == "trainer" or lock.entered == 16, f"held {lock.entered} times")
        stop.set()
        refused(lambda: sync.run(stop=stop), InterruptedRunError, "stopped before")
        expect(sync.version == 1 and sync.is_usable, "as if it had not been begun")
        if NAME == "b":
            stop.clear()
            # From a callback it is in the middle.
            refused(
                lambda: sync.run(stop=stop, progress=lambda _: stop.set()),
                InterruptedRunError,
                "parts of version 2 and of what it had",
            )
            expect(sync.version is None and not sync.is_usable, "a mixture")
            expect(sync.buckets[0].is_done and not sync.buckets[-1].is_done, "some")
            refused(sync.buckets[-1].wait, LinkError, "is not complete")
            return
        report = sync.run()
        expect(report is not None and report.version == 2, f"{report}")
        if SIDE == "trainer":
            expect(list(report.engines) == ["a"] and list(report.lost) == ["b"], f"{report}")
            stop.clear()
            refused(
                lambda: sync.run(stop=stop, progress=lambda _: stop.set()),
                InterruptedRunError,
                "stopped; no engine has version 3",
            )
        else:
            refused(sync.run, LinkError, "parts of version 3")
            expect(sync.version is None and not sync.is_usable, "a mixture")


class CountedLock:
    """A lock that counts how often it is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entered = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def each_rank_traces_to_its_own_file() -> None:
    """What every rank does, as trace events of its own file."""
    folder = Path(sys.argv[5])
    with link() as end:
        model = own_model()
        sync = end.prepare(model, **({"buckets": 400} if SIDE == "trainer" else {}))
        refused(lambda: sync.run(trace=folder / "no" / "t"), UsageError, "give a file to write")
        path = folder / f"{NAME}{RANK}.json"
        report = sync.run(trace=path)
        expect(report is not None, "a report")
        events = json.loads(path.read_text())["traceEvents"]
        named = {one["args"]["name"] for one in events if one["ph"] == "M"}
        expect(f"{NAME} rank {RANK}" in named, f"{named}")
        spans = [one for one in events if one["ph"] == "X"]
        expect(all(one["dur"] >= 0 and one["ts"] > 0 for one in spans), "times")
        # Four buckets, for each of the engines.
        times = 2 if SIDE == "trainer" else 1
        numbers = [one["args"]["number"] for one in spans if one["name"] == "bucket"]
        expect(sorted(numbers) == sorted([*range(4)] * times), f"{numbers}")
        expect({"run", "agree", "pack", "wait", "confirm the end"} <= _names(spans), "spans")
        expect(SIDE == "trainer" or "wait for the trainer" in _names(spans), "waiting")
        begun = {one["id"]: one for one in events if one["ph"] == "b"}
        ended = {one["id"]: one for one in events if one["ph"] == "e"}
        expect(begun.keys() == ended.keys(), "messages that do not end")
        expect(all(begun[n]["ts"] <= ended[n]["ts"] for n in begun), "messages end first")
        told = {"to": 0, "from": 0}
        for one in begun.values():
            told[one["name"].split()[1]] += one["args"]["bytes"]
        moved = {"to": report.sent_bytes, "from": report.received_bytes}
        expect(told == moved, f"{told} of {moved} bytes")
        sync.run()


def _names(events: list[dict[str, Any]]) -> set[str]:
    return {one["name"] for one in events}


def engines_follow_the_options_of_the_trainer() -> None:
    """What the trainer says, the engines do: other types, ties, and quantised weights."""
    with link() as end:
        given = values()
        if SIDE == "trainer":
            model = cut(given)
            refused(lambda: end.prepare(model, unknown=1), UsageError, "'unknown'")
            sync = end.prepare(model, cast=True, ties={"head.weight": "embed.weight"})
        else:
            refused(lambda: end.prepare({}, cast=True), UsageError, "the trainer says them")
            narrow = zeros(values(dtype=torch.bfloat16))
            narrow["head.weight"] = torch.zeros_like(narrow["embed.weight"])
            model = narrow
            sync = end.prepare(model if NAME == "b" else narrow)
        sync.run()
        if SIDE == "engine":
            expected = values(dtype=torch.bfloat16)
            expected["head.weight"] = expected["embed.weight"]
            expect_same(model, expected, "cast and tied")


def models_that_do_not_fit_are_refused_on_both_sides() -> None:
    """What does not fit is raised on both sides; of an engine that comes later, on its own."""
    if NAME == "b":
        return
    with link(engines=1) as end:
        model = own_model()
        lacking = {name: tensor for name, tensor in model.items() if name != "norm"}
        if SIDE == "trainer":
            refused(lambda: end.prepare(model), ShardError, "norm: in the source only")
            sync = end.prepare(model)
            sync.run()
            told = ""
            while "norm" not in told:
                # The engine leaves, then there is none, then it comes again with less.
                told = refused(sync.run, LinkError, "no engine has version 1")
                time.sleep(0.05)
            return
        refused(lambda: end.prepare(lacking), ShardError, "norm: in the source only")
        end.prepare(model).run()
        expect_values(model, 0)
        end.close()
        with link() as again:
            refused(lambda: again.prepare(lacking), ShardError, "norm: in the source only")


def an_engine_joins_while_the_trainer_runs() -> None:
    """An engine that comes while the trainer runs, leaves, and comes again."""
    if NAME == "b":
        open_board().wait(["a is linked"])
        for _ in range(2):
            with link() as end:
                model = own_model()
                sync = end.prepare(model)
                for _ in range(2):
                    report = sync.run()
                    expect_values(model, report.version)
        return
    with link(engines=1) as end:
        if NAME == "a":
            open_board().set("a is linked", "")
        model = own_model()
        sync = end.prepare(model)
        seen, step = 0, 0
        while True:
            if SIDE == "trainer":
                set_values(model, step)
                report = sync.run()
                seen += "b" in report.engines
                expect("a" in report.engines, f"{report}")
                # All ranks of the trainer see the same engines.
                if seen == 4:
                    break
                time.sleep(0.05)
            else:
                try:
                    report = sync.run()
                except LinkError as error:
                    expect("still has version" in str(error), str(error))
                    break
                expect_values(model, report.version)
            step += 1


def the_other_engine_continues_after_one_is_killed() -> None:
    """An engine that is killed is given up, and the other goes on."""
    with link() as end:
        model = own_model()
        sync = end.prepare(model)
        sync.run()
        if NUMBER == 3:
            os._exit(9)
        begun_s = time.monotonic()
        if NAME == "a":
            refused(sync.run, LinkError, "still has version 0")
            expect(sync.is_usable and sync.version == 0, "old weights")
            return
        for step in (1, 2):
            if SIDE == "trainer":
                set_values(model, step)
            report = sync.run()
            if SIDE == "trainer":
                expect(list(report.engines) == ["b"], f"{report}")
                expect(list(report.lost) == (["a"] if step == 1 else []), f"{report}")
            else:
                expect_values(model, step)
        expect(time.monotonic() - begun_s < 10, "in time")


def engines_keep_their_weights_after_the_trainer_is_killed() -> None:
    """The engines have their old weights, and say which."""
    end = link()
    model = own_model()
    sync = end.prepare(model)
    sync.run()
    if SIDE == "trainer":
        if RANK == 1:
            time.sleep(0.3)
        os._exit(9)
    begun_s = time.monotonic()
    refused(sync.run, LinkError, "still has version 0")
    expect(sync.is_usable and sync.version == 0, "old weights")
    expect_values(model, 0)
    expect(time.monotonic() - begun_s < 10, "in time")


def all_learn_why_a_rank_of_the_trainer_raised(raising: int = 1) -> None:
    """One of its ranks raises while the other computes: the other and engines hear why."""
    board = open_board()
    engines = [f"heard by {number}" for number in (2, 3, 4)]
    with contextlib.suppress(ValueError), link() as end:
        model = own_model()
        sync = end.prepare(model)
        sync.run()
        if SIDE == "trainer" and raising == RANK:
            raise ValueError("the loss is nan\nand more lines")
        told = refused(sync.run, LinkError, "closed the link after ValueError: the loss is nan")
        expect("more lines" not in told, told)
        if SIDE == "trainer":
            expect(f"rank {raising} of the trainer (host " in told, told)
        else:
            expect(f"rank {raising} (host " in told, told)
            expect("still has version 0" in told and sync.version == 0, told)
            expect_values(model, 0)
        if SIDE == "trainer":
            # That this one leaves must not be what engines hear.
            board.wait(engines)
        board.set(f"heard by {NUMBER}", "")
    if RANK == raising == 0 and SIDE == "trainer":
        # The board is in this process.
        board.wait([*engines, "heard by 1"])


def all_learn_why_the_first_rank_raised() -> None:
    """The first rank of the trainer, in whose process the store is, raises."""
    all_learn_why_a_rank_of_the_trainer_raised(0)


def an_engine_with_another_secret_is_refused() -> None:
    """Who has another secret is turned away, and disturbs nobody."""
    if NAME == "b":
        refused(lambda: link(secret="other", timeout_s=20), LinkError, "another secret")
        return
    with link(engines=1, secret="right") as end:
        model = own_model()
        sync = end.prepare(model)
        sync.run()
        if NAME == "a":
            expect_values(model, 0)


def weights(version: int) -> dict[str, torch.Tensor]:
    """Those of a version: in each tensor few elements are others than in the one before."""
    found = values()
    for tensor in found.values():
        flat = tensor.view(-1)
        for step in range(1, version + 1):
            flat[7 * step % len(flat)] = step
    return found


def set_weights(model: object, version: int) -> None:
    """The trainer's after a step."""
    for name, tensor in cut(weights(version)).items():
        model[name].to_local().copy_(tensor.to_local())  # type: ignore[index]


def expect_weights(model: object, version: int) -> None:
    """An engine's are those of a version, bit for bit."""
    expected = weights(version)
    expect_same(model, expected if NAME == "b" else cut(expected), f"{NAME}, version {version}")


def engine_runs(runs: int, in_between: object = None) -> list[int]:
    """Come, run a few times, and leave; how many bytes came in each run."""
    told = []
    with link(engines=1) as end:
        model = own_model()
        sync = end.prepare(model)
        for number in range(runs):
            report = sync.run()
            expect_weights(model, report.version)
            told.append(report.received_bytes)
            if number == 1 and callable(in_between):
                in_between(model)
    return told


def open_board() -> dist.Store:
    """Where processes leave word for each other: the store of the trainer's own job."""
    return dist.TCPStore("127.0.0.1", PORTS["trainer"], None, False, wait_for_workers=False)


def only_changes_are_sent() -> None:
    """Engine a is there always, b comes late, leaves, misses runs, and comes again."""
    if NAME == "b":
        for turn in range(2):
            open_board().wait(["b missed some" if turn else "a is linked"])
            first, second, third, fourth = engine_runs(4, lambda model: model["norm"].add_(1))
            # By its own writing the third is whole again, the others have what changed.
            expect(first == third and max(second, fourth) < first / 2, f"{first} {second} {third}")
            open_board().set(f"b left {turn}", "")
        return
    with link(engines=1) as end:
        if NAME == "a":
            open_board().set("a is linked", "")
        model = own_model()
        if SIDE == "trainer":
            sync = end.prepare(model, changed_only="elements", method="exchange")
            board, version, missed = open_board(), 0, 0
            # What b says is read by the first rank, for both.
            while not shared_by_first(board.check(["b left 1"])):
                set_weights(model, version)
                has_left = shared_by_first(board.check(["b left 0"]))
                report = sync.run(version)
                expect("a" in report.engines and report.sent_bytes > 0, f"{report}")
                version += 1
                if has_left and missed < 3:
                    expect("b" not in report.engines, f"{report}")
                    missed += 1
                    if missed == 3:
                        board.set("b missed some", "")
                time.sleep(0.02)
            return
        sync = end.prepare(model)
        sizes = []
        while True:
            try:
                report = sync.run()
            except LinkError as error:
                expect("still has version" in str(error), str(error))
                break
            expect_weights(model, report.version)
            sizes.append(report.received_bytes)
        expect(max(sizes[1:]) < sizes[0] / 2, f"{sizes}")


def only_changed_blocks_are_quantized_and_sent() -> None:
    """Engine a has float8 with scales, b what the trainer has; a block that changes is sent."""
    shapes = {"mlp.up_proj.weight": (256, 384), "norm": (128,)}
    columns = {"mlp.up_proj.weight": [Shard(1)], "norm": [Replicate()]}
    name, block = "mlp.up_proj.weight", BlockQuantized()

    def at_step(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        given = {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
        given[name][200, 300] += 9 * step
        return given

    with link() as end:
        whole = at_step(0)
        if NAME == "b":
            model = zeros(whole)
        elif NAME == "trainer":
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
            rows = {one: [Shard(0)] for one in whole}
            model = distributed(whole, mesh, rows)
        else:
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
            blank: dict[str, Any] = distributed(zeros(whole), mesh, columns)
            # Of three blocks one and a half each are no whole ones: two and one.
            layouts = {
                n: Layout.from_boxes(s, [(0, Box((0, 0), (s[0], k))), (1, Box((0, k), s))])
                for n, s, k in ((name, (256, 384), 256), (f"{name}_scale_inv", (2, 3), 2))
            }
            model = {"norm": blank["norm"]}
            for one, layout in layouts.items():
                dtype = torch.float32 if "scale" in one else torch.float8_e4m3fn
                model[one] = (torch.zeros(layout.local_shape(RANK), dtype=dtype), layout)
        if SIDE == "trainer":
            sync = end.prepare(model, quantize="fp8-block128", changed_only="elements")
        else:
            sync = end.prepare(model)
        sizes = []
        for step in range(3):
            whole = at_step(step)
            if SIDE == "trainer":
                for one, tensor in distributed(whole, mesh, rows).items():
                    model[one].to_local().copy_(tensor.to_local())
            report = sync.run()
            sizes.append(report.received_bytes)
            if NAME == "b":
                expect_same(model, whole, f"wide, step {step}")
            elif NAME == "a":
                made = {
                    name: torch.zeros(256, 384).to(torch.float8_e4m3fn),
                    f"{name}_scale_inv": torch.zeros(2, 3),
                }
                block.finish_receive(name, whole[name], made)
                for one, layout in layouts.items():
                    (box,) = layout.boxes(RANK)
                    wanted = made[one].view(torch.uint8).view(*made[one].shape, -1)
                    wanted = wanted[tuple(map(slice, box.start, box.stop))].contiguous()
                    found = model[one][0].view(torch.uint8).view(wanted.shape)
                    expect(torch.equal(found, wanted), f"{one}, step {step}")
        expect(SIDE == "trainer" or max(sizes[1:]) < sizes[0] // 2, f"{NAME}: {sizes}")
        if NAME == "a":
            # A byte each of half the rows in 256 or 128 columns, not two.
            expect(sizes[0] < 256 * 256 + 2000, f"{sizes}")


def shared_by_first(told: bool) -> bool:
    """What the first rank of this job says, on both."""
    said = torch.tensor([int(told)])
    dist.broadcast(said, 0)
    return bool(said.item())


def the_other_engine_gets_changes_after_one_is_killed() -> None:
    """A rank of a is killed once it has half of what changed; b goes on with what changes."""
    with link() as end:
        model = own_model()
        if SIDE == "engine":
            sync = end.prepare(model)
        else:
            sync = end.prepare(model, changed_only="elements", method="exchange")
        for version in range(4):
            if SIDE == "trainer":
                set_weights(model, version)
            if NAME == "a" and version == 2:
                if RANK == 1:
                    ChangeExchange._complete_arrival = lambda self: os._exit(9)  # type: ignore
                told = refused(sync.run, LinkError, "")
                # Old weights, or neither: it says so, and does not run again.
                has = "still has version 1" if sync.is_usable else "parts of version 2"
                expect(has in told and sync.version == (1 if sync.is_usable else None), told)
                refused(sync.run, (LinkError, RunError), "")
                return
            report = sync.run()
            if SIDE == "engine":
                expect_weights(model, version)
            else:
                names = ["a", "b"] if version < 2 else ["b"]
                expect(sorted(report.engines) == names, f"{report}")
        sync.verify()


if __name__ == "__main__":
    PORTS.update(zip(("link", "trainer", "a"), map(int, sys.argv[2:5]), strict=True))
    begin_job()
    globals()[sys.argv[1]]()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
