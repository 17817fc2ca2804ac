"""The order in which axes of a mesh count ranks."""

from __future__ import annotations

import itertools

import pytest

from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.rank_order import describe_groups, describe_order, order_axes

MEGATRON = ("pp", "dp", "fsdp", "ep", "cp", "tp")


def order(text: str, order: str | list[str] | None = None) -> str:
    return order_axes(DeviceMesh.parse(text), order).text


def test_axes_are_ordered_by_their_purpose() -> None:
    for axes in itertools.permutations(MEGATRON, 3):
        expected = [f"{axis}=2" for axis in MEGATRON if axis in axes]
        assert order(",".join(f"{axis}=2" for axis in axes)) == ",".join(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp=2", "tp=2"),
        ("y=2,x=3", "y=2,x=3"),
        ("tp=2,y=3,pp=2,x=4", "y=3,x=4,pp=2,tp=2"),
        ("pp=2,dp_replicate=2,dp_shard=3,tp=2", "pp=2,dp_replicate=2,dp_shard=3,tp=2"),
        ("etp=2,ep=4", "ep=4,etp=2"),
        ("pp=2,vp=3", "pp=2,vp=3"),
        ("", ""),
    ],
)
def test_other_axes_are_the_slowest(text: str, expected: str) -> None:
    assert order(text) == expected


def test_another_order() -> None:
    assert order("pp=2,dp=3,tp=4", "tp,pp,dp") == "dp=3,pp=2,tp=4"
    assert order("pp=2,dp=3,tp=4", ["dp", "pp", "tp"]) == "tp=4,pp=2,dp=3"
    assert order("pp=2,tp=4", "tp-cp-ep-dp-pp") == "pp=2,tp=4"
    assert order("tp=4,pp=2", "text") == "tp=4,pp=2"
    for given, message in (
        ("tp", "'tp' for the mesh tp=2,pp=2 lacks pp; give all axes from the fastest"),
        ("tp,pq,pp", "'pq' is not an axis of it"),
        ("tp,pp,tp", "'tp' is in it twice"),
    ):
        with pytest.raises(UsageError, match=message):
            order("tp=2,pp=2", given)


def test_notes_describe_an_order_that_is_not_as_written() -> None:
    mesh, written = DeviceMesh.of(pp=2, tp=2), DeviceMesh.of(tp=2, pp=2)
    (note,) = describe_order(mesh, written)
    assert "counted over pp=2,tp=2, the last axis fastest, not as written (--mesh" in note
    assert "--mesh-order" not in describe_order(mesh, written, can_change=False)[0]
    assert describe_order(DeviceMesh.of(pp=1, tp=2), DeviceMesh.of(tp=2, pp=1)) == ()
    assert describe_groups(DeviceMesh.of(pp=20), "pp").endswith("pp 7 is ranks 7 and 12 more")
    ordered = DeviceMesh("mesh", (2, 2), ("tp", "pp"), (0, 2, 1, 3))
    assert describe_groups(ordered, "pp") == "pp 0 is ranks 0,1, pp 1 is ranks 2,3"
