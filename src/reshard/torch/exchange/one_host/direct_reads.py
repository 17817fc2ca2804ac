"""Direct reads: a receiver copies bytes once, from a sender's tensor into its own.

Shared memory takes two copies: the sender packs, the receiver unpacks. Where the kernel permits it
(cross-memory attach), the receiver reads the sender's memory itself::

    sender     | row ......|          table of spans: [address, length] of each row  -- note ->
               | row ......|
    receiver          | row |         process_vm_readv, 1,024 spans a call    <- "taken" --
                      | row |

1. *Availability.* When a group is created, every rank reads a random word in each peer's memory.
   Direct reads are used if all of them succeed; see `permit_peer` for Yama.
2. *Cost.* The kernel looks up the pages of each span, so short rows are faster by shared memory.
   The first rank measures rows of several lengths, and all ranks use its results.
   `RESHARD_DIRECT_READS=always` or `never` on any rank overrides them.
3. *Lifetime.* A source must not change until its receivers have confirmed, which they do after the
   last byte is copied.

Source: man pages process_vm_readv(2), ptrace(2) and prctl(2) of Linux.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.errors import RunError, UsageError
from reshard.runs import IntArray
from reshard.system import (
    MAX_SPANS,
    find_peer_process,
    is_tracing_restricted,
    permit_reader,
    read_process_memory,
)

ByteArray: TypeAlias = NDArray[np.uint8]
VARIABLE = "RESHARD_DIRECT_READS"
_WORD_BYTES = 16
# The row lengths that are measured, and the memory that is read for each.
ROW_BYTES = (1 << 13, 1 << 16)
_PART_BYTES, _MEASURED_PARTS = 1 << 20, 4
_NEVER = float("inf")


def read_spans(process: int, spans: IntArray, into: IntArray) -> None:
    """Copy spans of another process's memory into as many bytes of the caller's.

    Raises:
        RuntimeError: the memory cannot be read.
        ProcessLookupError: the process has ended.
    """
    spans, into = _cut_alike(spans, into)
    for begin in range(0, len(spans), MAX_SPANS):
        part, into_part = spans[begin : begin + MAX_SPANS], into[begin : begin + MAX_SPANS]
        own = _merge(into_part)
        try:
            done = read_process_memory(
                process, part.ctypes.data, len(part), own.ctypes.data, len(own)
            )
        except ProcessLookupError:
            raise
        except OSError as error:
            raise RuntimeError(
                f"the memory of process {process} cannot be read ({error.strerror}); "
                f"{VARIABLE}=never does without"
            ) from error
        if done != int(part[:, 1].sum()):
            raise RuntimeError(
                f"only {done} of {int(part[:, 1].sum())} bytes of process {process} can be read"
            )


def _cut_alike(spans: IntArray, into: IntArray) -> tuple[IntArray, IntArray]:
    """Split two tables of the same bytes at the ends of both, so that rows have equal lengths.

    >>> _cut_alike(np.array([[0, 8]]), np.array([[64, 2], [96, 6]]))[0].tolist()
    [[0, 2], [2, 6]]
    """
    if len(spans) == len(into) and np.array_equal(spans[:, 1], into[:, 1]):
        return spans, into
    ends = [np.cumsum(of[:, 1]) for of in (spans, into)]
    if ends[0][-1] != ends[1][-1]:
        raise RuntimeError(f"{ends[0][-1]} bytes are sent where {ends[1][-1]} were expected")
    stops = np.union1d(*ends)
    begins = np.concatenate([[0], stops[:-1]])
    cut = []
    for table, table_ends in zip((spans, into), ends, strict=True):
        rows = np.searchsorted(table_ends, begins, side="right")
        starts = table[rows, 0] + begins - (table_ends[rows] - table[rows, 1])
        cut.append(np.stack([starts, stops - begins], axis=1))
    return cut[0], cut[1]


def _merge(spans: IntArray) -> IntArray:
    """Merge adjacent spans.

    >>> _merge(np.array([[64, 8], [72, 8], [96, 8]])).tolist()
    [[64, 16], [96, 8]]
    """
    ends = spans[:, 0] + spans[:, 1]
    begins = np.flatnonzero(np.concatenate([[True], spans[1:, 0] != ends[:-1]]))
    return np.stack([spans[begins, 0], np.add.reduceat(spans[:, 1], begins)], axis=1)


def can_be_read(address: int) -> bool:
    """Return whether other processes can read this address: not in memory mapped by a driver."""
    into = bytearray(1)
    own = np.array([[np.frombuffer(into, np.uint8).ctypes.data, 1]])
    from_there = np.array([[address, 1]])
    try:
        # The kernel reads this process as it reads others, so that no other is needed.
        return read_process_memory(os.getpid(), from_there.ctypes.data, 1, own.ctypes.data, 1) == 1
    except OSError:
        return False


def pays(ratios: Sequence[float], row_bytes: int, receivers: int) -> bool:
    """Return whether reading rows of this length directly is faster than by shared memory.

    By shared memory, bytes for several receivers are packed once.

    Args:
        ratios: the time of a direct read relative to packing and unpacking, for rows of each
            length in `ROW_BYTES`; all 0 if direct reads are always used.

    >>> pays([1.2, 0.8], 1 << 16, receivers=1), pays([1.2, 0.8], 1 << 16, receivers=3)
    (True, False)
    """
    if not any(ratios):
        return True
    shorter = sum(row_bytes >= length for length in ROW_BYTES)
    # A ratio is relative to two copies, packing and unpacking. With several receivers these are a
    # single packing, and an unpacking for each.
    return shorter > 0 and ratios[shorter - 1] * 2 * receivers < receivers + 1


_PERMITTED_LOCK = threading.Lock()
_PERMITTED: list[int] = []


def permit_peer(processes: Sequence[int]) -> None:
    """Let a group's only peer read this process, if Yama restricts reads to a named process.

    The kernel stores one permitted process for each process, and permitting any process would open
    it to all. So groups of more ranks do without direct reads, and so do further groups with
    another peer.
    """
    if len(processes) != 1 or not is_tracing_restricted():
        return
    with _PERMITTED_LOCK:
        # Another permission would replace the first group's.
        if not _PERMITTED and permit_reader(processes[0]):
            _PERMITTED.append(processes[0])


def connect_direct_reads(
    sockets: Mapping[int, socket.socket],
    position: int,
    gather: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> tuple[float, ...] | None:
    """Return the ratios of `pays`, or None if any rank of the group cannot read another.

    All ranks call this.

    Args:
        sockets: to the peers that share memory, by position.
        position: of this rank.
        gather: returns the tensors of all ranks, of equal shapes, in their order.

    Raises:
        UsageError: an invalid `RESHARD_DIRECT_READS`.
        RunError: `RESHARD_DIRECT_READS` is "always", but a rank cannot read another.
    """
    mode = _read_mode()
    processes = {other: find_peer_process(connected) for other, connected in sockets.items()}
    if mode != "never":
        permit_peer(list(processes.values()))
    # A random word, which other processes do not have.
    word = np.frombuffer(secrets.token_bytes(_WORD_BYTES), np.uint8).copy()
    own = np.concatenate([np.array([mode != "never", word.ctypes.data]).view(np.uint8), word])
    rows = [row.numpy() for row in gather(torch.from_numpy(own))]
    can_read = [bool(row[0]) for row in rows]
    for other, process in processes.items():
        address = int(rows[other][8:16].view(np.int64)[0])
        can_read.append(_read_word(process, address) == rows[other][16:].tobytes())
    # By rank: whether it can read its peers, and the ratios that the first rank measured.
    ratios = np.full(len(ROW_BYTES), _NEVER)
    if mode == "always":
        ratios = np.zeros(len(ROW_BYTES))
    elif position == 0 and processes and all(can_read):
        ratios = np.array(measure())
    gathered = np.stack([row.numpy() for row in gather(torch.tensor([all(can_read), *ratios]))])
    # No rank returns before all have read its word.
    del word
    refused = np.flatnonzero(gathered[:, 0] == 0).tolist()
    if refused and mode == "always":
        raise RunError(
            f"{VARIABLE}=always, but ranks {refused} of the group cannot read the memory of their "
            f"peers: {VARIABLE}=never, or the kernel refuses it (Yama, seccomp); unset it"
        )
    # Only the first rank measured, or a rank with "always" has 0; others have infinity.
    return None if refused else tuple(gathered[:, 1:].min(axis=0).tolist())


def _read_mode() -> str:
    mode = os.environ.get(VARIABLE, "")
    if mode not in ("", "never", "always"):
        raise UsageError(f"{VARIABLE}={mode!r}: expected 'never', 'always', or unset")
    return mode


def _read_word(process: int, address: int) -> bytes:
    into = np.zeros(_WORD_BYTES, dtype=np.uint8)
    spans = [np.array([[start, _WORD_BYTES]]) for start in (address, into.ctypes.data)]
    try:
        read_spans(process, *spans)
    except (RuntimeError, ProcessLookupError):
        return b""
    return into.tobytes()


@functools.lru_cache(maxsize=1)
def measure() -> tuple[float, ...]:
    """Return the time of direct reads relative to packing and unpacking, by row length.

    This process reads itself, which is the same for the kernel. Each part of the memory is read
    once, since in an exchange it is not in a cache either; the shortest times are used.
    """
    source = np.ones((len(ROW_BYTES), _MEASURED_PARTS, 2, 2 * _PART_BYTES), dtype=np.uint8)
    target, buffer = (np.ones(size, dtype=np.uint8) for size in (2 * _PART_BYTES, _PART_BYTES))
    ratios = []
    for length, parts in zip(ROW_BYTES, source, strict=True):
        read_s, copies_s = zip(
            *(_measure_part(part[0], part[1], target, buffer, length) for part in parts),
            strict=True,
        )
        ratios.append(min(read_s) / min(copies_s))
    return tuple(ratios)


def _measure_part(
    read: ByteArray, copied: ByteArray, target: ByteArray, buffer: ByteArray, length: int
) -> tuple[float, float]:
    """Return the times to move every other row directly, and through a buffer."""
    rows, into = (array.reshape(-1, 2, length)[:, 0] for array in (copied, target))
    packed = buffer.reshape(rows.shape)
    steps = np.arange(len(rows)) * 2 * length
    spans, into_spans = (
        np.stack([array.ctypes.data + steps, np.full(len(rows), length)], axis=1)
        for array in (read, target)
    )
    begun_s = time.perf_counter()
    read_spans(os.getpid(), spans, into_spans)
    read_s = time.perf_counter()
    np.copyto(packed, rows)
    np.copyto(into, packed)
    return read_s - begun_s, time.perf_counter() - read_s
