"""Megatron-core on the CPU: what it asks of a CUDA device is done by the CPU.

`install()` before Megatron-core is imported: tensors asked for on `cuda` are made on the CPU, types
of tensors are named as on CUDA (Megatron-core looks at these names), and what waits for a device
does nothing.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Calls of PyTorch with `device="cuda"` get the CPU instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event: whatever is asked of it is done already."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def _multiply_grouped(rows: Any, weights: Any, counts: Any, trans_b: bool = False) -> Any:
    """The rows of each expert by its weights, as the package `grouped_gemm` has it for CUDA."""
    parts = zip(torch.split(rows, counts.tolist()), weights, strict=True)
    return torch.cat([part @ (one.T if trans_b else one) for part, one in parts])


def install() -> None:
    """Make the CPU stand for CUDA in this process."""
    grouped = ModuleType("grouped_gemm")
    grouped.ops = SimpleNamespace(gmm=_multiply_grouped)
    sys.modules["grouped_gemm"] = grouped
    # Optimizers import it, and it looks at functions of `torch` by identity.
    import torch._dynamo

    own_type = torch.Tensor.type

    def named_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own_type(self, *args, **kwargs)
        if not isinstance(found, str):
            return found
        return "torch.cuda." + found.removeprefix("torch.").removeprefix("cuda.")

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    def do_nothing(*args: Any, **kwargs: Any) -> None: ...

    torch.Tensor.type = named_type
    torch.Tensor.cuda = stay
    torch.nn.Module.cuda = stay
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.set_rng_state = do_nothing
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed"):
        setattr(torch.cuda, name, do_nothing)
    torch.cuda.Stream = torch.cuda.Event = lambda *args, **kwargs: _Stream()
    torch.cuda.current_stream = torch.cuda.default_stream = torch.cuda.Stream
    torch.cuda.stream = lambda *args, **kwargs: nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = do_nothing
    torch.cuda.is_current_stream_capturing = lambda: False
    # Compiling takes longer than all that is run.
    torch.compile = lambda model=None, **kwargs: model if model is not None else lambda found: found
    _OnCpu().__enter__()


def use_own_adam() -> None:
    """Make Megatron-core train with an AdamW that has its step in groups, as fused ones do.

    Its distributed optimizer loads `fully_reshardable` state into such optimizers only.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = distrib_optimizer.Adam = OwnAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


class OwnAdam(torch.optim.Optimizer):
    """AdamW, with one step for all parameters of a group."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **options: Any) -> None:
        options.pop("adam_w_mode")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                mean = state.setdefault("exp_avg", torch.zeros_like(one))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(one))
                one.mul_(1 - group["lr"] * group["weight_decay"])
                mean.mul_(first).add_(one.grad, alpha=1 - first)
                square.mul_(second).addcmul_(one.grad, one.grad, value=1 - second)
                scale = 1 - second ** group["step"]
                root = (square / scale).sqrt_().add_(group["eps"])
                one.addcdiv_(mean, root, value=-group["lr"] / (1 - first ** group["step"]))
