"""vLLM's modules as far as links use them, with reloading in place."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from reshard.torch.vllm import worker


@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class Engine:
    def __init__(self, vllm_config: Any, model: torch.nn.Module) -> None:
        self.vllm_config, self.model = vllm_config, model
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config

    def parse_init_info(self, told: dict[str, Any]) -> Any:
        return self.init_info_cls(**told)

    def parse_update_info(self, told: dict[str, Any]) -> Any:
        return self.update_info_cls(**told)


class TrainerEngine:
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class Registry:
    def __init__(self) -> None:
        self._registry: dict[str, Any] = {}

    def register_engine(self, name: str, module: str, attribute: str) -> None:
        self._registry[name] = lambda: getattr(sys.modules[module], attribute)


def _tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**layer._parameters, **layer._buffers}


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's registries, where the backend is registered."""

    @contextlib.contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    modules: dict[str, dict[str, Any]] = {
        "": {},
        "config": {"set_current_vllm_config": nothing},
        "distributed": {},
        "distributed.weight_transfer": {},
        "distributed.weight_transfer.base": {
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
            "TrainerInitInfo": TrainerInitInfo,
            "WeightTransferEngine": Engine,
            "TrainerWeightTransferEngine": TrainerEngine,
        },
        "distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": Registry(),
            "WeightTransferTrainerFactory": Registry(),
        },
        "model_executor": {},
        "model_executor.model_loader": {},
        "model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
        "model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": lambda layer: types.SimpleNamespace(reset=lambda: None),
            "_place_kernel_tensors": lambda layer, info: None,
            "make_online_process_loader": lambda layer, name: getattr(layer, name).weight_loader,
        },
        "model_executor.model_loader.reload.meta": {
            "SKIP_LOAD_TENSORS": set(),
            "restore_layer_on_meta": lambda layer, info: None,
        },
        "model_executor.model_loader.reload.utils": {
            "get_layer_tensors": _tensors,
            "get_layer_params_buffers": lambda layer: (_tensors(layer), {}),
        },
    }
    made = {}
    for name, content in modules.items():
        whole = f"vllm.{name}".rstrip(".")
        made[whole] = types.ModuleType(whole)
        vars(made[whole]).update(content)
        monkeypatch.setitem(sys.modules, whole, made[whole])
        parent, _, own = whole.rpartition(".")
        if parent:
            setattr(made[parent], own, made[whole])
    makers = (
        worker.make_engine_class,
        worker.make_init_class,
        worker.make_trainer_class,
    )
    for make in makers:
        make.cache_clear()
    worker.register_backend()
    yield made["vllm.distributed.weight_transfer.factory"]
    for make in makers:
        make.cache_clear()
