"""By which method each tensor of a refit moves, as every rank finds it alone."""

from __future__ import annotations

import pickle

import pytest

import reshard
from reshard.errors import LayoutError, PlanError
from reshard.topology import Link, Topology

torch = pytest.importorskip("torch")

from reshard.torch.programs.phases import between_bytes  # noqa: E402
from reshard.torch.refitting.matching import Match  # noqa: E402
from reshard.torch.refitting.methods import TensorMethod, choose_methods  # noqa: E402
from reshard.torch.refitting.options import RefitSettings  # noqa: E402
from reshard.torch.refitting.planning import RefitPlan  # noqa: E402

MESH = reshard.DeviceMesh.of(x=2, y=2)
ONE_HOST = Topology.of(hosts=1, ranks_per_host=4, within_host=Link(1e9))


def match(name: str, before: str, after: str, rows: int = 16, known: bool = True) -> Match:
    ends = reshard.spec(MESH, before), reshard.spec(MESH, after)
    shape = (rows, 8)
    layouts = [end.layout(shape) for end in ends]
    return Match(name, name, name, *layouts, "float32", specs=ends if known else None)


def choose(
    matches: list[Match], staging_bytes: int, *, hosts: Topology | None = None, **options: object
) -> tuple[TensorMethod, ...]:
    return choose_methods(RefitSettings(**options), hosts, matches, staging_bytes)  # type: ignore[arg-type]


SUM, TURN = ("-, - | sum(x y)", "-, -"), ("y, - | sum(x)", "x, -")
LARGE = 1 << 18


def test_without_a_topology_only_large_sums_into_replicas_go_by_programs() -> None:
    large, moved = match("large", *SUM, LARGE), match("moved", "x, -", "-, -", LARGE)
    scattered = match("scattered", "-, - | sum(x y)", "x y, -", LARGE)
    unknown = match("unknown", *SUM, LARGE, known=False)
    found = choose([large, moved, scattered, unknown, match("small", *SUM)], 1 << 20)
    assert [one.program is not None for one in found] == [True, False, False, False, True]
    assert found[0].why == "12582912 bytes by its program, 25165824 bytes in the exchange"
    assert found[1].why == "no topology is given, and nothing of it is combined"
    assert found[2].why == "no topology is given, and its program moves no less"
    assert found[3].why == "a side of it is not a DTensor"
    # One alone is too small for the wait between two steps.
    (alone,) = choose([match("small", *SUM)], 1 << 20)
    assert alone.program is None
    assert alone.why.endswith("which is less than what waits between steps take")


def test_memory_between_the_steps_is_limited() -> None:
    turned = match("turned", *TURN, 64)
    (chosen,) = choose([turned], 1 << 20, method="program")
    assert chosen.program is not None
    needed = between_bytes(chosen.program, 4)
    assert needed > 0
    assert choose([turned], needed, method="program") == (chosen,)
    with pytest.raises(PlanError, match=f"turned: its program needs {needed} bytes"):
        choose([turned], needed - 1, method="program")
    (left,) = choose([turned], needed - 1, topology=ONE_HOST)
    assert left.program is None and f"extra_bytes leaves {needed - 1}" in left.why
    # As many of them as fit are in a batch; what needs none is in the first.
    three = [turned, match("sum", *SUM), match("again", *TURN, 64), match("third", *TURN, 64)]
    plan = RefitPlan(tuple(three), 2 * needed, choose(three, 2 * needed, method="program"))
    assert plan.batches == (1, 0, 1, 2)
    assert plan.part(3).staging_bytes == 2 * needed


def test_programs_that_there_are_none_of_are_told_together() -> None:
    many = [match(str(n), *SUM, known=False) for n in range(23)]
    with pytest.raises(PlanError, match="23 of 24 tensors have no program") as caught:
        choose([match("sum", *SUM), *many], 0, method="program")
    assert str(caught.value).splitlines()[-1] == "  ... 3 more"
    # To keep what is there needs no program.
    (same,) = choose([match("same", "x, y", "x, y")], 0, method="program")
    assert (same.program, same.why) == (None, "every rank has what it needs")
    with pytest.raises(LayoutError, match="no within_host link"):
        choose([match("sum", *SUM)], 0, topology=Topology([0] * 4))


def test_what_is_compared_is_staged_where_all_of_it_travels_unless_asked_for() -> None:
    hosts = Topology.of(hosts=2, ranks_per_host=2)
    whole = match("whole", "x, -", "-, -", LARGE)
    given = [whole, whole._replace(name="wide", made_at="target"), match("sum", *SUM)]
    for method, changed_only, staged, when_whole in (
        ("auto", False, [True, True, False], [False] * 3),
        ("auto", True, [False, True, False], [True, False, False]),
        ("stages", True, [True, True, False], [False] * 3),
    ):
        found = choose(given, 1 << 20, hosts=hosts, method=method, changed_only=changed_only)
        assert [one.is_staged for one in found] == staged
        assert [one.is_staged_whole for one in found] == when_whole


def test_another_choice_is_another_plan() -> None:
    both = [match("a", *SUM), match("b", "x, -", "-, -")]
    plans = [
        RefitPlan(tuple(both), 1 << 20, choose(both, 1 << 20, method=method, topology=ONE_HOST))
        for method in ("exchange", "program", "auto")
    ]
    assert len({plan.digest for plan in plans}) == 3
    assert len({plan.part(1).digest for plan in plans}) == 3
    # What goes by a program is none of the exchange's, and a part can be given to its rank.
    assert [len(plan.job.items) for plan in plans] == [2, 0, 1]
    part = pickle.loads(pickle.dumps(plans[2].part(2)))
    assert [one.chosen for one in part.items] == [one.chosen for one in plans[2].part(2).items]
    assert len(part.items[0].transfers) == 0 < len(part.items[1].transfers)
