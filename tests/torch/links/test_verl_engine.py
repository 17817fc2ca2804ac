"""verl's checkpoint engine over a stand-in of its registry: streams of whole tensors, by a link."""

from __future__ import annotations

import abc
import asyncio
import sys
import types
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from reshard.errors import LinkError, UsageError
from reshard.torch.links import verl_engine


class CheckpointEngine(abc.ABC):
    """As verl's: what it calls is abstract."""

    @abc.abstractmethod
    def prepare(self) -> Any: ...
    @classmethod
    @abc.abstractmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: Any): ...
    @abc.abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...
    @abc.abstractmethod
    def finalize(self) -> None: ...
    @abc.abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None: ...
    @abc.abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class Registry:
    _registry: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Any:
        def add(cls: Any) -> Any:
            Registry._registry[backend] = cls
            return cls

        return add


@pytest.fixture
def make_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class that verl would make on every process."""
    module = types.ModuleType("verl.checkpoint_engine")
    vars(module).update(CheckpointEngine=CheckpointEngine, CheckpointEngineRegistry=Registry)
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.checkpoint_engine", module)
    monkeypatch.setattr(Registry, "_registry", {})
    verl_engine.make_engine_class.cache_clear()
    verl_engine.register()
    verl_engine.register()
    yield Registry._registry["reshard"]
    verl_engine.make_engine_class.cache_clear()


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "embed": torch.randn(50, 40, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "scale": torch.tensor(2.0 + step),
        "none": torch.empty(0, 3),
        "head": torch.randn(40, 50, generator=generator).t(),
        # In JSON each of these characters takes twelve bytes.
        **{f"{60 * chr(0x1D6FC)}{n}": torch.tensor(float(n)) for n in range(14)},
    }


async def collect(end: Any) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in end.receive_weights(global_steps=1)}


async def stream(step: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """As some of verl's trainers have them."""
    for pair in weights(step).items():
        yield pair


def test_every_worker_gets_the_stream(make_end: Any) -> None:
    # The first tensor takes two buckets, and shares the second one with others.
    size, trainers, workers = 6000, 2, 2
    ends = [
        make_end(bucket_size=size, is_master=n == 0, host="127.0.0.1", timeout_s=60)
        for n in range(trainers + workers)
    ]
    with ThreadPoolExecutor(len(ends)) as threads:
        for step in range(2):
            metadata = [end.prepare() for end in ends]
            both = make_end.build_topology(trainers, workers, metadata)
            given = [
                {name: values[n] for name, values in side.items()}
                for side, ranks in zip(both, (trainers, workers), strict=True)
                for n in range(ranks)
            ]
            begun = [
                threads.submit(end.init_process_group, **own)
                for end, own in zip(ends, given, strict=True)
            ]
            for one in begun:
                one.result(60)
            sent = [
                threads.submit(asyncio.run, end.send_weights(given, global_steps=step))
                for end, given in zip(ends, (weights(step).items(), stream(step)), strict=False)
            ]
            found = [threads.submit(asyncio.run, collect(end)) for end in ends[trainers:]]
            for one in sent:
                one.result(60)
            for one in found:
                got = one.result(60)
                assert list(got) == list(weights(step))
                for name, right in weights(step).items():
                    assert got[name].dtype == right.dtype, name
                    assert torch.equal(got[name], right), name
            for end in reversed(ends):
                end.finalize()


def test_without_a_link_and_what_is_no_bucket(make_end: Any) -> None:
    with pytest.raises(UsageError, match=r"bucket_size"):
        make_end(bucket_size=10)
    end = make_end(bucket_size=4096)
    with pytest.raises(UsageError, match="call init_process_group first"):
        asyncio.run(end.send_weights(iter(())))
    for text in (b"", b'{"tensors": [["a", "float32", [-1], 0, 4]], "is_last": true}', b"[]"):
        told = torch.zeros(4096, dtype=torch.uint8)
        told[:8] = torch.tensor(list(len(text).to_bytes(8, "little")), dtype=torch.uint8)
        told[8 : 8 + len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        end._bucket = told
        with pytest.raises(LinkError, match="is no bucket of weights"):
            end._read_table()
