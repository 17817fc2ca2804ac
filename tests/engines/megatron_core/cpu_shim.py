"""Megatron-core on the CPU: what it asks of a CUDA device is done by the CPU.

`install()` before Megatron-core is imported: tensors asked for on `cuda` are made on the CPU, types of
tensors are named as on CUDA (Megatron-core looks at these names), and what waits for a device does
nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
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


def install() -> None:
    """Make the CPU stand for CUDA in this process."""
    # Optimizers import it, and it looks at functions of `torch` by identity.
    import torch._dynamo  # noqa: F401

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
