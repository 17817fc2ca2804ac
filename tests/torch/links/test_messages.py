"""Orders, outcomes and options are read as they were written, and other texts are refused."""

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
    read_message,
    read_options,
    write_message,
    write_options,
)

HAND_ON = ForwardOrder("0/1", 1, 3, 4, 2, 1)


def test_an_order_is_read_as_it_was_written() -> None:
    order = Order(2, 7, (HAND_ON,))
    assert Order.read(write_message(order), 2) == order
    assert order.feed_of(4) == HAND_ON and order.feed_of(3) is None


@pytest.mark.parametrize(
    "change",
    [
        {"sync": "0"},
        {"version": -1},
        {"version": True},
        {"version": "7"},
        {"hand_ons": [{"meeting": "m"}]},
        {
            "hand_ons": [
                {**json.loads(write_message(Order(0, 0, (HAND_ON,))))["hand_ons"][0], "turn": "1"}
            ]
        },
        {
            "hand_ons": [
                {**json.loads(write_message(Order(0, 0, (HAND_ON,))))["hand_ons"][0], "meeting": 1}
            ]
        },
        {"hand_ons": 3},
    ],
)
def test_invalid_orders_are_refused(change: dict[str, object]) -> None:
    text = json.dumps({"sync": 0, "version": 7, "hand_ons": [], **change}).encode()
    with pytest.raises(LinkError, match="is no order of a trainer"):
        Order.read(text, 0)


def test_an_order_for_another_model_is_refused() -> None:
    told = "first rank runs model 1 of the link, and this process model 0.*in one order on all"
    with pytest.raises(PlanError, match=told):
        Order.read(write_message(Order(1, 7)), 0)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"7"])
def test_texts_that_are_not_messages_are_refused(text: bytes) -> None:
    with pytest.raises(LinkError, match="is no order"):
        Order.read(text, 0)
    if text:
        with pytest.raises(LinkError, match="is no outcome"):
            RunOutcome.read([text])


def test_outcomes_of_ranks_are_combined() -> None:
    one = RunOutcome("", {"0/1": (BROKE, "gone"), "0/2": (BROKE, "gone")})
    other = RunOutcome("lacks norm", {"0/1": (MISFIT, "norm is not there")})
    found = RunOutcome.read([b"", one.write(), other.write(), one.write()])
    assert found.lacks == "lacks norm"
    assert found.ended == {"0/1": (MISFIT, "norm is not there"), "0/2": (BROKE, "gone")}
    with pytest.raises(LinkError, match="is no outcome"):
        RunOutcome.read([b'{"lacks": "", "ended": {"0/1": "gone"}}'])
    with pytest.raises(LinkError, match="is no outcome"):
        RunOutcome.read([b'{"lacks": 1, "ended": {}}'])


def test_options_are_read_as_they_were_written() -> None:
    given = {"ties": {"head": "embed"}, "cast": True, "buckets": "auto"}
    assert read_options(write_options({**given, "quantize": None})) == given
    with pytest.raises(UsageError, match="extra_bytes='1GB', a str; give a int"):
        write_options({"extra_bytes": "1GB"})
    with pytest.raises(UsageError, match="cast=3, a int; give a bool or str or dict"):
        write_options({"cast": 3})
    with pytest.raises(UsageError, match="is not JSON serializable"):
        write_options({"ties": {"head": len}})
    with pytest.raises(LinkError, match="is no table of a trainer's options"):
        read_options(b'{"strict": 3}')


def test_fields_of_other_protocols_are_ignored() -> None:
    text = json.dumps({"sync": 0, "version": 1, "hand_ons": [], "colour": "red"})
    assert Order.read(text.encode(), 0) == Order(0, 1)


@pytest.mark.parametrize("text", ['{"up": -1}', '{"up": true}', '{"up": "1"}', "[1]", "1", ""])
def test_invalid_tables_of_buckets_are_refused(text: str) -> None:
    assert read_message(dict[str, int], '{"up": 1}', "table of buckets") == {"up": 1}
    with pytest.raises(LinkError, match="is no table of buckets; give both sides one release"):
        read_message(dict[str, int], text, "table of buckets")
