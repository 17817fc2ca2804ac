"""One process of a link whose engines hand on weights: a trainer of two ranks, three engines.

Engines a and b are of one kind, two ranks each; c is one process that has all. Each says that it is
on a host of its own. Arguments: a case, and four free ports.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from engines.megatron_core import model_records
from link_ends import NAME, PORTS, RANK, SIDE, begin_job, cut, expect_values, link, set_values
from refit_models import expect, expect_same, refused, values, zeros
from reshard.errors import LinkError, RunError
from reshard.torch import BlockQuantized, MegatronModel
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.one_host.shared_memory import SharedMemory
from reshard.torch.links.relay_tree import BucketGate
from reshard.torch.links.sync import SyncReport, WeightSync

# Each of the small model's four tensors is a bucket.
BUCKET_BYTES = 400
SENT = [0]


def own_model() -> Any:
    """Rows of the trainer, columns of engines a and b, all of engine c."""
    given = values() if SIDE == "trainer" else zeros(values())
    return given if NAME == "c" else cut(given)


def prepared(end: Any, model: Any, **options: Any) -> WeightSync:
    """A sync of this side."""
    if SIDE == "trainer":
        return end.prepare(model, buckets=BUCKET_BYTES, **options)
    return end.prepare(model)


def count_sent() -> None:
    """Count what this process really sends."""

    def count(tensor: torch.Tensor) -> None:
        SENT[0] += tensor.nbytes

    before_sending(count)


def before_sending(action: Callable[[torch.Tensor], None]) -> None:
    """Do something before each message, by connections or by memory that is shared."""

    def patched(send: Callable[..., Any]) -> Callable[..., Any]:
        def sending(self: Any, tensor: torch.Tensor, *rest: Any) -> Any:
            action(tensor)
            return send(self, tensor, *rest)

        return sending

    for carrier in (RankGroup, SharedMemory):
        carrier.send = patched(carrier.send)  # type: ignore[attr-defined]


def signals() -> dist.TCPStore:
    """Where the trainer tells the other jobs to come."""
    return dist.TCPStore("127.0.0.1", PORTS["trainer"], is_master=False)


def serve(sync: WeightSync, model: Any, at_end: Callable[[LinkError], None] | None = None) -> None:
    """Run until the trainer ends; what each run brings is compared."""
    while True:
        try:
            report = sync.run()
        except LinkError as error:
            if at_end is None:
                expect("still has version" in str(error), f"{NAME}: {error}")
            else:
                at_end(error)
            return
        expect(report is not None and sync.is_usable, f"{NAME}: {report}")
        expect_values(model, report.version)


def run_until(sync: WeightSync, model: Any, names: set[str], first: int) -> tuple[SyncReport, int]:
    """Run until all engines are there; the report of the first run after that, and its step."""
    is_there, step = False, first
    while True:
        set_values(model, step)
        SENT[0] = 0
        report = sync.run(step)
        if is_there:
            return report, step + 1
        is_there = set(report.engines) == names
        step += 1
        time.sleep(0.02)


def the_trainer_sends_as_much_to_three_engines_as_to_one() -> None:
    """One engine, two and three: the trainer's ranks send the same bytes, whoever is there."""
    count_sent()
    if SIDE == "engine":
        # The one that is there first must be so.
        signals().wait([NAME])
        with link() as end:
            model = own_model()
            sync = prepared(end, model)
            serve(sync, model)
        return
    store, step = signals(), 0
    store.set("a", "")
    with link(engines=1) as end:
        model = own_model()
        sync = prepared(end, model)
        counted = []
        for name, feeds in (
            ("a", {"a": "trainer"}),
            ("b", {"a": "trainer", "b": "a"}),
            ("c", {"a": "trainer", "b": "a", "c": "b"}),
        ):
            store.set(name, "")
            report, step = run_until(sync, model, set(feeds), step)
            expect(report.fed_by == feeds and not report.lost, f"{report}")
            counted.append((SENT[0], report.trainer_bytes))
            expect(report.sent_bytes == SENT[0], f"{report.sent_bytes} of {SENT[0]} bytes")
        expect(len(set(counted)) == 1, f"the trainer sent {counted}")
        every = torch.tensor(SENT[0])
        dist.all_reduce(every)
        # Every element of two cuts by each of the two ranks that a cut has, the norm to both.
        expect(int(every) == report.trainer_bytes > 0, f"{int(every)} bytes: {report}")


