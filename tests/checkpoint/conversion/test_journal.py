"""The journal: whatever happens to the file, it never says more than was appended."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.small_conversion import append_blocks, digests_of
from reshard.checkpoint.conversion import journal as journal_module
from reshard.checkpoint.conversion.journal import Commit, FinishedBlocks, Journal, read_journal
from reshard.errors import RunError

IDENTITY = "c0ffee"
DESCRIPTION = {"source": "/a", "to": "tp=2"}


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


BATCHES = [
    [(0, 0, digest(1)), (0, 1, digest(2))],
    [(1, 0, digest(3))],
    [(2, 7, digest(4)), (2, 8, digest(5)), (3, 0, digest(6))],
    [(3, 1, digest(7))],
]


def written(path: Path) -> list[int]:
    """Write all batches and a commit; the size of the file after each step, head included."""
    sizes = []
    with Journal.open(path, IDENTITY, DESCRIPTION) as journal:
        sizes.append(path.stat().st_size)
        for batch in BATCHES:
            append_blocks(journal, batch)
            sizes.append(path.stat().st_size)
        journal.append_commit(Commit(inode=2**63 + 5, replaces=True))
        sizes.append(path.stat().st_size)
    return sizes


def expected(batch_count: int) -> dict[tuple[int, int], bytes]:
    return {
        (tensor, block): value for batch in BATCHES[:batch_count] for tensor, block, value in batch
    }


def test_appended_records_are_read_again(tmp_path: Path) -> None:
    written(tmp_path / "journal")

    record = read_journal(tmp_path / "journal")

    assert record is not None
    assert digests_of(record.finished) == expected(len(BATCHES))
    assert record.commit == Commit(inode=2**63 + 5, replaces=True)
    assert (record.conversion_id, record.description) == (IDENTITY, DESCRIPTION)
    assert os.listdir(tmp_path) == ["journal"]


def test_only_an_existing_journal_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read_journal(path) is None
    with Journal.open(path, IDENTITY, DESCRIPTION) as journal:
        assert (journal.resumed, len(journal.finished.blocks)) == (False, 0)
    with Journal.open(path, IDENTITY, DESCRIPTION) as journal:
        assert (journal.resumed, len(journal.finished.blocks)) == (True, 0)


def test_a_journal_truncated_at_any_byte_is_a_prefix_and_continues(tmp_path: Path) -> None:
    sizes = written(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for length in range(sizes[0], len(whole)):
        path.write_bytes(whole[:length])
        batch_count = sum(size <= length for size in sizes[1:-1])

        with Journal.open(path, IDENTITY, DESCRIPTION) as journal:
            assert digests_of(journal.finished) == expected(batch_count), length
            assert path.stat().st_size == sizes[batch_count], length
            append_blocks(journal, [(9, 9, digest(99))])

        record = read_journal(path)
        assert record is not None
        assert digests_of(record.finished) == {**expected(batch_count), (9, 9): digest(99)}, length
        assert record.commit is None, length


def test_a_journal_with_a_torn_head_is_refused_with_advice(tmp_path: Path) -> None:
    head_size = written(tmp_path / "whole")[0]
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for length in range(head_size):
        path.write_bytes(whole[:length])
        with pytest.raises(RunError, match=r"journal is damaged(.|\n)*--restart"):
            Journal.open(path, IDENTITY, DESCRIPTION)


def test_any_flipped_bit_leaves_a_prefix_or_a_refusal(tmp_path: Path) -> None:
    sizes = written(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        if position < sizes[0]:
            with pytest.raises(RunError, match="--restart"):
                read_journal(path)
            continue
        record = read_journal(path)
        assert record is not None
        batch_count = sum(size <= position for size in sizes[1:-1])
        assert digests_of(record.finished) == expected(batch_count), position
        assert record.commit is None, position


@settings(deadline=None)
@given(
    kept=st.integers(0, 250),
    tail=st.one_of(st.binary(max_size=200), st.integers(0, 200).map(bytes)),
)
def test_a_tail_of_garbage_adds_nothing(
    tmp_path_factory: pytest.TempPathFactory, kept: int, tail: bytes
) -> None:
    folder = tmp_path_factory.mktemp("garbage")
    sizes = written(folder / "journal")
    whole = (folder / "journal").read_bytes()
    kept = max(sizes[0], min(kept, len(whole)))
    (folder / "journal").write_bytes(whole[:kept] + tail)

    record = read_journal(folder / "journal")

    assert record is not None
    # The tail may happen to say again what stood there; it can never say anything else.
    assert list(digests_of(record.finished).items()) in [
        list(expected(count).items()) for count in range(len(BATCHES) + 1)
    ]
    assert len(record.finished.blocks) >= len(expected(sum(size <= kept for size in sizes[1:-1])))


def test_a_frame_moved_or_doubled_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    sizes = written(path)
    whole = path.read_bytes()
    head, first, second = whole[: sizes[0]], whole[sizes[0] : sizes[1]], whole[sizes[1] : sizes[2]]
    for frames, batch_count in [((second,), 0), ((first, first), 1), ((second, first), 0)]:
        path.write_bytes(head + b"".join(frames))
        record = read_journal(path)
        assert record is not None
        assert digests_of(record.finished) == expected(batch_count)


def test_another_conversion_is_refused_with_the_differences(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    options = {"memory": 1, "rules": {"a": "dp", "b": "tp"}}
    Journal.open(path, IDENTITY, {**options, "to": "tp=2", "old": 1}).close()
    before = path.read_bytes()

    with pytest.raises(RunError) as caught:
        Journal.open(path, "decaf", {"memory": 1, "rules": {"a": "dp"}, "to": "tp=4", "new": (1,)})

    message = str(caught.value)
    assert "to: then 'tp=2', now 'tp=4'" in message
    assert "rules.b: then 'tp', now absent" in message
    assert "old: then 1, now absent" in message
    assert "new: then absent, now [1]" in message
    assert "memory" not in message and "rules.a" not in message
    assert "--restart" in message
    assert path.read_bytes() == before


def test_a_difference_that_no_description_shows_names_the_fingerprints(tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION).close()
    with pytest.raises(RunError, match="then c0ffee, now decaf"):
        Journal.open(tmp_path / "journal", "decaf", DESCRIPTION)


def test_very_many_differences_are_counted(tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal", IDENTITY, {str(n): 0 for n in range(50)}).close()
    with pytest.raises(RunError, match="and 38 more"):
        Journal.open(tmp_path / "journal", "decaf", {str(n): 1 for n in range(50)})


def test_a_journal_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("reshard.checkpoint.conversion.journal._FORMAT_VERSION", 7)
        Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION).close()
    with pytest.raises(RunError, match=r"format version 7, expected 1(.|\n)*--restart"):
        Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION)


def test_the_largest_indices_are_kept(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION) as journal:
        append_blocks(journal, [(2**31 - 1, 2**32 - 1, digest(1)), (0, 2**32 - 1, digest(2))])
    record = read_journal(tmp_path / "journal")
    assert record is not None
    assert digests_of(record.finished) == {
        (2**31 - 1, 2**32 - 1): digest(1),
        (0, 2**32 - 1): digest(2),
    }


@pytest.mark.parametrize("call", ["pwrite", "sync_data"])
def test_a_failed_write_is_an_error_and_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION)
    append_blocks(journal, BATCHES[0])
    with monkeypatch.context() as patch:
        patch.setattr(journal_module if call == "sync_data" else os, call, refuse)
        with pytest.raises(RunError, match=r"write the journal: .*journal: No space left"):
            append_blocks(journal, BATCHES[1])
    with pytest.raises(RunError, match="is closed"):
        append_blocks(journal, BATCHES[2])

    with Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION) as journal:
        assert digests_of(journal.finished) in (expected(1), expected(2))


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:3]), at))
    written(tmp_path / "journal")
    record = read_journal(tmp_path / "journal")
    assert record is not None
    assert digests_of(record.finished) == expected(len(BATCHES))


def test_a_record_is_synced_before_the_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    journal = Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION)
    monkeypatch.setattr(journal_module, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    append_blocks(journal, BATCHES[0])
    append_blocks(journal, [])
    journal.close()
    assert synced == [(tmp_path / "journal").stat().st_size]


def test_threads_may_append_at_once(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", IDENTITY, DESCRIPTION)

    def append(tensor: int) -> None:
        for block in range(20):
            append_blocks(journal, [(tensor, block, digest(tensor * 100 + block))])

    threads = [threading.Thread(target=append, args=(tensor,)) for tensor in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()

    record = read_journal(tmp_path / "journal")
    assert record is not None
    assert digests_of(record.finished) == {
        (tensor, block): digest(tensor * 100 + block) for tensor in range(4) for block in range(20)
    }


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.binary(min_size=16, max_size=16)),
        max_size=40,
    )
)
def test_finished_blocks_are_a_dict_in_which_the_last_record_counts(
    records: list[tuple[int, int, bytes]],
) -> None:
    packed = b"".join(
        tensor.to_bytes(4, "little") + block.to_bytes(4, "little") + value
        for tensor, block, value in records
    )
    model = {(tensor, block): value for tensor, block, value in records}

    finished = digests_of(FinishedBlocks.read(packed))

    assert finished == model
    assert list(finished) == sorted(model)


def test_a_journal_is_not_made_where_the_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file or directory"):
        Journal.open(tmp_path / "missing" / "journal", "new", {})
