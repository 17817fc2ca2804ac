"""Memory for direct I/O: where regions lie, and what belongs to whom.

Bytes between files and memory, on a system that answers short, late, or not at all."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.checkpoint_files import list_open_files
from reshard.checkpoint.storage.filesystem import (
    describe_free_space,
    sync_folder,
    translate_os_errors,
)
from reshard.checkpoint.storage.local_files import (
    MIN_DIRECT_BYTES,
    PAGE_BYTES,
    AlignedBuffer,
    FileIdentity,
    SourceFile,
    TargetFile,
)
from reshard.errors import RunError, SourceChangedError, UsageError


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


@given(
    st.lists(
        st.tuples(st.integers(0, 2**50), st.integers(1, 5 * PAGE_BYTES)), min_size=1, max_size=6
    ),
    st.integers(0, PAGE_BYTES),
)
def test_regions_are_congruent_and_their_pages_are_their_own(pieces, at):
    sizes = [AlignedBuffer.capacity_for(size) for _, size in pieces]
    with AlignedBuffer(PAGE_BYTES + sum(sizes)) as buffer:
        base = address_of(buffer.region(0, 1).memory)
        assert base % PAGE_BYTES == 0
        regions = []
        end = at
        for offset, size in pieces:
            region = buffer.region(offset, size, at=end)
            regions.append(region)
            first = address_of(region.memory)
            first_page = address_of(region.pages)
            assert region.memory.nbytes == size
            assert first % PAGE_BYTES == offset % PAGE_BYTES
            assert first_page % PAGE_BYTES == 0
            assert first_page - base >= end
            assert first - first_page == region.lead_bytes < PAGE_BYTES
            assert region.pages.nbytes % PAGE_BYTES == 0
            assert first_page + region.pages.nbytes >= first + size
            assert first_page + region.pages.nbytes == base + region.end_bytes
            end = region.end_bytes
        for number, region in enumerate(regions):
            region.pages[:] = bytes([number + 1]) * region.pages.nbytes
        for number, region in enumerate(regions):
            assert bytes(region.memory) == bytes([number + 1]) * region.memory.nbytes


def test_memory_is_a_view_of_its_pages():
    with AlignedBuffer(3 * PAGE_BYTES) as buffer:
        region = buffer.region(100, 5000)
        region.memory[:] = b"x" * 5000
        assert bytes(region.pages) == b"\0" * 100 + b"x" * 5000 + b"\0" * (8192 - 5100)


def test_capacity_for_is_enough_everywhere_and_not_a_page_too_much():
    for size, lead in itertools.product((0, 1, 4095, 4096, 4097, 8192), (0, 1, 4095)):
        with AlignedBuffer(AlignedBuffer.capacity_for(size)) as buffer:
            assert buffer.region(lead, size).memory.nbytes == size
    with (
        AlignedBuffer(AlignedBuffer.capacity_for(5000) - PAGE_BYTES) as buffer,
        pytest.raises(UsageError, match="does not fit"),
    ):
        buffer.region(4095, 5000)


def test_regions_that_do_not_fit_name_the_needed_capacity():
    with AlignedBuffer(PAGE_BYTES) as buffer:
        with pytest.raises(UsageError, match=r"4096 bytes for file offset 1 .* room up to 8192"):
            buffer.region(1, 4096)
        with pytest.raises(UsageError, match="after position 1"):
            buffer.region(0, 1, at=1)


def test_a_region_outlives_its_buffer_but_a_closed_buffer_gives_none():
    buffer = AlignedBuffer(PAGE_BYTES)
    region = buffer.region(0, 10)
    buffer.close()
    buffer.close()
    region.memory[:] = b"0123456789"
    assert bytes(region.memory) == b"0123456789"
    with pytest.raises(UsageError, match="closed"):
        buffer.region(0, 10)
    assert repr(buffer) == "AlignedBuffer(closed)"


pytestmark = pytest.mark.linux_only(reason="direct I/O, and reads of the page cache alone")

FILE_BYTES = 9 * PAGE_BYTES + 1234
CONTENT = random.Random(0).randbytes(FILE_BYTES)
REAL_READ, REAL_WRITE = os.preadv, os.pwritev
REFUSALS = [errno.EINVAL, errno.EOPNOTSUPP]


class Machine:
    """The system's answers as a test wants them, and a record of what was asked.

    `limits` cuts the requests in turn (0 leaves one whole); `cached_bytes` is where the page
    cache ends; `direct_error` and `buffered_error` are what the two kinds of calls fail with.
    Direct I/O is played by ordinary descriptors with a mark, so that its rules are held on every
    file system: a request that is not made of whole pages fails the test.
    """

    MARK = os.O_NONBLOCK

    def __init__(self, limits=(), cached_bytes=0, direct_error=None, buffered_error=None):
        self.limits = list(limits)
        self.cached_bytes = cached_bytes
        self.errors = {"direct": direct_error, "buffered": buffered_error}
        self.probe_error = errno.EAGAIN
        self.asked = []
        self.broken_rules = []

    def install(self, patch):
        patch.setattr(os, "preadv", self.preadv)
        patch.setattr(os, "pwritev", self.pwritev)
        module = "reshard.checkpoint.storage.local_files"
        patch.setattr(f"{module}.MIN_DIRECT_BYTES", 1)
        patch.setattr(f"{module}.open_direct", lambda path, flags: os.open(path, flags | self.MARK))
        return self

    def spans(self, kind):
        return [(offset, offset + size) for asked, offset, size in self.asked if asked == kind]

    def _take(self, descriptor, view, offset):
        """The kind of a request, and how much of it is granted."""
        kind = "direct" if fcntl.fcntl(descriptor, fcntl.F_GETFL) & self.MARK else "buffered"
        if self.errors[kind] is not None:
            raise OSError(self.errors[kind], os.strerror(self.errors[kind]))
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        if kind == "direct" and any(number % PAGE_BYTES for number in (address, offset, len(view))):
            self.broken_rules.append((address % PAGE_BYTES, offset, len(view)))
        self.asked.append((kind, offset, len(view)))
        limit = self.limits.pop(0) if self.limits else 0
        return kind, view[: limit or None]

    def preadv(self, descriptor, views, offset, flags=0):
        (view,) = views
        if flags & os.RWF_NOWAIT:
            self.asked.append(("probe", offset, len(view)))
            view = view[: max(0, self.cached_bytes - offset)]
            if not view:
                raise OSError(self.probe_error, os.strerror(self.probe_error))
            return REAL_READ(descriptor, [view], offset)
        _, granted = self._take(descriptor, view, offset)
        # What was not granted may hold anything.
        view[len(granted) :] = b"?" * (len(view) - len(granted))
        return REAL_READ(descriptor, [granted], offset)

    def pwritev(self, descriptor, views, offset, flags=0):
        (view,) = views
        kind, granted = self._take(descriptor, view, offset)
        if kind == "direct" and len(granted) % PAGE_BYTES:
            # The count is right, but a page that was taken in part did not reach the disk.
            count = len(granted)
            REAL_WRITE(descriptor, [granted[: count - count % PAGE_BYTES]], offset)
            return count
        return REAL_WRITE(descriptor, [granted], offset)


@pytest.fixture
def machine(monkeypatch):
    return Machine().install(monkeypatch)


@pytest.fixture
def source_path(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("file_io")
    (folder / "source").write_bytes(CONTENT)
    return folder


spans = st.tuples(st.integers(0, FILE_BYTES), st.integers(0, FILE_BYTES)).map(
    lambda ends: (min(ends), max(ends))
)
limits = st.lists(st.sampled_from([0, 1, 511, 4095, 4096, 4097, 3 * 4096, 20_000]), max_size=6)


# Reading


@given(
    spans,
    limits,
    st.integers(0, FILE_BYTES),
    st.sampled_from([None, None, *REFUSALS]),
    st.booleans(),
)
def test_reads_the_bytes_whatever_the_system_grants(
    shared_folder, span, limits, cached_bytes, direct_error, is_region
):
    start, stop = span
    machine = Machine(limits, cached_bytes, direct_error)
    size = stop - start
    with (
        pytest.MonkeyPatch.context() as patch,
        AlignedBuffer(3 * AlignedBuffer.capacity_for(size)) as buffer,
    ):
        machine.install(patch)
        before = buffer.region(start + 77, size)
        region = buffer.region(start, size, at=before.end_bytes)
        after = buffer.region(start + 99, size, at=region.end_bytes)
        before.pages[:] = b"b" * len(before.pages)
        after.pages[:] = b"a" * len(after.pages)
        with SourceFile(shared_folder / "source") as source:
            source.read_into(region if is_region else region.memory, start)
            assert source.read_bytes == size
        assert bytes(region.memory) == CONTENT[start:stop]
        assert bytes(before.pages) == b"b" * len(before.pages)
        assert bytes(after.pages) == b"a" * len(after.pages)
    assert not machine.broken_rules


def test_an_uncached_region_is_one_cached_and_one_direct_read(machine, source_path):
    with SourceFile(source_path) as source, AlignedBuffer(8 * PAGE_BYTES) as buffer:
        source.read_into(buffer.region(5000, 9000), 5000)
    assert machine.asked == [("probe", 5000, 4096), ("direct", 4096, 12288)]


def test_a_cached_region_is_copied_from_the_cache_alone(machine, source_path):
    machine.cached_bytes = FILE_BYTES
    with SourceFile(source_path) as source, AlignedBuffer(16 * PAGE_BYTES) as buffer:
        region = buffer.region(100, FILE_BYTES - 100)
        source.read_into(region, 100)
        assert bytes(region.memory) == CONTENT[100:]
    assert {kind for kind, _, _ in machine.asked} == {"probe"}
    sizes = [size for _, _, size in machine.asked]
    assert sizes[:2] == [4096, 4 * 4096] and sum(sizes) == FILE_BYTES - 100


def test_uncached_bytes_are_read_directly_from_their_page(machine, source_path):
    machine.cached_bytes = 2 * PAGE_BYTES + 10
    with SourceFile(source_path) as source, AlignedBuffer(16 * PAGE_BYTES) as buffer:
        region = buffer.region(100, 30_000)
        source.read_into(region, 100)
        assert bytes(region.memory) == CONTENT[100:30_100]
    assert machine.spans("probe") == [(100, 4196), (4196, 4196 + 16_384)]
    assert machine.spans("direct") == [(2 * PAGE_BYTES, 8 * PAGE_BYTES)]
    assert machine.spans("buffered") == []


def test_a_short_direct_read_resumes_at_the_partial_page(machine, source_path):
    machine.limits = [9000, 100]
    with SourceFile(source_path) as source, AlignedBuffer(16 * PAGE_BYTES) as buffer:
        region = buffer.region(100, 30_000)
        source.read_into(region, 100)
        assert bytes(region.memory) == CONTENT[100:30_100]
    assert machine.spans("direct") == [(0, 8 * PAGE_BYTES), (8192, 8 * PAGE_BYTES)]
    assert machine.spans("buffered") == [(8292, 30_100)]


def test_a_direct_read_that_ends_before_the_region_begins(machine, source_path):
    machine.limits = [50]
    with SourceFile(source_path) as source, AlignedBuffer(16 * PAGE_BYTES) as buffer:
        region = buffer.region(100, 30_000)
        source.read_into(region, 100)
        assert bytes(region.memory) == CONTENT[100:30_100]
    assert machine.spans("buffered") == [(100, 30_100)]


def test_the_end_of_the_file_needs_no_second_read(machine, source_path):
    with SourceFile(source_path) as source, AlignedBuffer(16 * PAGE_BYTES) as buffer:
        region = buffer.region(4096, FILE_BYTES - 4096)
        source.read_into(region, 4096)
        assert bytes(region.memory) == CONTENT[4096:]
    assert machine.spans("direct") == [(4096, 10 * PAGE_BYTES)]
    assert machine.spans("buffered") == []


def test_small_reads_plain_memory_and_other_offsets_go_through_the_cache(
    machine, source_path, monkeypatch
):
    with SourceFile(source_path) as source, AlignedBuffer(8 * PAGE_BYTES) as buffer:
        memory = memoryview(bytearray(9000))
        source.read_into(memory, 5000)
        assert bytes(memory) == CONTENT[5000:14_000]
        region = buffer.region(5000, 9000)
        source.read_into(region, 5001)
        assert bytes(region.memory) == CONTENT[5001:14_001]
        monkeypatch.setattr("reshard.checkpoint.storage.local_files.MIN_DIRECT_BYTES", 9001)
        source.read_into(region, 5000)
        assert bytes(region.memory) == CONTENT[5000:14_000]
    assert machine.spans("direct") == []
    assert len(machine.spans("buffered")) == 3


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_system_that_knows_no_cache_question_is_asked_once(machine, source_path, refusal):
    machine.probe_error = refusal
    with SourceFile(source_path) as source, AlignedBuffer(16 * PAGE_BYTES) as buffer:
        for start in (0, 8192):
            region = buffer.region(start, 8192)
            source.read_into(region, start)
            assert bytes(region.memory) == CONTENT[start : start + 8192]
    assert machine.spans("probe") == [(0, 4096)]


def test_ranges_that_are_cached_are_read_by_one_call_each(machine, source_path, monkeypatch):
    announced = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *asked: announced.append(asked[1:3]))
    machine.cached_bytes = 10_000
    offsets = [9000, 0, 9600, 12_000, 300]
    with SourceFile(source_path) as source:
        memory = memoryview(bytearray(500 * len(offsets)))
        source.read_ranges(memory, offsets, 500)
        assert bytes(memory) == b"".join(CONTENT[at : at + 500] for at in offsets)
        assert source.read_bytes == 2500
    # The third is cached in part, the fourth not at all: both are announced before they are read.
    assert announced == [(9600, 500), (12_000, 500)]
    assert machine.spans("buffered") == [(9600, 10_100), (12_000, 12_500)]
    assert len(machine.spans("probe")) == 5


@pytest.mark.parametrize("refusal", REFUSALS)
def test_ranges_of_a_system_that_knows_no_cache_question(machine, source_path, refusal):
    machine.probe_error = refusal
    with SourceFile(source_path) as source:
        for _ in range(2):
            memory = memoryview(bytearray(30))
            source.read_ranges(memory, [8000, 16, 20], 10)
            assert bytes(memory) == CONTENT[8000:8010] + CONTENT[16:26] + CONTENT[20:30]
        assert source.read_bytes == 60
    assert machine.spans("probe") == [(8000, 8010)]


def test_ranges_after_the_end_and_read_errors_are_named(machine, source_path):
    with SourceFile(source_path) as source:
        with pytest.raises(SourceChangedError, match="ends early"):
            source.read_ranges(memoryview(bytearray(20)), [0, FILE_BYTES - 5], 10)
        machine.probe_error = errno.EIO
        machine.errors["buffered"] = errno.EIO
        with pytest.raises(RunError, match="cannot read 10 bytes at offset 7"):
            source.read_ranges(memoryview(bytearray(20)), [7, 50], 10)


def test_a_file_that_shrinks_is_noticed(source_path, machine):
    with SourceFile(source_path) as source, AlignedBuffer(16 * PAGE_BYTES) as buffer:
        os.truncate(source_path, 10_000)
        for place in (buffer.region(5000, 9000), memoryview(bytearray(9000))):
            with pytest.raises(SourceChangedError) as caught:
                source.read_into(place, 5000)
            message = str(caught.value)
            assert message.startswith(f"{source_path}: ends early")
            assert "expected 9000 bytes at offset 5000, found 5000" in message
            assert f"had {FILE_BYTES} bytes" in message and "has 10000 now" in message
        assert source.read_bytes == 0
        with pytest.raises(SourceChangedError, match=r"expected 38098 bytes .* found 10000 bytes"):
            source.check_unchanged()


def test_a_file_that_is_written_in_place_is_noticed(source_path):
    with SourceFile(source_path) as source:
        source.check_unchanged()
        os.utime(source_path, ns=(0, source.identity.modified_ns + 1))
        with pytest.raises(SourceChangedError, match="changed since it was opened"):
            source.check_unchanged()


@pytest.mark.parametrize("kind", ["direct", "buffered"])
def test_a_device_that_cannot_read_is_named(source_path, machine, kind):
    machine.errors[kind] = errno.EIO
    with SourceFile(source_path) as source, AlignedBuffer(4 * PAGE_BYTES) as buffer:
        region = buffer.region(5000, 5000)
        with pytest.raises(RunError) as caught:
            source.read_into(region if kind == "direct" else region.memory, 5000)
    assert str(caught.value).startswith(
        f"{source_path}: cannot read 5000 bytes at offset 5000: Input/output error; "
    )
    assert not isinstance(caught.value, SourceChangedError)


def test_an_error_of_the_cache_question_is_an_error(source_path, machine):
    machine.probe_error = errno.EIO
    with (
        SourceFile(source_path) as source,
        AlignedBuffer(4 * PAGE_BYTES) as buffer,
        pytest.raises(RunError, match="Input/output error"),
    ):
        source.read_into(buffer.region(0, 5000), 0)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(RunError, match=r"none: cannot open for reading: No such file"):
        SourceFile(tmp_path / "none")
    with pytest.raises(RunError, match="not a regular file"):
        SourceFile(tmp_path)
    assert list_open_files(tmp_path) == []


def test_reading_nothing_and_reading_a_closed_file(source_path):
    with SourceFile(source_path) as source:
        source.read_into(memoryview(b""), FILE_BYTES + 10)
        assert source.read_bytes == 0
    with pytest.raises(RunError, match="Bad file descriptor"):
        source.read_into(memoryview(bytearray(1)), 0)
    source.close()


def test_many_threads_read_one_file_and_every_byte_is_counted(source_path):
    rounds, failures = 50, []
    with SourceFile(source_path) as source:

        def work(seed):
            chance = random.Random(seed)
            with AlignedBuffer(AlignedBuffer.capacity_for(FILE_BYTES)) as buffer:
                for _ in range(rounds):
                    start = chance.randrange(FILE_BYTES - 5000)
                    region = buffer.region(start, 5000)
                    source.read_into(region, start)
                    if bytes(region.memory) != CONTENT[start : start + 5000]:
                        failures.append(start)

        run_together(work, range(8))
        assert not failures
        assert source.read_bytes == 8 * rounds * 5000


def test_identities_distinguish_files(source_path):
    with SourceFile(source_path) as source:
        identity = source.identity
    state = source_path.stat()
    assert identity == FileIdentity("source", FILE_BYTES, state.st_mtime_ns, state.st_ino)
    os.utime(source_path, ns=(0, state.st_mtime_ns + 1))
    with SourceFile(source_path) as source:
        assert source.identity != identity


# Writing


def run_together(work, arguments):
    """Run `work` on each argument, in threads of their own; an exception in one is raised."""
    raised = []

    def guarded(argument):
        try:
            work(argument)
        except BaseException as error:
            raised.append(error)

    workers = [threading.Thread(target=guarded, args=(argument,)) for argument in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if raised:
        raise raised[0]


def pages_of(span):
    return range(span[0] // PAGE_BYTES, -(-span[1] // PAGE_BYTES))


cuts = st.lists(st.integers(0, FILE_BYTES), max_size=6).map(
    lambda inner: list(itertools.pairwise(sorted({0, FILE_BYTES, *inner})))
)


@given(
    cuts.flatmap(st.permutations),
    limits,
    st.sampled_from([None, None, *REFUSALS]),
    st.sampled_from([0, 0, 1]),
)
def test_writes_the_bytes_whatever_the_system_grants(
    shared_folder, regions, limits, direct_error, shift
):
    path = shared_folder / "written"
    path.unlink(missing_ok=True)
    machine = Machine(limits, direct_error=direct_error)
    with pytest.MonkeyPatch.context() as patch, TargetFile(path, FILE_BYTES) as plain:
        plain.close()
        machine.install(patch)
        with TargetFile(path, FILE_BYTES) as target:
            for start, stop in regions:
                with AlignedBuffer(AlignedBuffer.capacity_for(stop - start)) as buffer:
                    # Where the shift is not 0 the address does not suit the offset.
                    memory = buffer.region(start + shift, stop - start).memory
                    memory[:] = CONTENT[start:stop]
                    target.write(memory, start)
            target.sync()
            assert target.written_bytes == FILE_BYTES
    assert path.read_bytes() == CONTENT
    assert not machine.broken_rules
    assert shift == 0 or not machine.spans("direct")


@given(cuts)
def test_no_page_is_written_both_directly_and_buffered(shared_folder, regions):
    machine = Machine()
    with (
        pytest.MonkeyPatch.context() as patch,
        AlignedBuffer(AlignedBuffer.capacity_for(FILE_BYTES)) as buffer,
    ):
        machine.install(patch)
        with TargetFile(shared_folder / "pages", FILE_BYTES) as target:
            for start, stop in regions:
                target.write(buffer.region(start, stop - start).memory, start)
    direct, buffered = (
        [page for span in machine.spans(kind) for page in pages_of(span)]
        for kind in ("direct", "buffered")
    )
    assert not set(direct) & set(buffered)
    assert len(direct) == len(set(direct))
    inside = [
        page
        for start, stop in regions
        for page in pages_of((start, stop))
        if start <= page * PAGE_BYTES and (page + 1) * PAGE_BYTES <= stop
    ]
    assert sorted(direct) == inside


def test_only_the_edges_are_buffered(machine, tmp_path):
    with (
        TargetFile(tmp_path / "target", FILE_BYTES) as target,
        AlignedBuffer(FILE_BYTES) as buffer,
    ):
        target.write(buffer.region(5000, 20_000).memory, 5000)
    assert machine.spans("direct") == [(8192, 24_576)]
    assert machine.spans("buffered") == [(5000, 8192), (24_576, 25_000)]


def test_a_short_direct_write_resumes_at_the_partial_page(machine, tmp_path):
    path = tmp_path / "target"
    machine.limits = [9000, 100]
    with (
        TargetFile(path, 8 * PAGE_BYTES) as target,
        AlignedBuffer(8 * PAGE_BYTES) as buffer,
    ):
        memory = buffer.region(0, 8 * PAGE_BYTES).memory
        memory[:] = CONTENT[: 8 * PAGE_BYTES]
        target.write(memory, 0)
    assert path.read_bytes() == CONTENT[: 8 * PAGE_BYTES]
    assert machine.spans("direct") == [(0, 8 * PAGE_BYTES), (8192, 8 * PAGE_BYTES)]
    assert machine.spans("buffered") == [(8192, 8 * PAGE_BYTES)]


def test_threads_write_neighbouring_regions_of_a_real_file(tmp_path):
    size = 12 * 1024 * 1024
    for seed in range(3):
        chance = random.Random(seed)
        content = chance.randbytes(size)
        inner = [chance.randrange(size) for _ in range(40)]
        # Some regions smaller than a page, several of them in one page.
        inner += [inner[0] + step for step in (1, 500, 1000, 4095, 4096)]
        regions = list(itertools.pairwise(sorted({0, size, *(cut for cut in inner if cut < size)})))
        chance.shuffle(regions)
        path = tmp_path / f"target-{seed}"
        with TargetFile(path, size) as target:

            def work(worker, target=target, regions=regions, content=content):
                for start, stop in regions[worker::8]:
                    with AlignedBuffer(AlignedBuffer.capacity_for(stop - start)) as buffer:
                        memory = buffer.region(start, stop - start).memory
                        memory[:] = content[start:stop]
                        target.write(memory, start)

            run_together(work, range(8))
            target.sync()
            assert target.written_bytes == size
        assert path.read_bytes() == content

        with (
            SourceFile(path) as source,
            AlignedBuffer(AlignedBuffer.capacity_for(size)) as buffer,
        ):
            # Asked of the disk, not of the page cache.
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
            region = buffer.region(0, size)
            source.read_into(region, 0)
            assert bytes(region.memory) == content


def test_a_file_system_without_direct_descriptors(tmp_path, monkeypatch):
    real_open = os.open

    def refuse(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    size = 3 * MIN_DIRECT_BYTES
    content = random.Random(1).randbytes(size)
    with AlignedBuffer(size) as buffer:
        region = buffer.region(0, size)
        region.memory[:] = content
        with TargetFile(tmp_path / "target", size) as target:
            target.write(region.memory, 0)
        region.memory[:] = bytes(size)
        with SourceFile(tmp_path / "target") as source:
            source.read_into(region, 0)
        assert bytes(region.memory) == content


def test_a_machine_with_larger_pages_never_writes_directly(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("reshard.checkpoint.storage.local_files.mmap.PAGESIZE", 65_536)
    with (
        TargetFile(tmp_path / "target", FILE_BYTES) as target,
        AlignedBuffer(AlignedBuffer.capacity_for(FILE_BYTES)) as buffer,
    ):
        target.write(buffer.region(0, FILE_BYTES).memory, 0)
    assert machine.asked == [("buffered", 0, FILE_BYTES)]


@pytest.mark.parametrize("kind", ["direct", "buffered"])
@pytest.mark.parametrize(
    ("number", "reason", "advice"),
    [
        (errno.ENOSPC, "No space left on device", "bytes are free; free space and"),
        (errno.EDQUOT, "Disk quota exceeded", "bytes are free; free space and"),
        (errno.EIO, "Input/output error", "check the disk and its file system, then"),
        (errno.EROFS, "Read-only file system", "make it writable and"),
    ],
)
def test_failed_writes_name_file_reason_and_remedy(tmp_path, machine, kind, number, reason, advice):
    path = tmp_path / "target"
    with TargetFile(path, FILE_BYTES) as target, AlignedBuffer(4 * PAGE_BYTES) as buffer:
        machine.errors[kind] = number
        with pytest.raises(RunError) as caught:
            target.write(buffer.region(5000, 9000).memory, 5000)
        assert target.written_bytes == 0
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot write 9000 bytes at offset 5000: {reason}")
    assert message.endswith(f"{advice} run the same command again, it continues")


def test_a_write_of_no_bytes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with (
        TargetFile(tmp_path / "target", 10) as target,
        pytest.raises(RunError, match="wrote no bytes"),
    ):
        target.write(memoryview(b"0123456789"), 0)


def test_bytes_outside_the_file_are_refused(tmp_path):
    with TargetFile(tmp_path / "target", 10) as target:
        for offset in (-1, 6, 100):
            with pytest.raises(UsageError, match=rf"5 bytes at offset {offset}: .* 10 bytes"):
                target.write(memoryview(b"01234"), offset)
        target.write(memoryview(b"01234"), 5)
        target.write(memoryview(b""), 10)
    assert (tmp_path / "target").read_bytes() == bytes(5) + b"01234"


def test_a_target_has_its_size_and_its_space_from_the_start(tmp_path):
    with TargetFile(tmp_path / "target", FILE_BYTES):
        state = (tmp_path / "target").stat()
    assert state.st_size == FILE_BYTES
    assert state.st_blocks * 512 >= FILE_BYTES


def test_a_target_keeps_bytes_of_an_earlier_run(tmp_path):
    path = tmp_path / "target"
    path.write_bytes(b"abcdef")
    with TargetFile(path, 10) as target:
        target.write(memoryview(b"XY"), 8)
    assert path.read_bytes() == b"abcdef\0\0XY"
    with TargetFile(path, 3):
        pass
    assert path.read_bytes() == b"abc"


def test_an_empty_target(tmp_path):
    with TargetFile(tmp_path / "empty", 0) as target:
        target.sync()
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_disk_too_small_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        os.ftruncate(descriptor, size // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    told = "1234 bytes are free"
    module = "reshard.checkpoint.storage.local_files"
    monkeypatch.setattr(f"{module}.describe_free_space", lambda _: told)
    path = tmp_path / "target"
    path.write_bytes(b"earlier")
    with pytest.raises(RunError) as caught:
        TargetFile(path, 5_000_000)
    assert str(caught.value) == (
        f"{path}: cannot create with 5000000 bytes: No space left on device: 1234 bytes are "
        "free; free space and run the same command again, it continues"
    )
    assert path.read_bytes() == b"earlier"
    assert list_open_files(tmp_path) == []


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_file_system_that_cannot_allocate_gets_the_size_alone(tmp_path, monkeypatch, refusal):
    def refuse(*_):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with TargetFile(tmp_path / "target", 5000) as target:
        target.write(memoryview(b"end"), 4997)
    assert (tmp_path / "target").read_bytes() == bytes(4997) + b"end"


def test_a_target_that_cannot_be_created_is_named(tmp_path):
    with pytest.raises(RunError, match=r"none/target: cannot create with 5 bytes: No such file"):
        TargetFile(tmp_path / "none" / "target", 5)


def test_a_device_is_refused_as_a_target():
    with pytest.raises(RunError, match=r"^/dev/full is not a regular file"):
        TargetFile("/dev/full", 5)


def test_a_sync_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with (
        TargetFile(tmp_path / "target", 5) as target,
        pytest.raises(RunError, match="target: cannot sync: Input/output error"),
    ):
        target.sync()


# Folders


def test_a_folder_is_synced_after_the_names_in_it_changed(tmp_path, monkeypatch):
    synced = []
    real_sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.fstat(number).st_ino), real_sync(number))
    )
    sync_folder(tmp_path)
    assert synced == [tmp_path.stat().st_ino]


class UsedUp(NamedTuple):
    """What a file system says that has no inode left."""

    f_files: int = 100
    f_favail: int = 0
    f_bavail: int = 1000
    f_frsize: int = 4096


def test_a_disk_without_inodes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "statvfs", lambda _: UsedUp())
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(RunError, match=r"no inode is free(.|\n)*continues"):
            TargetFile(tmp_path / "weights", 10)
    with (
        pytest.raises(RunError, match=r"No space left on device \(no inode is free"),
        translate_os_errors("make a folder", tmp_path / "not" / "there"),
    ):
        refuse()
    # Some file systems have no fixed number of inodes.
    monkeypatch.setattr(os, "statvfs", lambda _: UsedUp(f_files=0))
    assert describe_free_space(tmp_path) == "4096000 bytes are free"