def relayed_models_arrive_in_the_background() -> None:
    """Verified, in the background, with another sync beside it; and as the trainer says, none."""
    with link(engines=3) as end:
        models = [own_model(), own_model()]
        syncs = [
            prepared(end, model, **({"relays": False} if number and SIDE == "trainer" else {}))
            for number, model in enumerate(models)
        ]
        for step in range(2):
            for number, (model, sync) in enumerate(zip(models, syncs, strict=True)):
                if SIDE == "trainer":
                    set_values(model, 7 * number + step)
                # Of the two ends of a run, one may have it in the background.
                if NAME in ("trainer", "b"):
                    sync.run(async_op=True)
                    report = sync.wait()
                else:
                    report = sync.run()
                expect(report is not None and report.version == step, f"{report}")
                if SIDE == "trainer":
                    by = {"b": "a", "c": "b"} if not number else {}
                    fed_by = {name: by.get(name, "trainer") for name in "abc"}
                    expect(report.fed_by == fed_by, f"{report}")
                else:
                    expect_values(model, 7 * number + step)
        for sync in syncs:
            sync.verify()
        if NAME == "c":
            models[0]["norm"][3] += 1
        if NAME in ("trainer", "c"):
            refused(syncs[0].verify, RunError, "not the source's: norm (from rank")
        else:
            syncs[0].verify()


def engines_after_a_killed_relay_get_the_same_run() -> None:
    """Who is behind an engine that dies in the middle gets its weights in the same run."""
    if NAME == "a" and RANK == 1:
        end_bucket, runs = BucketGate.end, [0]

        def dying(self: BucketGate, number: int) -> None:
            end_bucket(self, number)
            runs[0] += number == 0
            if number == 1 and runs[0] == 3:
                os._exit(9)

        BucketGate.end = dying  # type: ignore[method-assign]
    with link(engines=3) as end:
        model = own_model()
        sync = prepared(end, model)
        if NAME == "a":
            serve(sync, model, lambda error: expect(_is_told(sync, model, error), f"{error}"))
            return
        if SIDE == "engine":
            serve(sync, model)
            return
        for step in range(5):
            set_values(model, step)
            report = sync.run(step)
            if step < 2:
                expect(report.fed_by == {"a": "trainer", "b": "a", "c": "b"}, f"{report}")
            elif step == 2:
                expect(list(report.lost) == ["a"], f"{report}")
                expect(set(report.engines) == {"b", "c"}, f"{report}")
                expect(report.fed_by["b"] == "trainer", f"{report}")
            else:
                expect(report.fed_by == {"b": "trainer", "c": "b"}, f"{report}")
                expect(not report.lost, f"{report}")


def _is_told(sync: WeightSync, model: Any, error: LinkError) -> bool:
    """Whether an engine that ended has one version, or says that it has none."""
    if sync.is_usable:
        expect_values(model, sync.version)
        return f"still has version {sync.version}" in str(error)
    return sync.version is None and "has parts of version" in str(error)


def engines_have_one_version_or_report_a_mix_of_two() -> None:
    """In the middle of a run: each engine has old weights or new ones, or says that it is mixed."""
    with link(engines=3) as end:
        model = own_model()
        sync = prepared(end, model)
        if SIDE == "engine":
            serve(sync, model, lambda error: expect(_is_told(sync, model, error), f"{error}"))
            return
        for step in range(3):
            set_values(model, step)
            if step == 2:
                die_after_a_message()
            sync.run(step)


def die_after_a_message() -> None:
    """What this process sends second is not sent any more."""

    def die_at_the_second(_: torch.Tensor) -> None:
        if SENT[0] == 1:
            os._exit(9)
        SENT[0] += 1

    before_sending(die_at_the_second)


def an_engine_of_other_types_is_served_by_the_trainer() -> None:
    """An engine whose types differ is served by the trainer, in the same run and from then on."""
    with link(engines=3) as end:
        model = own_model()
        if NAME == "c":
            model = zeros(values(dtype=torch.bfloat16))
        met = _count_meetings()
        sync = prepared(end, model, **({"cast": True} if SIDE == "trainer" else {}))
        for step in range(4):
            if SIDE == "trainer":
                set_values(model, step)
            report = sync.run()
            if SIDE == "trainer":
                fed_by = {"a": "trainer", "b": "a", "c": "trainer"}
                expect(report.fed_by == fed_by and not report.lost, f"{report}")
            elif NAME == "c":
                expect_same(model, values(step, dtype=torch.bfloat16), f"step {step}")
            else:
                expect_values(model, step)
        # Both others are of one kind, so that one is not tried.
        expect(NAME != "c" or met == [1], f"tried {met} times")


def names_of_megatron_core_need_no_mapping() -> None:
    """What Megatron-core had, tied and with experts that engines stack: nobody names anything."""
    with link(engines=3) as end:
        for case in ("stages_tied", "experts"):
            recorded = model_records.read(case)
            right = {**recorded["saved"]}
            model: Any = None
            if SIDE == "trainer":
                model = MegatronModel(model_records.rebuild(recorded["ranks"][RANK]))
            else:
                model = to_hub(right if NAME == "c" else model_records.stacked(right), case)
            sync = prepared(end, model)
            for step in range(2):
                report = sync.run()
                if SIDE == "trainer":
                    fed_by = {"a": "trainer", "b": "a", "c": "b"}
                    expect(report.fed_by == fed_by and not report.lost, f"{case}: {report}")
                    continue
                whole = right if NAME == "c" else model_records.stacked(right)
                for name, tensor in model.items():
                    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    expect(torch.equal(found, whole[name]), f"{NAME}: {case}, {name} at {step}")
                # Two names may be of one tensor.
                for tensor in model.values():
                    tensor.zero_()


