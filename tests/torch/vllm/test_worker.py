"""The backend of vLLM's weight transfer, over stand-ins of its classes, both ends in one process.

Links with vLLM itself: `tests/engines/vllm/test_links.py`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from live_processes import free_port
from reshard.errors import LinkError, RunError, ShardError, UsageError
from reshard.torch import vllm
from reshard.torch.vllm.worker import find_sources

WIDTH, HIDDEN = 6, 4
SOURCES = {
    "gate": ("float32", [WIDTH, HIDDEN]),
    "up": ("float32", [WIDTH, HIDDEN]),
    "A_log": ("float32", [8]),
}


class RankModel(torch.nn.Module):
    """A rank with the lower half of fused rows, and a computed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(WIDTH, HIDDEN, dtype=torch.bfloat16))
        self.A = torch.nn.Parameter(torch.zeros(8))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        half = WIDTH // 2
        with torch.no_grad():
            for name, weight in weights:
                if name == "A_log":
                    self.A.copy_(-torch.exp(weight))
                else:
                    rows = self.gate_up.narrow(0, half * (name == "up"), half)
                    rows.copy_(weight.narrow(0, half, half))


class Client:
    """vLLM's control plane, in front of one worker."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.versions = engine, []

    def init_weight_transfer_engine(self, told: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(told))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, told: dict[str, Any]) -> None:
        self.engine.update_weights(told)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()
        self.versions.append(weight_version)


def make_client(factory: Any, model: torch.nn.Module) -> Client:
    parallel = types.SimpleNamespace(world_size=1, rank=0, data_parallel_size=1)
    config = types.SimpleNamespace(parallel_config=parallel, model_config=None)
    return Client(factory.WeightTransferEngineFactory._registry["reshard"]()(config, model))


def make_init(trained: dict[str, torch.Tensor], **more: Any) -> Any:
    init = {"options": {"cast": True}, "sources": SOURCES, "timeout_s": 60.0, **more}
    url = f"tcp://127.0.0.1:{free_port()}"
    return vllm.ReshardTrainerInit(url, trained, 1, rank=0, **init)


def train(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (_, shape) in SOURCES.items()}


def test_a_worker_has_the_values_of_its_loader(factory: Any) -> None:
    model, trained = RankModel(), train(0)
    client = make_client(factory, model)
    trainer_class = factory.WeightTransferTrainerFactory._registry["reshard"]()
    trainer = trainer_class.trainer_init(make_init(trained), client=client)
    try:
        for version in (5, 6):
            for name, tensor in train(version).items():
                trained[name].copy_(tensor)
            assert trainer.send_weights(version).version == version
            right = RankModel()
            right.load_weights(trained.items())
            for name, tensor in right.state_dict().items():
                torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)
        assert client.versions == ["5", "6"]
        # What the loader computes comes whole, other parameters by the rows that the rank has.
        staged = client.engine._linked.reloaded.staged
        assert {name: list(one.shape) for name, (one, _) in staged.tensors.items()} == {
            "gate": [3, 4],
            "up": [3, 4],
            "A_log": [8],
        }
        assert staged.tensors["gate"][0].dtype == torch.bfloat16
    finally:
        trainer.shutdown()
    with pytest.raises(LinkError, match="still has version 6"):
        client.update_weights({})
    client.engine.shutdown()
    with pytest.raises(UsageError, match="not linked; call init_weight_transfer_engine"):
        client.start_weight_update()


def test_weights_that_were_not_received_are_not_applied(factory: Any) -> None:
    client = make_client(factory, RankModel())
    trainer_class = factory.WeightTransferTrainerFactory._registry["reshard"]()
    trainer = trainer_class.trainer_init(make_init(train(0)), client=client)
    try:
        with pytest.raises(RunError, match="the model keeps its weights"):
            client.finish_weight_update()
    finally:
        trainer.shutdown()
        client.engine.shutdown()


def test_unknown_names_are_an_error_on_both_sides(factory: Any) -> None:
    client = make_client(factory, RankModel())
    trainer_class = factory.WeightTransferTrainerFactory._registry["reshard"]()
    with pytest.raises(ShardError, match="up: not in the source"):
        trainer_class.trainer_init(make_init({"gate": train(0)["gate"]}), client=client)
    with pytest.raises(UsageError, match="give the model itself"):
        trainer_class.trainer_init(make_init({}), client=client, source=object())
    # The worker fails before it connects: the trainer does not wait for it.
    with pytest.raises(UsageError, match="sources='hub'"):
        trainer_class.trainer_init(make_init({}, sources="hub"), client=client)


@pytest.mark.parametrize("sources", ["hub", {"up": "float32"}, {"up": ("float32", [-1])}])
def test_invalid_sources_are_refused(sources: Any) -> None:
    with pytest.raises(UsageError, match=r"sources='hub'|source 'up' is|shape of 'up'"):
        find_sources(None, sources)
