"""Memory that ranks of one host share: segments, notes, and who is let in. No ranks are needed."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from live_processes import expect_all_end_well, run_ranks
from reshard.torch.exchange.one_host.shared_memory import (
    _DATA,
    MAX_NOTE_BYTES,
    MAX_SHORT_BYTES,
    SharedMemory,
    map_segment,
)

pytestmark = pytest.mark.linux_only(reason="shared memory between ranks")
LIMIT_S = 120.0


def make_pair() -> tuple[SharedMemory, SharedMemory]:
    """Ranks 0 and 1."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return (
        SharedMemory({1: first}, LIMIT_S, is_complete=True),
        SharedMemory({0: second}, LIMIT_S, is_complete=True),
    )


# Longer than what is sent in a note.
LONG_BYTES = MAX_SHORT_BYTES + 1


def filled(memory: SharedMemory, values: Sequence[int], size_bytes: int = 0) -> torch.Tensor:
    """These values, with zeros after them up to a size."""
    found = memory.staging_memory(max(len(values), size_bytes)).zero_()
    found[: len(values)] = torch.tensor(values, dtype=torch.uint8)
    return found


def test_what_is_lent_is_read_where_it_lies_and_given_back() -> None:
    zero, one = make_pair()
    lent = filled(zero, [1, 2, 3], LONG_BYTES)
    sent = zero.send(lent, 1, 7)
    found = one.receive(LONG_BYTES, 0, 7)
    found.wait()
    assert found.bytes_there[:4].tolist() == [1, 2, 3, 0]
    # One memory: nothing was copied.
    lent[1] = 9
    assert found.bytes_there[:3].tolist() == [1, 9, 3]
    assert not sent.is_taken
    found.give_back()
    sent.wait()
    assert sent.is_taken


def test_short_messages_are_copied_into_notes_while_few_are_unread() -> None:
    zero, one = make_pair()
    memory = filled(zero, range(40))
    first = zero.send(memory[:3], 1, 7)
    found = one.receive(3, 0, 7)
    found.wait()
    # Nobody has to acknowledge it.
    first.wait()
    memory[1] = 99
    assert found.bytes_there.tolist() == [0, 1, 2]
    place = found.place
    found.give_back()
    memory[1] = 1
    # The first rank learns of what was read with the next note of the other.
    sent = [zero.send(memory[number : number + 1], 1, 7) for number in range(40)]
    assert [message.is_taken for message in sent] == [True] * 3 + [False] * 37
    arrived = [one.receive(1, 0, 7) for _ in sent]
    for number, message in enumerate(arrived):
        message.wait()
        assert message.bytes_there.item() == number
    assert arrived[0].place == place
    for message in arrived:
        message.give_back()
    for message in sent:
        message.wait()
    assert zero.send(memory[:1], 1, 7).is_taken


def test_messages_of_a_tag_come_in_order_and_those_of_others_apart() -> None:
    zero, one = make_pair()
    memory = filled(zero, list(range(8)))
    # Also before anybody expects them.
    for place, tag in ((0, 5), (1, 6), (2, 5), (3, 6)):
        zero.send(memory[place : place + 1], 1, tag)
    found = [one.receive(1, 0, tag) for tag in (6, 6, 5, 5)]
    for message in found:
        message.wait()
    assert [message.bytes_there.item() for message in found] == [1, 3, 0, 2]


