"""Copies are torch's, bit for bit, whichever way they take; memory is what was asked for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.utils.dlpack
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.execution.arrays import TorchTensors
from reshard.torch.exchange.packing.copies import (
    _KEPT,
    DEFAULT_KEPT_BYTES,
    KeptMemory,
    combine,
    copier,
    empty_bytes,
    empty_result,
    is_added_in_place,
    keep_memory,
    row_bytes,
)

CPU = torch.device("cpu")
DTYPES = [
    torch.bool,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bits, dense or a part of a larger one, its dimensions in any order."""
    order = draw(st.permutations(range(len(shape))))
    around = [shape[dim] + draw(st.sampled_from([0, 0, 1])) for dim in order]
    bits = torch.randint(0, 2, (math.prod(around) * dtype.itemsize,), dtype=torch.uint8)
    whole = bits.view(dtype).view(around)
    for dim, length in enumerate(order):
        whole = whole.narrow(dim, around[dim] - shape[length], shape[length])
    back = [order.index(dim) for dim in range(len(shape))]
    return whole.permute(back)


def bits_of(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from([(), (3,), (2, 3, 5), (3, 0), (4, 700)]))
def test_a_copy_has_the_same_bits(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source, target = data.draw(views(shape, dtype)), data.draw(views(shape, dtype))
    whole = target._base if target._base is not None else target
    expected = whole.clone()
    expected.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
    copy = copier(target, source)
    copy()
    assert bits_of(whole) == bits_of(expected)
    # It can be called again, and sees what the source is by then.
    source.copy_(torch.zeros((), dtype=dtype))
    copy()
    assert not any(bits_of(target))


@given(st.data(), st.sampled_from([(), (1,), (3,), (2, 3, 5), (1, 4, 1, 2)]))
def test_rows_are_the_longest_that_are_dense(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensor = data.draw(views(shape, torch.int16))
    fits = [tensor[(0,) * dims] for dims in range(tensor.dim() + 1)]
    assert row_bytes(tensor) == max(2 * one.numel() for one in fits if one.is_contiguous())


def test_what_changes_as_it_is_copied_is_torchs() -> None:
    source, target = torch.randn(4, 1024, dtype=torch.complex64), torch.zeros(4, 1024)
    conjugate = torch.zeros_like(source)
    copier(conjugate, source.conj())()
    assert torch.equal(conjugate, source.conj().resolve_conj())
    copier(target, source.imag)()
    assert torch.equal(target, source.imag)
    copier(target, source.conj().imag)()
    assert torch.equal(target, -source.imag)
    cast = torch.zeros(4, 1024, dtype=torch.bfloat16)
    copier(cast, target)()
    assert torch.equal(cast, target.to(torch.bfloat16))


def test_a_copy_is_none_of_autograds() -> None:
    source = torch.randn(4, 1024, requires_grad=True)
    target = torch.zeros(4, 1024)
    with torch.no_grad():
        copier(target, source)()
    assert torch.equal(target, source) and not target.requires_grad


@pytest.mark.parametrize("size_bytes", [0, 5, 5 << 20])
def test_memory_has_its_size_and_can_be_written(size_bytes: int) -> None:
    found = empty_bytes(size_bytes, CPU)
    assert found.shape == (size_bytes,) and found.dtype is torch.uint8
    assert found.fill_(3).sum() == 3 * size_bytes


MAPS = Path("/proc/self/smaps")


@pytest.mark.linux_only(reason="large pages on demand")
@given(
    st.data(),
    st.sampled_from([torch.bool, torch.uint16, torch.int8, torch.bfloat16, torch.float32]),
    st.sampled_from(["sum", "mean", "max", "product"]),
    st.sampled_from([(), (3,), (2, 3, 5), (3, 0), (4, 700)]),
)
def test_contributions_are_combined_as_in_one_process(
    data: st.DataObject, dtype: torch.dtype, reduction: str, shape: tuple[int, ...]
) -> None:
    source, target = data.draw(views(shape, dtype)), data.draw(views(shape, dtype))
    if dtype.is_floating_point:
        # The bits of what is no number are nobody's promise.
        source.nan_to_num_()
        target.nan_to_num_()
    kind = TorchTensors(target)
    expected = kind.combine(reduction, kind.storage(target.clone()), kind.storage(source.clone()))
    combine(reduction, target, source)
    assert bits_of(target) == bits_of(kind.array(expected))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_infinite_complex_contributions_are_their_sum(dtype: torch.dtype) -> None:
    infinite = torch.tensor([[complex(1, math.inf), complex(-math.inf, math.nan)]] * 9, dtype=dtype)
    for source in (infinite, infinite.T.contiguous().T, infinite.conj().resolve_conj().conj()):
        target = torch.zeros(9, 2, dtype=dtype)
        combine("sum", target, source)
        torch.testing.assert_close(target, infinite, rtol=0, atol=0, equal_nan=True)


def test_weights_of_an_engine_are_added_to() -> None:
    with torch.inference_mode():
        target = torch.ones(5)
    parameter = torch.nn.Parameter(torch.ones(5))
    combine("sum", target, parameter)
    combine("sum", parameter, target)
    assert target.tolist() == [2.0] * 5 and parameter.tolist() == [3.0] * 5
    assert is_added_in_place("sum", torch.float32)


@pytest.mark.parametrize("elements", [0, 1, 1 << 21])
def test_a_result_is_an_ordinary_tensor(elements: int) -> None:
    found = empty_result((elements,), torch.float32, CPU)
    found.fill_(3)
    assert found.shape == (elements,) and found.eq(3).all()
    # Such as of `torch.empty`: it can be resized.
    found.resize_(elements + 1)


def use_memory(use: str, result: torch.Tensor) -> object:
    """Something of the user's that has the memory of a result, and is no tensor of it perhaps."""
    uses: dict[str, Callable[[], object]] = {
        "tensor": lambda: result,
        "view": lambda: result[1:],
        "storage": result.untyped_storage,
        "array": result.numpy,
        "buffer": lambda: memoryview(result.numpy())[2:],
        "capsule": lambda: torch.utils.dlpack.to_dlpack(result),
        "parameter": lambda: torch.nn.Parameter(result),
        "clone on write": lambda: torch._lazy_clone(result),
        "graph": lambda: (result * torch.ones(1, requires_grad=True)).grad_fn,
    }
    return uses[use]()


USES = ["tensor", "view", "storage", "array", "buffer", "capsule", "parameter", "graph"]


@pytest.mark.parametrize("use", [*USES, "clone on write"])
def test_memory_that_somebody_has_is_not_given_to_another(use: str) -> None:
    kept = KeptMemory(1 << 20)
    result = torch.zeros(64)
    address, size_bytes = result.data_ptr(), result.nbytes
    kept.keep(result.untyped_storage())
    mine = use_memory(use, result)
    del result
    assert kept.find(size_bytes) is None
    del mine
    found = kept.find(size_bytes)
    # What was cloned on write stays so, and is never used again.
    assert (found is None) if use == "clone on write" else found.data_ptr() == address
    # What was found is in use until its holder lets it go.
    assert found is None or kept.find(size_bytes) is None


def test_memory_that_is_shared_or_resized_is_not_given_to_another() -> None:
    kept = KeptMemory(1 << 20)
    shared, resized = torch.zeros(64), torch.zeros(32)
    kept.keep(shared.untyped_storage())
    kept.keep(resized.untyped_storage())
    shared.share_memory_()
    resized.resize_(128)
    del shared, resized
    assert kept.find(64 * 4) is None and kept.find(32 * 4) is None
    assert kept.find(128 * 4) is not None


def test_as_much_memory_is_kept_as_is_said_and_the_latest() -> None:
    kept = KeptMemory(3 * 64)
    for elements in (16, 17, 18, 100):
        kept.keep(torch.zeros(elements).untyped_storage())
    # Of 64, 68 and 72 bytes two fit; 400 alone are too many.
    assert [kept.find(4 * elements) is not None for elements in (16, 17, 18, 100)] == [
        False,
        True,
        True,
        False,
    ]
    kept.limit(0)
    assert kept.find(68) is None and kept.find(72) is None
    with pytest.raises(UsageError, match="most_bytes=-1; give a whole number"):
        keep_memory(-1)


def test_results_take_the_memory_of_those_that_are_freed() -> None:
    shape = (1 << 10, (1 << 10) + 24)
    first = empty_result(shape, torch.float32, CPU)
    address = first.data_ptr()
    second = empty_result(shape, torch.float32, CPU)
    assert second.data_ptr() != address
    first.fill_(1)
    del first
    # Another type and shape of as many bytes.
    third = empty_result((2, *shape), torch.bfloat16, CPU)
    assert third.data_ptr() == address and not third._is_view() and third.is_contiguous()
    third.fill_(3)
    second.fill_(2)
    assert third.eq(3).all() and second.eq(2).all()
    third.resize_(1)
    keep_memory(0)
    try:
        addresses = {empty_result(shape, torch.float32, CPU).data_ptr() for _ in range(2)}
        # The third still has it.
        assert address not in addresses
        assert not _KEPT._storages
    finally:
        keep_memory(DEFAULT_KEPT_BYTES)


def test_large_memory_asks_for_large_pages() -> None:
    found = empty_bytes(64 << 20, CPU)
    at = found.data_ptr() + found.numel() // 2
    flags = ""
    is_inside = False
    for line in MAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            is_inside = low <= at < high
        elif head == "VmFlags:" and is_inside:
            flags = line
    if "hg" not in flags.split() and "nh" not in flags.split():
        advised = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        assert not advised.exists() or "[never]" in advised.read_text()
