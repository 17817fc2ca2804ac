"""Whether two models fit, as every rank finds it alone."""

from __future__ import annotations

import pytest

from reshard.errors import ShardError

torch = pytest.importorskip("torch")

from reshard.torch import BlockQuantized, Cast  # noqa: E402
from reshard.torch.refit_planning import Matching  # noqa: E402
from reshard.torch.rosters import Entry, Roster  # noqa: E402


def rosters(*entries: list[Entry]) -> dict[int, Roster]:
    return {rank: Roster(tuple(of)) for rank, of in enumerate(entries)}


def matching(**options: object) -> Matching:
    chosen = {"ties": {}, "cast": False, "strict": True, "transforms": {}, "extra_bytes": 1024}
    return Matching(**(chosen | options))  # type: ignore[arg-type]


A, B, C = (Entry(name, "int8", (2,)) for name in "abc")


def test_what_fits_is_planned() -> None:
    plan = matching().plan(rosters([A, B], []), rosters([], [A, B]))
    assert [one.name for one in plan.matches] == ["a", "b"]
    assert str(plan.part(1).items[0].transfers) == "0 -> 1 [0:2]"
    assert (
        plan.part(0).digest
        == plan.part(1).digest
        != matching().plan(rosters([A], []), rosters([], [A])).part(0).digest
    )


def test_a_tensor_that_ranks_describe_differently_is_told_once() -> None:
    other = Entry("a", "int16", (2,))
    with pytest.raises(ShardError) as caught:
        matching().plan(rosters([A, B], [other]), rosters([A], [B]))
    assert str(caught.value).splitlines() == [
        "1 thing does not fit; nothing was written:",
        "  a: the source is int8 on rank 0, int16 on rank 1",
    ]
    with pytest.raises(ShardError, match="1 thing"):
        matching().plan(rosters([A, B], [B]), rosters([A], [other, B]))


def test_many_problems_are_counted() -> None:
    many = [Entry(str(number), "int8", (2,)) for number in range(23)]
    with pytest.raises(ShardError, match="23 things do not fit") as caught:
        matching().plan(rosters([]), rosters(many))
    assert str(caught.value).splitlines()[-1] == "  ... 3 more"


def test_the_first_transform_that_fits() -> None:
    block, cast = BlockQuantized(), Cast("int8")
    found = matching(transforms={"*.w": block, "*": cast}).transforms_of(
        ["l.w", "l.w_scale_inv", "l.b"]
    )
    # What a transform makes has none of its own.
    assert found == {"l.w": block, "l.b": cast}
