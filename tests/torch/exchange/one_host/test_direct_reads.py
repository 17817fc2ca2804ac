"""Direct reads of another process's memory; this process stands for both ends."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from live_processes import expect_all_end_well, run_ranks
from reshard.errors import RunError, UsageError
from reshard.runs import IntArray
from reshard.system import MAX_SPANS, find_peer_process, read_process_memory
from reshard.torch.exchange.one_host import direct_reads
from reshard.torch.exchange.one_host.direct_reads import (
    ROW_BYTES,
    VARIABLE,
    can_be_read,
    connect_direct_reads,
    pays,
    read_spans,
)
from reshard.torch.exchange.packing.messages import list_spans

pytestmark = pytest.mark.linux_only(reason="process_vm_readv")


def refuse(*_: object) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_rows_of_any_strides_arrive_in_rows_of_any_others() -> None:
    rows = MAX_SPANS + 7
    source = torch.arange(rows * 12, dtype=torch.int16).view(rows, 12)
    wide, tall = torch.zeros(rows, 9, dtype=torch.int16), torch.zeros(6, rows, dtype=torch.int16)
    for view, into in [
        (source[:, 3:9], wide[:, 2:8]),
        (source[:, 3:9], tall.view(rows, 6)),
        (source.view(-1)[: 6 * rows].view(rows, 6), wide[:, :6]),
    ]:
        read_spans(os.getpid(), list_spans([view]), list_spans([into]))
        assert torch.equal(view, into)


def test_several_tensors_are_one_message() -> None:
    sources = [torch.arange(4.0), torch.ones(0), torch.arange(6.0).view(2, 3)[:, 1:]]
    targets = [torch.zeros(8)[::2], torch.ones(0), torch.zeros(2, 2).T]
    read_spans(os.getpid(), list_spans(sources), list_spans(targets))
    assert all(map(torch.equal, sources, targets))


def test_what_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = np.zeros(8, dtype=np.uint8)
    into = np.array([[target.ctypes.data, 8]])
    assert can_be_read(target.ctypes.data) and not can_be_read(64)
    with pytest.raises(RuntimeError, match=f"Bad address.*{VARIABLE}=never"):
        read_spans(os.getpid(), np.array([[64, 8]]), into)
    with pytest.raises(RuntimeError, match="only 4 of 8 bytes"):
        read_spans(os.getpid(), np.array([[target.ctypes.data, 4], [64, 4]]), into)
    with pytest.raises(RuntimeError, match="9 bytes are sent where 8 were expected"):
        read_spans(os.getpid(), np.array([[target.ctypes.data, 9]]), into)
    monkeypatch.setattr(direct_reads, "read_process_memory", refuse)
    with pytest.raises(RuntimeError, match="Operation not permitted"):
        read_spans(os.getpid(), into, into)


def connect(modes: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...] | None]:
    """Connect threads, which stand for ranks with these values of the variable."""
    count = len(modes)
    barrier, rows = threading.Barrier(count, timeout=60), [torch.empty(0)] * count
    found: list[tuple[float, ...] | None] = [None] * count
    modes_by_thread: dict[str, str] = {}
    monkeypatch.setattr(
        direct_reads, "_read_mode", lambda: modes_by_thread[threading.current_thread().name]
    )

    def gather_at(position: int) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        def gather(own: torch.Tensor) -> list[torch.Tensor]:
            rows[position] = own.clone()
            barrier.wait()
            every = [row.clone() for row in rows]
            barrier.wait()
            return every

        return gather

    pairs = {
        (low, high): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for high in range(count)
        for low in range(high)
    }

    def run(position: int) -> None:
        sockets = {
            low + high - position: ends[position == high]
            for (low, high), ends in pairs.items()
            if position in (low, high)
        }
        found[position] = connect_direct_reads(sockets, position, gather_at(position))

    threads = [
        threading.Thread(target=run, args=(position,), name=f"rank {position}")
        for position in range(count)
    ]
    modes_by_thread |= {f"rank {position}": mode for position, mode in enumerate(modes)}
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for ends in pairs.values():
        for end in ends:
            end.close()
    return found


def test_ranks_decide_alike_by_what_the_first_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure() -> tuple[float, ...]:
        measured.append(threading.current_thread().name)
        return 1.2, 0.8

    monkeypatch.setattr(direct_reads, "measure", measure)
    found = connect(["", "", ""], monkeypatch)
    assert measured == ["rank 0"]
    for reads in found:
        assert reads is not None
        assert [pays(reads, length, 1) for length in (64, *ROW_BYTES)] == [False, False, True]
        # Shared memory is packed once for several receivers.
        assert not pays(reads, ROW_BYTES[-1], 2)
    # Any rank overrides it.
    assert connect(["", "never", ""], monkeypatch) == [None] * 3
    always = connect(["", "always", ""], monkeypatch)
    assert all(reads is not None and pays(reads, 1, 3) for reads in always)


def test_no_rank_reads_where_the_kernel_refuses_any(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_process_memory

    def refuse_last(process: int, spans: int, count: int, into: int, into_count: int) -> int:
        if threading.current_thread().name == "rank 2":
            refuse()
        return read(process, spans, count, into, into_count)

    monkeypatch.setattr(direct_reads, "read_process_memory", refuse_last)
    assert connect(["", "", ""], monkeypatch) == [None] * 3
    monkeypatch.setattr(direct_reads, "_read_mode", lambda: "always")
    monkeypatch.setattr(direct_reads, "read_process_memory", refuse)
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second, pytest.raises(RunError, match=r"ranks \[0, 1\] of the group cannot read"):
        connect_direct_reads({1: first}, 0, lambda own: [own, own])


def test_a_wrong_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(UsageError, match="RESHARD_DIRECT_READS='yes': expected 'never', 'always'"):
        connect_direct_reads({}, 0, lambda own: [own])


def test_yama_is_given_the_only_peer_and_never_another(monkeypatch: pytest.MonkeyPatch) -> None:
    permitted: list[int] = []

    def permit(process: int) -> bool:
        permitted.append(process)
        return True

    monkeypatch.setattr(direct_reads, "_PERMITTED", [])
    monkeypatch.setattr(direct_reads, "permit_reader", permit)
    monkeypatch.setattr(direct_reads, "is_tracing_restricted", lambda: False)
    direct_reads.permit_peer([11])
    assert not permitted
    monkeypatch.setattr(direct_reads, "is_tracing_restricted", lambda: True)
    # The kernel keeps one name: to change it would end the reads of another group.
    for peers in ([11, 12, 13], [], [11], [12]):
        direct_reads.permit_peer(peers)
    assert permitted == [11]


def test_a_peer_is_the_process_of_its_socket() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        assert find_peer_process(first) == os.getpid()


def test_the_measurement_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = direct_reads.measure
    measure.cache_clear()
    reads: list[IntArray] = []
    read = direct_reads.read_spans

    def count(process: int, spans: IntArray, into: IntArray) -> None:
        reads.append(spans)
        read(process, spans, into)

    monkeypatch.setattr(direct_reads, "read_spans", count)
    ratios = measure()
    assert len(ratios) == len(ROW_BYTES) and all(ratio > 0 for ratio in ratios)
    known = len(reads)
    assert measure() == ratios and len(reads) == known


def test_ranks_read_each_others_tensors() -> None:
    expect_all_end_well(run_ranks("shared_memory_process.py", 4, "direct"))