def to_hub(whole: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """Zeros of an engine: rows on engine a, columns on engine b, all on c; what is tied is one."""
    found = zeros(whole)
    if NAME != "c":
        mesh, dimension = init_device_mesh("cpu", (2,)), int(NAME == "b")
        found = {
            name: distribute_tensor(one, mesh, [Shard(min(dimension, one.ndim - 1))])
            for name, one in found.items()
        }
    if case.endswith("_tied"):
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def only_changes_are_relayed() -> None:
    """What changed since the last run is all that is handed on; all have what a full run has."""
    rows, columns = {"a": (Shard(0), Shard(1)), "b": (Shard(1), Shard(0))}.get(
        NAME, (Shard(1), Shard(1))
    )

    def at_step(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        given = {name: torch.randn(64, 96, generator=generator) for name in ("first", "second")}
        given["first"][step, 5] += 1
        given["second"][::9, step] -= step
        return given

    with link(engines=3) as end:
        model: dict[str, torch.Tensor] = at_step(0)
        if SIDE == "engine":
            model = zeros(model)
        if NAME != "c":
            mesh = init_device_mesh("cpu", (2,))
            model = {
                name: distribute_tensor(one, mesh, [cut_as])
                for (name, one), cut_as in zip(model.items(), (rows, columns), strict=True)
            }
        sync = prepared(end, model, **({"changed_only": "elements"} if SIDE == "trainer" else {}))
        sizes = []
        for step in range(4):
            whole = at_step(step)
            if SIDE == "trainer":
                for name, one in model.items():
                    one.copy_(distribute_tensor(whole[name], one.device_mesh, one.placements))
            report = sync.run()
            if SIDE == "trainer":
                expect(report.fed_by == {"a": "trainer", "b": "a", "c": "b"}, f"{report}")
                continue
            sizes.append(report.received_bytes)
            for name, one in model.items():
                found = one.full_tensor() if isinstance(one, DTensor) else one
                expect(torch.equal(found, whole[name]), f"{NAME}: {name} at {step}")
        expect(SIDE == "trainer" or max(sizes[1:]) < sizes[0] / 4, f"{NAME}: {sizes}")
        sync.verify()


def quantized_weights_are_relayed_as_they_are() -> None:
    """Float8 and scales, made once on the way, are handed on as they are, cut alike or not."""
    name, block = "mlp.up_proj.weight", BlockQuantized()
    scales = f"{name}_scale_inv"

    def at_step(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 + step)
        return torch.randn(256, 384, generator=generator).bfloat16()

    def blank() -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros(256, 384).to(torch.float8_e4m3fn),
            scales: torch.zeros(2, 3),
        }

    with link(engines=3) as end:
        model: dict[str, Any] = blank()
        if NAME != "c":
            mesh = init_device_mesh("cpu", (2,))
            model = {
                one: distribute_tensor(tensor.float(), mesh, [Shard(0)]).to(tensor.dtype)
                for one, tensor in model.items()
            }
        if SIDE == "trainer":
            model = {name: distribute_tensor(at_step(0), mesh, [Shard(0)])}
        said = {"quantize": "fp8-block128"} if SIDE == "trainer" else {}
        sync = prepared(end, model, **said)
        for step in range(3):
            if SIDE == "trainer":
                model[name].copy_(distribute_tensor(at_step(step), mesh, [Shard(0)]))
            report = sync.run()
            if SIDE == "trainer":
                expect(report.fed_by == {"a": "trainer", "b": "a", "c": "b"}, f"{report}")
                continue
            made = blank()
            block.finish_receive(name, at_step(step), made)
            for one, tensor in model.items():
                wanted = made[one] if NAME == "c" else made[one].chunk(2)[RANK]
                found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                same = torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))
                expect(same, f"{NAME}: {one} at {step}")


def _count_meetings() -> list[int]:
    from reshard.torch.links.membership import LinkMembers

    met, meet = [0], LinkMembers.meet_engine

    def counting(self: LinkMembers, *given: Any) -> Any:
        met[0] += 1
        return meet(self, *given)

    LinkMembers.meet_engine = counting  # type: ignore[method-assign]
    return met


if __name__ == "__main__":
    names = ("trainer", "a", "b")
    PORTS.update(zip(("link", *names), map(int, sys.argv[2:]), strict=True))
    socket.gethostname = lambda: f"host-of-{NAME}"
    begin_job()
    globals()[sys.argv[1]]()
    os._exit(0)
