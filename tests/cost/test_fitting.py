"""Links found again in what they would take, without and with noise, and where there is little."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.cost.fitting import Fitted, Measurement, fit
from reshard.errors import UsageError
from reshard.topology import Link
from selection import choose

SIZES = [4**power for power in range(6, 14)]
bandwidths = st.floats(1e8, 1e12)
latencies = st.floats(1e-6, 1e-3)
calls = st.floats(0, 1e-2)


def call(seconds_s: float) -> list[Measurement]:
    return [Measurement("call", "call", seconds_s)] * 3 if seconds_s > 0 else []


def pairs(link: Link, call_s: float, subject: str = "within_host") -> list[Measurement]:
    return [
        Measurement(
            subject,
            "pair",
            call_s + link.latency_s + size / link.bandwidth_bytes_per_s,
            messages=1,
            size_bytes=size,
        )
        for size in SIZES
    ]


def near(found: Link | None, expected: Link, relative: float) -> bool:
    assert found is not None
    return (
        abs(found.bandwidth_bytes_per_s / expected.bandwidth_bytes_per_s - 1) <= relative
        and abs(found.latency_s / expected.latency_s - 1) <= relative
    )


@given(bandwidths, latencies, calls, st.sampled_from(["within_host", "between_hosts"]))
def test_fitting_recovers_the_link_that_made_the_measurements(
    bandwidth: float, latency_s: float, call_s: float, subject: str
) -> None:
    # Both count in some of the sizes: else no measurement could tell them.
    latency_s = max(latency_s, SIZES[0] / bandwidth, call_s * 1e-3)
    bandwidth = min(bandwidth, SIZES[-1] / (latency_s + call_s) * 100)
    link = Link(bandwidth, latency_s)
    found = fit(call(call_s) + pairs(link, call_s, subject))
    other = "between_hosts" if subject == "within_host" else "within_host"
    assert near(getattr(found, subject), link, 1e-4)
    assert getattr(found, other) is None
    assert found.overhead.call_s == (call_s if call_s > 0 else 0.0)
    assert all(abs(ratio - 1) < 1e-6 for ratio in found.ratios)


# Messages, bytes, runs, copied and combined bytes of what a host's ranks do together.
SHARED = [
    (4, size, runs, copied, combined)
    for size in SIZES
    for runs, copied, combined in (
        (0, 0, 0),
        (size // 64, size, 0),
        (4, 3 * size, 0),
        (4, size, 2 * size),
    )
] + [(0, 0, size // 16, size, 0) for size in SIZES]


def shared(messages: Link, copies: Link, combining: float, call_s: float) -> list[Measurement]:
    return [
        Measurement(
            "shared",
            "shared",
            call_s
            + count * messages.latency_s
            + size / messages.bandwidth_bytes_per_s
            + runs * copies.latency_s
            + (copied + combining * combined) / copies.bandwidth_bytes_per_s,
            count,
            size,
            runs,
            copied,
            combined,
        )
        for count, size, runs, copied, combined in SHARED
    ]


@settings(max_examples=choose(15, 40), deadline=None)
@given(
    st.floats(1e9, 1e10), st.floats(1e-5, 1e-3), st.floats(1e9, 1e10), st.floats(1e-9, 1e-7),
    st.floats(1, 10), st.floats(1e-4, 1e-2),
)  # fmt: skip
def test_the_shared_links_of_a_host_are_fitted(
    bandwidth: float,
    latency_s: float,
    copying: float,
    run_s: float,
    combining: float,
    call_s: float,
) -> None:
    messages, copies = Link(bandwidth, latency_s), Link(copying, run_s)
    found = fit(call(call_s) + shared(messages, copies, combining, call_s)).overhead
    assert near(found.shared_messages, messages, 1e-3)
    assert near(found.shared_copies, copies, 1e-3)
    assert abs(found.combining - combining) < 1e-2
    assert (found.call_s, found.copies) == (call_s, None)


@given(st.integers(0, 1000))
def test_noise_of_a_tenth_moves_estimates_little(seed: int) -> None:
    noise = random.Random(seed)
    link, call_s = Link(2e9, 3e-4), 2e-3
    noisy = [
        Measurement(
            one.subject,
            one.name,
            one.seconds_s * noise.uniform(0.9, 1.1),
            one.messages,
            one.size_bytes,
        )
        for one in pairs(link, call_s) * 3
    ]
    found = fit(call(call_s) + noisy)
    assert found.within_host is not None
    for one in pairs(link, call_s):
        seconds_s = (
            found.overhead.call_s
            + found.within_host.latency_s
            + one.size_bytes / found.within_host.bandwidth_bytes_per_s
        )
        assert abs(seconds_s / one.seconds_s - 1) < 0.12


@pytest.mark.parametrize("times", [0.3, 3, 100])
def test_measurements_gone_wrong_count_little(times: float) -> None:
    link, call_s = Link(2e9, 3e-4), 2e-3
    measured = pairs(link, call_s) * 3
    gone = {1, 5, 9, 15, 19}
    for place in gone:
        wrong = measured[place]
        measured[place] = Measurement(
            wrong.subject, wrong.name, wrong.seconds_s * times, wrong.messages, wrong.size_bytes
        )
    found = fit(call(call_s) + measured)
    right = [ratio for number, ratio in enumerate(found.ratios[3:]) if number not in gone]
    # Without weights, 0.3 moves them by more than a half.
    assert all(abs(ratio - 1) < 0.1 for ratio in right)


def test_kinds_of_collectives_have_links_of_their_own() -> None:
    ring = [
        Measurement("all-reduce", "all-reduce", 1e-3 + 6 * 1e-4 + size / 1e9, 6, size)
        for size in SIZES
    ]
    found = fit(call(1e-3) + ring)
    (kind, link) = found.overhead.collectives[0]
    assert kind == "all-reduce" and near(link, Link(1e9, 1e-4), 1e-6)
    assert found.within_host is None


def test_a_step_costs_the_time_that_it_adds_to_a_call() -> None:
    steps = [Measurement("step", "step", seconds_s) for seconds_s in (3e-3, 5e-3, 4e-3)]
    assert fit(call(1e-3) + steps).overhead.step_s == pytest.approx(3e-3)
    # A step that seems to take less than nothing takes nothing.
    assert fit(call(9e-3) + steps).overhead.step_s == 0


def test_without_measurements_nothing_is_fitted() -> None:
    found = fit([])
    assert (found.within_host, found.between_hosts, found.typical_error) == (None, None, 0.0)
    assert found.overhead.shared_messages is found.overhead.copies is None
    assert found.overhead.collectives == ()


def test_times_that_do_not_grow_leave_next_to_nothing_to_bytes() -> None:
    flat = [Measurement("within_host", "pair", 1e-3, 1, size) for size in (1000, 2000, 4000)]
    found = fit(flat).within_host
    assert found is not None and found.bandwidth_bytes_per_s == pytest.approx(4e8)
    assert fit(flat).ratios == pytest.approx([1, 1, 1], abs=0.02)
    # Faster than the call alone, as noise has it: no cost is negative.
    odd = fit(call(1e-2) + flat).within_host
    assert odd is not None and odd.latency_s == 0
    assert odd.bandwidth_bytes_per_s == pytest.approx(4e8)


def test_a_single_size_is_explained() -> None:
    one = [Measurement("within_host", "pair", 3e-3, 1, 1 << 20)]
    found = fit(call(1e-3) + one)
    assert found.ratios[-1] == pytest.approx(1, abs=0.02)


@settings(max_examples=choose(6, 15), deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_measurements_changes_next_to_nothing(order: random.Random) -> None:
    measured = call(1e-3) + shared(Link(2e9, 1e-4), Link(4e9, 1e-8), 2.0, 1e-3)
    shuffled = measured[:]
    order.shuffle(shuffled)
    one, other = fit(measured).overhead, fit(shuffled).overhead
    assert one.shared_messages is not None
    assert near(other.shared_messages, one.shared_messages, 1e-9)
    assert fit(measured) == fit(measured)


def test_the_typical_error_is_the_median() -> None:
    found = Fitted(None, None, fit([]).overhead, (1.0, 1.3, 0.6))
    assert found.typical_error == pytest.approx(median([0, 0.3, 0.4]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gossip", "x", 1.0), "unknown subject 'gossip'; it is one of call, step"),
        (("call", "x", 0.0), "'x' took 0.0 seconds"),
        (("call", "x", float("nan")), "'x' took nan seconds"),
        (("call", "x", 1.0, -1), "a count below 0"),
    ],
)
def test_invalid_measurements_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Measurement(*arguments)  # type: ignore[arg-type]
