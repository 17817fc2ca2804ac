"""Files of DeepSpeed as `torch.load` reads them, without DeepSpeed."""

from __future__ import annotations

import sys
import types
from collections import namedtuple
from enum import IntEnum
from typing import Any

import pytest


@pytest.fixture
def deepspeed_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the few classes of DeepSpeed that its files name, for `torch.load`."""

    def add(name: str, **members: Any) -> None:
        module = types.ModuleType(name)
        for key, value in members.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)

    scaler = type("LossScaler", (), {})
    dynamic = type("DynamicLossScaler", (), {})
    for name in ("", ".runtime", ".runtime.fp16", ".runtime.zero", ".utils"):
        add(f"deepspeed{name}")
    add("deepspeed.runtime.fp16.loss_scaler", LossScaler=scaler, DynamicLossScaler=dynamic)
    stage = IntEnum("ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3})
    add("deepspeed.runtime.zero.config", ZeroStageEnum=stage)
    fragment = namedtuple("fragment_address", ["numel", "start"])
    add("deepspeed.utils.tensor_fragment", fragment_address=fragment)
