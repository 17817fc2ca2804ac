"""Exchanges of tensors on a CUDA device, with fake tensors, which need no device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import reshard
from reshard.torch.exchange import exchange as exchange_module
from reshard.torch.exchange.exchange import MessageExchange
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.copies import empty_bytes, empty_result
from reshard.torch.exchange.packing.messages import RankTransfers

CUDA = torch.device("cuda", 0)
SHAPE = (64, 96)
RANKS = 4
MESH = reshard.DeviceMesh.of(tp=RANKS)
CASES = [("tp, -", "-, tp"), ("tp, -", "-, -")]


@pytest.fixture
def job() -> Iterator[None]:
    """Rank 1 of four that are not there."""
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def transfers(before: str, after: str, dtype: torch.dtype) -> RankTransfers:
    """Of rank 1, between tensors of its CUDA device."""
    source, target = (reshard.spec(MESH, text).layout(SHAPE) for text in (before, after))
    plan = reshard.plan(source, target, dtype="float32")
    own, into = (
        torch.empty(layout.local_shape(1), dtype=torch.float32, device=CUDA)
        for layout in (source, target)
    )
    return RankTransfers.of(plan.change, plan.for_rank(1), 1, own, into, dtype)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("before", "after"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_between_devices_are_not_copied_to_the_host(
    before: str, after: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[tuple[bool, torch.Tensor, int]] = []
    copied: list[tuple[torch.device, torch.device]] = []

    class Work:
        def wait(self) -> None:
            pass

    def post(group: RankGroup, messages: list[tuple[bool, torch.Tensor, int]]) -> list[Work]:
        posted.extend(messages)
        return [Work() for _ in messages]

    def make_copiers(
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> list[Callable[[], None]]:
        # A torch without CUDA refuses to copy even what is fake.
        found = [(target.device, source.device) for target, source in pairs]
        return [functools.partial(copied.extend, found)]

    monkeypatch.setattr(RankGroup, "post_together", post)
    monkeypatch.setattr(exchange_module, "copiers", make_copiers)
    with FakeTensorMode():
        moved = transfers(before, after, dtype)
        exchange = MessageExchange([moved], None, CUDA, 1 << 12, is_grouped=True)
        exchange.run()
    assert {is_sent for is_sent, _, _ in posted} == {True, False}
    assert all(buffer.device == CUDA for _, buffer, _ in posted)
    sent = sum(buffer.numel() for is_sent, buffer, _ in posted if is_sent)
    assert sent >= exchange.sent_bytes > 0
    assert copied and set(copied) == {(CUDA, CUDA)}
    assert exchange.extra_bytes <= 1 << 12


def test_memory_is_allocated_on_the_requested_device() -> None:
    with FakeTensorMode():
        assert empty_bytes(64, CUDA).device == CUDA
        found = empty_result((1 << 12, 1 << 10), torch.float32, CUDA)
        assert found.device == CUDA and found.dtype == torch.float32
        # Large ones of the CPU have no memory to ask anything for either.
        assert (
            empty_result((1 << 12, 1 << 10), torch.float32, torch.device("cpu")).numel() == 1 << 22
        )
