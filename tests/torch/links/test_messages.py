"""Orders and outcomes come back as they were, and anything else is refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from reshard.errors import LinkError, PlanError, UsageError
from reshard.torch.links.messages import (
    BROKE,
    MISFIT,
    ForwardOrder,
    Order,
    RunOutcome,
    read_options,
    write_options,
)

HAND_ON = ForwardOrder("0/1", 1, 3, 4, 2, 1)


def test_an_order_comes_back() -> None:
    order = Order(2, 7, (HAND_ON,))
    assert Order.read(order.write(), 2) == order
    assert order.feed_of(4) == HAND_ON and order.feed_of(3) is None


@pytest.mark.parametrize(
    "change",
    [
        {"sync": "0"},
        {"version": -1},
        {"version": True},
        {"version": "7"},
        {"hand_ons": [{"meeting": "m"}]},
        {"hand_ons": [{**json.loads(Order(0, 0, (HAND_ON,)).write())["hand_ons"][0], "turn": "1"}]},
        {
            "hand_ons": [
                {**json.loads(Order(0, 0, (HAND_ON,)).write())["hand_ons"][0], "meeting": 1}
            ]
        },
        {"hand_ons": 3},
    ],
)
def test_what_is_no_order(change: dict[str, object]) -> None:
    text = json.dumps({"sync": 0, "version": 7, "hand_ons": [], **change}).encode()
    with pytest.raises(LinkError, match="is no order of a trainer"):
        Order.read(text, 0)


def test_an_order_of_another_model() -> None:
    told = "first rank runs model 1 of the link, and this process model 0.*in one order on all"
    with pytest.raises(PlanError, match=told):
        Order.read(Order(1, 7).write(), 0)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"7"])
def test_what_is_no_text_of_ours(text: bytes) -> None:
    with pytest.raises(LinkError, match="is no order"):
        Order.read(text, 0)
    if text:
        with pytest.raises(LinkError, match="is no outcome"):
            RunOutcome.read([text])


def test_outcomes_of_ranks_are_one() -> None:
    one = RunOutcome("", {"0/1": (BROKE, "gone"), "0/2": (BROKE, "gone")})
    other = RunOutcome("lacks norm", {"0/1": (MISFIT, "norm is not there")})
    found = RunOutcome.read([b"", one.write(), other.write(), one.write()])
    assert found.lacks == "lacks norm"
    assert found.ended == {"0/1": (MISFIT, "norm is not there"), "0/2": (BROKE, "gone")}
    with pytest.raises(LinkError, match="is no outcome"):
        RunOutcome.read([b'{"lacks": "", "ended": {"0/1": "gone"}}'])
    with pytest.raises(LinkError, match="is no outcome"):
        RunOutcome.read([b'{"lacks": 1, "ended": {}}'])


def test_options_of_a_trainer() -> None:
    given = {"ties": {"head": "embed"}, "cast": True, "buckets": "auto"}
    assert read_options(write_options({**given, "quantize": None})) == given
    with pytest.raises(UsageError, match="extra_bytes='1GB', a str; give a int"):
        write_options({"extra_bytes": "1GB"})
    with pytest.raises(UsageError, match="cast=3, a int; give a bool or str or dict"):
        write_options({"cast": 3})
    with pytest.raises(UsageError, match="is not JSON serializable"):
        write_options({"ties": {"head": len}})
    with pytest.raises(LinkError, match="are no options of a trainer"):
        read_options(b'{"strict": 3}')
