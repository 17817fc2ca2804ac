"""Staged refits between real processes, also over links that count what crosses them."""

from __future__ import annotations

import json

import pytest

from host_network import HostNetwork, why_not
from live_processes import expect_all_end_well, run_ranks
from selection import keep_where

pytest.importorskip("torch")

RATE = 250_000_000


def test_refits_in_stages_between_four_ranks() -> None:
    expect_all_end_well(run_ranks("stages_process.py", 4))


@pytest.mark.parametrize(
    ("hosts", "racks"),
    keep_where(
        lambda case: len(case[0]) == 4,
        [([0, 0, 1, 1], [0, 0]), ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1])],
        "eight ranks",
    ),
    ids=["two hosts", "one host to three in two racks"],
)
def test_every_byte_enters_a_host_once(hosts: list[int], racks: list[int]) -> None:
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with HostNetwork(len(racks), RATE, racks, RATE) as network:
        order = {"hosts": hosts, "racks": racks, "rack_keepers": network.rack_pids, "rate": RATE}
        order |= {"keepers": network.host_pids, "address": network.address(0)}
        expect_all_end_well(run_ranks("hosts_process.py", len(hosts), json.dumps(order)))
