"""Who hands on weights to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import threading

from reshard.errors import RunError
from reshard.torch.links.relay_tree import BucketGate, RelayedEngine, assign_turns, plan_relays


def engine(number: int, hosts: str, kind: str = "") -> RelayedEngine:
    return RelayedEngine(number, frozenset(hosts.split()), kind)


def test_engines_on_hosts_of_their_own_are_a_chain() -> None:
    engines = [engine(3, "c"), engine(1, "a"), engine(2, "b"), engine(4, "t"), engine(5, "t u")]
    assert plan_relays(["t"], engines) == {1: None, 2: 1, 3: 2, 4: None, 5: 3}
    assert plan_relays(["t", "u"], engines)[5] is None


def test_a_host_is_entered_once() -> None:
    # Of four engines on two hosts, those of one host hand on within it.
    engines = [engine(1, "a"), engine(2, "b"), engine(3, "a"), engine(4, "b")]
    feeds = plan_relays(["t"], engines)
    assert feeds == {1: None, 3: 1, 2: 3, 4: 2}


def test_an_engine_that_none_can_serve_is_the_trainers() -> None:
    engines = [engine(1, "a", "x"), engine(2, "b", "x"), engine(3, "c", "y"), engine(4, "d", "y")]

    def are_alike(source: RelayedEngine, target: RelayedEngine) -> bool:
        return source.kind == target.kind

    assert plan_relays(["t"], engines, are_alike) == {1: None, 2: 1, 3: None, 4: 3}
    assert plan_relays(["t"], engines, lambda *_: False) == dict.fromkeys((1, 2, 3, 4))
    # Where the nearest may not, one farther ahead does, also a second time.
    by_first = plan_relays(["t"], engines, lambda source, target: source.number == 1)
    assert by_first == {1: None, 2: 1, 3: 1, 4: 1}


@given(st.lists(st.tuples(st.sampled_from("tabc"), st.sampled_from("xy")), max_size=8))
def test_every_engine_is_served_from_the_trainer_on(of: list[tuple[str, str]]) -> None:
    engines = [engine(number, host, kind) for number, (host, kind) in enumerate(of)]
    feeds = plan_relays(["t"], engines)
    assert feeds.keys() == set(range(len(of)))
    for number in feeds:
        seen, at = set(), number
        while (source := feeds[at]) is not None:
            assert at not in seen
            seen.add(at)
            at = source
    # Whatever leaves the trainer's host leaves it once.
    away = [one for one in engines if one.hosts != {"t"}]
    assert sum(feeds[one.number] is None for one in away) == min(len(away), 1)
    # Each host is entered once.
    for host in "abc":
        inside = {one.number for one in engines if one.hosts == {host}}
        assert sum(feeds[number] not in inside for number in inside) == min(len(inside), 1)


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(6, 9)), max_size=12))
def test_turns_of_an_engine_are_different(pairs: set[tuple[int, int]]) -> None:
    turns = assign_turns(sorted(pairs))
    for one in range(10):
        own = [turn for pair, turn in turns.items() if one in pair]
        assert len(set(own)) == len(own)


def test_a_gate_opens_bucket_by_bucket() -> None:
    gate, passed = BucketGate(), threading.Event()

    def wait() -> None:
        gate.wait(1)
        passed.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.end(0)
    assert not passed.is_set()
    gate.end(1)
    waiting.join()
    assert passed.is_set()


def test_what_is_complete_passes_after_a_failure() -> None:
    gate = BucketGate()
    gate.end(0)
    gate.fail(ValueError("no more"))
    gate.wait(0)
    with pytest.raises(RunError, match="the weights to hand on did not come: no more"):
        gate.wait(1)
