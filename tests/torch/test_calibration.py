"""Real jobs, calibrated in a moment; nothing is said about how long anything takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from live_processes import expect_all_end_well, run_ranks
from reshard.collectives import choose
from reshard.cost import load_preset
from reshard.cost.fitting import COPIES, SHARED, WITHIN_HOST
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.sharding import spec
from reshard.torch.calibration import SMALLEST_BYTES, Case, cases_of, hosts_of

ALL_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def test_the_command_writes_a_preset_that_loads(tmp_path: Path) -> None:
    ended = run_ranks("calibration_process.py", 2, "by_command", tmp_path)
    expect_all_end_well(ended)
    preset = load_preset(tmp_path / "machine.toml")
    assert (preset.name, preset.library, preset.ranks_per_host) == ("ours", "gloo", 2)
    overhead = preset.overhead
    assert overhead.call_s > 0 and overhead.copies and overhead.shared_messages
    assert [path.name for path in tmp_path.iterdir()] == ["machine.toml"]
    # Only the first rank reports.
    assert "wrote" in ended[0].output and "a call" in ended[0].output
    assert "wrote" not in ended[1].output
    mesh = DeviceMesh.of(x=2)
    choice = choose(
        spec(mesh, "x, -"), spec(mesh, "-, x"), (64, 64), "float32", preset.topology(),
        library="gloo",
    )  # fmt: skip
    assert choice.estimate.seconds_s > overhead.call_s

    ended = run_ranks("calibration_process.py", 2, "again", tmp_path)
    expect_all_end_well(ended)
    assert "machine.toml exists; give --overwrite" in ended[0].output
    assert "exists" not in ended[1].output


def test_links_within_and_between_hosts_are_measured(tmp_path: Path) -> None:
    expect_all_end_well(run_ranks("calibration_process.py", 4, "hosts", tmp_path))


def test_ranks_must_be_numbered_host_by_host() -> None:
    assert hosts_of(["a"]) == 1 and hosts_of(["b", "b", "a", "a", "c", "c"]) == 3
    for names in (["a", "b", "a", "b"], ["a", "a", "b"], ["a", "b", "b", "b"]):
        with pytest.raises(UsageError, match="numbered host by host"):
            hosts_of(names)


def by_name(cases: tuple[Case, ...]) -> dict[str, Case]:
    """The cases of the largest size."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.name, case)
    return found


def test_measurements_equal_those_counted_by_hand() -> None:
    # Four ranks with 1 MiB each: matrices of 1024 x 1024 float32, 256 rows a rank.
    cases = by_name(cases_of(1, 4, 1 << 20, ALL_KINDS))
    mib = 1 << 20
    expected = {
        # Messages, bytes, runs, copied and combined bytes: of rank 0, or of all ranks.
        "one run": (COPIES, 0, 0, 1, mib, 0),
        "short runs": (COPIES, 0, 0, mib // 32, mib // 2, 0),
        "pair": (WITHIN_HOST, 1, mib, 0, 0, 0),
        "shift": (SHARED, 4, 4 * mib, 0, 0, 0),
        "rows to columns": (SHARED, 12, 3 * mib, 4 * 1024, 4 * mib, 0),
        "columns to rows": (SHARED, 12, 3 * mib, 4 * 1024, 4 * mib, 0),
        "gather of rows": (SHARED, 12, 3 * mib, 4, mib, 0),
        "slice of rows": (SHARED, 0, 0, 4, mib, 0),
        "slice in short runs": (SHARED, 0, 0, mib // 16, mib, 0),
    }
    for name, (subject, *counts) in expected.items():
        measured = cases[name].measurement(1.0, range(4))
        assert measured.subject == subject
        assert list(measured.counts) == counts, name
    sums = cases["sum everywhere"].measurement(1.0, range(4))
    assert (sums.messages, sums.size_bytes, sums.combined_bytes) == (12, 12 * mib, 12 * mib)
    for name, rounds, parts in (
        ("all-gather", 3, 3),
        ("reduce-scatter", 3, 3),
        ("all-reduce", 6, 6),
        ("all-to-all", 3, 3),
    ):
        found = cases[name].measurement(1.0, range(4))
        assert (found.subject, found.messages, found.size_bytes) == (name, rounds, parts * mib / 4)
        assert cases[name].method == "program"


def test_a_link_between_hosts_is_that_of_one_rank() -> None:
    # Both ranks of a host send, and the network is shared; what one of them sends is counted.
    across = by_name(cases_of(2, 2, 1 << 20))["to the next host"]
    found = across.measurement(1.0, range(2))
    assert list(found.counts) == [1, 1 << 20, 0, 0, 0]
    moves = across.plan.transfers.moving
    assert sorted(moves.source_slot.tolist()) == [0, 1, 2, 3]
    assert ((moves.source_slot + 2) % 4 == moves.target_slot).all()


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 2), (1, 3), (1, 8), (2, 1), (2, 4), (3, 3)])
def test_cases_fit_any_job(hosts: int, ranks: int) -> None:
    largest_bytes = 1 << 16
    cases = cases_of(hosts, ranks, largest_bytes, ALL_KINDS)
    counts = Counter(case.subject for case in cases)
    assert (counts["between_hosts"] > 0) == (hosts > 1)
    assert (counts[SHARED] > 0) == (ranks > 1)
    for case in cases:
        plan = case.plan
        plan.verify()
        for layout in (plan.source, plan.target):
            # Rounded up to whole rows and columns.
            most = max((layout.cell_shape.prod(axis=1) * 4).tolist())
            assert most <= largest_bytes or most <= 4 * ranks**2
        case.measurement(1.0, range(ranks))
        if case.subject == SHARED:
            host = plan.transfers.source_slot // ranks == plan.transfers.target_slot // ranks
            assert host.all(), case.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1, 1, 1 << 20), "a job of 1 rank"), ((1, 2, SMALLEST_BYTES - 1), "at most 4095 bytes")],
)
def test_jobs_that_cannot_be_measured_are_refused(
    arguments: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        cases_of(*arguments)
