"""Memory of large new arrays: as good as NumPy's, found at once, and given back."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import reshard
from execution.example_arrays import MESH, plan_of
from reshard.dtypes import dtype
from reshard.execution import fresh_memory
from reshard.execution.fresh_memory import FreshMemory
from reshard.execution.outputs import NamedStorage, check_apart
from reshard.plans.hosts.staged_job import StagedJob
from reshard.topology import Topology

MIB = 1 << 20
ONLY_ON_LINUX = pytest.mark.linux_only(reason="large pages on demand")


@pytest.fixture
def every_array_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory, "LARGE_ARRAY_BYTES", 1)


@pytest.fixture
def arrays_of_4_mib_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory, "LARGE_ARRAY_BYTES", 4 * MIB)


def slow_clock(monkeypatch: pytest.MonkeyPatch, page_s: float) -> None:
    ticks: Iterator[float] = (tick * page_s for tick in itertools.count())
    monkeypatch.setattr(fresh_memory.time, "thread_time", lambda: next(ticks))


def smaps_of(array: NDArray[Any]) -> tuple[str, int]:
    """The flags of the mapping an array begins in, and how many KiB of it are there."""
    address, is_its, resident_kib = array.__array_interface__["data"][0], False, -1
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            is_its = low <= address < high
        elif is_its and first == "Rss:":
            resident_kib = int(rest.split()[0])
        elif is_its and first == "VmFlags:":
            return rest, resident_kib
    raise LookupError(hex(address))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 11), (2 * MIB + 1, 3), (1, 9 * MIB)])
@pytest.mark.parametrize("kind", [np.uint8, np.complex64])
def test_arrays_are_dense_writable_and_apart(shape: tuple[int, ...], kind: type) -> None:
    memory = FreshMemory()
    arrays = [memory.array(shape, np.dtype(kind)) for _ in range(3)]
    memory.find(threads=2)
    for number, array in enumerate(arrays):
        assert (array.shape, array.dtype) == (shape, np.dtype(kind))
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()
    check_apart([NamedStorage("one", array) for array in arrays], [])


@ONLY_ON_LINUX
@pytest.mark.usefixtures("arrays_of_4_mib_are_large")
def test_large_arrays_begin_at_a_large_page_and_are_there() -> None:
    memory = FreshMemory()
    array = memory.array((5 * MIB,), np.dtype(np.uint8))
    assert array.__array_interface__["data"][0] % (2 * MIB) == 0
    flags, resident_kib = smaps_of(array)
    assert "hg" in flags.split()
    assert resident_kib == 0
    memory.find(threads=1)
    flags, resident_kib = smaps_of(array)
    if "nh" not in flags.split():
        assert resident_kib == 4 * 1024


@ONLY_ON_LINUX
def test_smaller_arrays_are_memory_that_the_process_may_have_already() -> None:
    memory = FreshMemory()
    small, large = (memory.array((size,), np.dtype(np.uint8)) for size in (32 * MIB - 1, 32 * MIB))
    assert small.base is None
    assert large.base is not None


@ONLY_ON_LINUX
@pytest.mark.parametrize("threads", [1, 3])
def test_where_large_pages_are_slow_the_rest_is_small(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    slow_clock(monkeypatch, page_s=0.01)
    memory = FreshMemory()
    array = memory.array((48 * MIB,), np.dtype(np.uint8))
    memory.find(threads)
    flags, found_kib = smaps_of(array)
    assert "nh" in flags.split()
    # Each thread ends the page that it is at.
    assert 3 * 2 * 1024 <= found_kib <= (3 + threads - 1) * 2 * 1024
    array[...] = 1
    assert smaps_of(array)[1] >= 48 * 1024


@ONLY_ON_LINUX
@pytest.mark.usefixtures("arrays_of_4_mib_are_large")
def test_where_they_are_quick_all_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_clock(monkeypatch, page_s=1e-5)
    memory = FreshMemory()
    arrays = [memory.array((8 * MIB,), np.dtype(np.uint8)) for _ in range(2)]
    memory.find(threads=2)
    for array in arrays:
        flags, resident_kib = smaps_of(array)
        assert "hg" in flags.split()
        assert resident_kib == 8 * 1024


@ONLY_ON_LINUX
@pytest.mark.usefixtures("arrays_of_4_mib_are_large")
@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_memory_goes_with_the_last_array_that_shows_it(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Mapping(mmap.mmap):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            made = super().__new__(cls, *arguments, **options)
            mappings.append(weakref.ref(made))
            return made

    monkeypatch.setattr(mmap, "mmap", Mapping)
    plan = plan_of("x, -", "-, y", (1024, 4 * 1024))
    shards: dict[int, Any] = {rank: np.ones((512, 4 * 1024), np.float64) for rank in MESH.devices}
    if module == "torch":
        shards = {rank: torch.from_numpy(array) for rank, array in shards.items()}
    rows = {rank: array[-1] for rank, array in plan.run(shards).items()}
    for left in range(6, 0, -1):
        gc.collect()
        assert sum(mapping() is not None for mapping in mappings) == left
        _, row = rows.popitem()
        assert (row == 1).all()
        del row
    gc.collect()
    assert not any(mapping() for mapping in mappings)


@pytest.mark.parametrize("lacking", ["advice", "pages", "room"])
def test_systems_without_large_pages(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    class Mapping(mmap.mmap):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            if lacking == "room":
                raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, *arguments, **options)

        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    if lacking == "advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "mmap", Mapping)
    memory = FreshMemory()
    array = memory.array((8 * MIB,), np.dtype(np.uint8))
    memory.find(threads=2)
    array[...] = 1
    assert array.flags.owndata


def test_what_no_memory_holds_is_a_memory_error() -> None:
    for shape in ((1 << 60,), (1 << 46,)):
        with pytest.raises(MemoryError):
            FreshMemory().array(shape, np.dtype(np.uint32))


@pytest.mark.usefixtures("every_array_is_large")
@pytest.mark.parametrize("page_s", [0.0, 0.01])
def test_plans_jobs_and_stages_in_such_memory(
    monkeypatch: pytest.MonkeyPatch, page_s: float
) -> None:
    slow_clock(monkeypatch, page_s)
    mesh = reshard.DeviceMesh.of(host=2, gpu=2)
    source, target = (reshard.spec(mesh, t).layout((6, 3)) for t in ("host gpu, -", "gpu@pad4, -"))
    dense = np.arange(18, dtype=np.float32).reshape(6, 3)
    padded = np.concatenate([dense, np.zeros((2, 3), np.float32)])
    held = reshard.plan(reshard.Layout.whole((6, 3), [0], 1), source).run({0: dense})
    job = reshard.Job([reshard.JobItem.between_ranks("a", dtype("float32"), source, target)])
    staged = StagedJob(job, Topology.of(hosts=2, ranks_per_host=2))
    for found in (
        reshard.plan(source, target).run(held),
        job.run({"a": held})["a"],
        staged.run({"a": held})["a"],
    ):
        for rank in range(4):
            expected = padded[4 * (rank % 2) : 4 * (rank % 2) + 4]
            assert np.array_equal(found[rank], expected)