def test_what_is_told_comes_in_order_beside_messages() -> None:
    zero, one = make_pair()
    longest = bytes(range(256)) * (MAX_NOTE_BYTES // 256)
    lent = filled(zero, [1, 2])
    # All that a rank tells and lends comes by one socket.
    one.ranks[0].send_note(_DATA, 0, 0, handle=b"first")
    one.ranks[0].send_note(_DATA, 0, 0, handle=longest)
    zero.send(lent, 1, 3)
    assert zero.swap(b"a", [1], [1]) == [b"first"]
    assert zero.swap(b"", [1], [1]) == [longest]
    assert one.swap(b"b", [0], [0]) == [b"a"]
    found = one.receive(2, 0, 3)
    found.wait()
    assert found.bytes_there.tolist() == [1, 2]
    assert (one.swap(b"c", [0], [0]), zero.swap(b"d", [1], [1])) == ([b""], [b"b"])


def test_who_listens_learns_that_the_other_is_gone() -> None:
    zero, one = make_pair()
    one.ranks[0].send_note(_DATA, 0, 0, handle=b"last")
    one.close()
    # What was told before it went is heard.
    zero.ranks[1].wait_until(lambda: bool(zero.ranks[1].received_notes))
    assert zero.ranks[1].received_notes.popleft() == b"last"
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        zero.swap(b"", [1], [1])


def test_memory_comes_back_and_files_are_closed() -> None:
    zero, one = make_pair()

    def files() -> int:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return sum("memfd:reshard" in link for link in links)

    gc.collect()
    others = files()
    first = zero.staging_memory(100)
    address = first.data_ptr()
    del first
    assert zero.staging_memory(50).data_ptr() == address
    after_one = 0
    for turn in range(20):
        memory = zero.staging_memory(1 << 20)
        sent = zero.send(memory, 1, 0)
        message = one.receive(1 << 20, 0, 0)
        message.wait()
        message.give_back()
        sent.wait()
        del memory, sent, message
        if turn == 0:
            after_one = files()
    assert files() == after_one
    # What others may still read is not used again.
    memory = filled(zero, [1], LONG_BYTES)
    zero.send(memory, 1, 0)
    address = memory.data_ptr()
    del memory
    assert zero.staging_memory(1).data_ptr() != address
    del zero, one
    gc.collect()
    assert files() == others


def test_memory_that_nobody_has_goes_with_the_connection() -> None:
    zero, one = make_pair()

    def files() -> int:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return sum("memfd:reshard" in link for link in links)

    gc.collect()
    gc.disable()
    try:
        others = files()
        free, used = zero.staging_memory(3 << 20), filled(zero, [1, 2, 3], LONG_BYTES)
        sent, message = zero.send(used, 1, 0), one.receive(LONG_BYTES, 0, 0)
        message.wait()
        read = message.bytes_there
        message.give_back()
        sent.wait()
        del free, sent
        # Of each segment its own descriptor and that of its map; and the map of the other rank.
        assert files() == others + 5
        for end in (zero, one):
            end.close()
        # What somebody still has stays readable.
        assert files() == others + 3 and read.tolist() == used.tolist()
        assert read[:4].tolist() == [1, 2, 3, 0]
        assert len(message.bytes_there) == 0
        del read
        assert files() == others + 2
        del used
        assert files() == others
    finally:
        gc.enable()


def test_who_waits_learns_that_the_other_is_gone() -> None:
    zero, one = make_pair()
    sent = zero.send(filled(zero, [1], LONG_BYTES), 1, 0)
    waiting = zero.receive(4, 1, 0)
    raised: list[str] = []

    def wait(action: Callable[[], None]) -> None:
        try:
            action()
        except RuntimeError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=wait, args=(one_.wait,)) for one_ in (sent, waiting)]
    for thread in threads:
        thread.start()
    one.close()
    for thread in threads:
        thread.join(LIMIT_S)
    assert raised == ["Connection closed by peer"] * 2
    with pytest.raises(RuntimeError, match="closed by peer"):
        zero.send(filled(zero, [1]), 1, 0)


def test_what_came_before_the_end_is_read() -> None:
    zero, one = make_pair()
    zero.send(filled(zero, [5]), 1, 0)
    # Something that rank 0 will not have read when it ends.
    one.send(filled(one, [6]), 0, 0)
    zero.close()
    found = one.receive(1, 0, 0)
    found.wait()
    assert found.bytes_there.item() == 5


def test_a_message_of_another_size_is_refused() -> None:
    zero, one = make_pair()
    zero.send(filled(zero, [1, 2]), 1, 0)
    with pytest.raises(RuntimeError, match="a message of 2 bytes came where 3 were expected"):
        one.receive(3, 0, 0).wait()


def test_memory_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("reshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 20)
    with pytest.raises(RuntimeError, match="not sealed"):
        map_segment(descriptor, 1 << 20)


def test_exchanges_by_shared_memory_with_and_without_others() -> None:
    expect_all_end_well(run_ranks("shared_memory_process.py", 4, "shared"))
