"""Other forms of parameters that a module's forward computes with.

A forward may use values that were computed from a parameter earlier, and that a write into the
parameter does not change:

===========================================  ===================================================
form                                         handling
===========================================  ===================================================
parameters gathered by FSDP                  freed before and after a run (`fully_sharded`)
casts that autocast has cached               forgotten after a run
`torch.nn.utils.parametrize.cached()`        forgotten after a run
weights of an RNN that are not its           rejected
parameters
constants of code compiled with `freezing`   rejected
partitions of ZeRO-3                         read; rejected as targets
adapters merged into their base (PEFT,       rejected if the base is written, or read together with
loralib)                                     the adapters
weights that vLLM or SGLang has processed    rejected
===========================================  ===================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

from reshard.torch.fully_sharded import is_partitioned, partitions_parameters

# Quantization methods of vLLM and SGLang that leave loaded weights unchanged.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
# Weights of their latent attention that are computed from other weights; attributes of layers.
_COMPUTED = ("W_UV", "W_UK", "W_UK_T", "w_kc", "w_vc")
_PROCESS = "process_weights_after_loading"
# Attributes of modules that may compute with other forms of their parameters.
_MARKS = {*_COMPUTED, "quant_method", "_compiled_call_impl", "get_compiler_config"}


def forget_cached() -> None:
    """Forget values that torch computed of parameters and keeps for later forwards.

    >>> linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))
    >>> with parametrize.cached(), torch.no_grad():
    ...     before = linear.weight.item()
    ...     _ = linear.parametrizations.weight.original0.mul_(2)
    ...     unchanged = linear.weight.item() == before
    ...     forget_cached()
    ...     print(unchanged, linear.weight.item() == 2 * before)
    True True
    """
    torch.clear_autocast_cache()
    parametrize._cache.clear()


def find_copies(module: torch.nn.Module) -> str:
    """Return why a module's forward would not use values written into its parameters, or empty.

    >>> find_copies(torch.nn.LSTM(2, 2))
    ''
    """
    partitions = partitions_parameters()
    for path, part in module.named_modules():
        # Skip most parts quickly: among many, nearly all have no such attributes.
        if (
            partitions
            or not vars(part).keys().isdisjoint(_MARKS)
            or isinstance(part, torch.nn.RNNBase)
        ):
            for problem in _list_copies(part):
                return f"{path or type(module).__name__}: {problem}"
    return ""


def _list_copies(part: torch.nn.Module) -> Iterator[str]:
    if isinstance(part, torch.nn.RNNBase):
        own = [getattr(part, name, None) for name in part._flat_weights_names]
        if any(weight is not flat for weight, flat in zip(own, part._flat_weights, strict=False)):
            yield (
                f"{type(part).__name__} computes with weights that are not its parameters, such as "
                "those from before they were parametrized; set them by its attributes, so that "
                "it uses them"
            )
    for name, parameter in part._parameters.items():
        if parameter is not None and is_partitioned(parameter):
            yield (
                f"{name} is partitioned by DeepSpeed's ZeRO-3, which writes its own copy back "
                "after each step; fill the model before deepspeed.initialize, or within "
                "deepspeed.zero.GatheredParameters(..., modifier_rank=0)"
            )
    if is_frozen(part):
        yield (
            "compiled with freezing=True, which makes constants of its parameters; compile it "
            "without, or call torch._dynamo.reset() and compile it after every run"
        )
    computed = [name for name in _COMPUTED if isinstance(vars(part).get(name), torch.Tensor)]
    if computed:
        yield (
            f"{type(part).__name__} computes with {computed[0]}, which an engine computed of its "
            "parameters; fill the engine by its own loader, as reshard.torch.vllm does"
        )
    method = vars(part).get("quant_method")
    if hasattr(type(method), _PROCESS) and _processes(type(method)):
        yield (
            f"{type(method).__name__} of {type(part).__name__} processes weights for kernels once "
            "they are loaded; fill the engine by its own loader, as reshard.torch.vllm does"
        )


def _processes(method: type) -> bool:
    """Return whether a method of vLLM or SGLang may change weights after loading."""
    if method.__name__ in _PLAIN_METHODS:
        return False
    definers = [cls for cls in method.__mro__ if _PROCESS in vars(cls)]
    # The base class of all methods does nothing.
    return bool(definers) and definers[0].__name__ not in ("QuantizeMethodBase", "LinearMethodBase")


def is_frozen(part: torch.nn.Module) -> bool:
    """Return whether a module was compiled by Inductor with parameters as constants.

    >>> is_frozen(torch.compile(torch.nn.Linear(1, 1), backend="eager"))
    False
    """
    compiled = vars(part).get("_compiled_call_impl")
    reads: Any = (getattr(form, "get_compiler_config", None) for form in (part, compiled))
    # The options of the compilation take precedence over Inductor's current options.
    configs = (read() for read in reads if read is not None)
    return any(bool(config and config.get("freezing")) for config in configs)


def can_merge(part: torch.nn.Module) -> bool:
    """Return whether a module can merge adapters into its weights.

    >>> can_merge(torch.nn.Linear(2, 2))
    False
    """
    return "merged" in vars(part) or hasattr(type(part), "merged")


def find_merged(
    tuners: Iterable[tuple[str, torch.nn.Module]], used: Iterable[torch.Tensor] | None
) -> str:
    """Return why merged adapters would count twice, or not at all; empty without any.

    Args:
        tuners: parts for which `can_merge` holds, by name.
        used: the tensors that are read; None for a module that is written.
    """
    merged = [(path, part) for path, part in tuners if getattr(part, "merged", False) is True]
    if not merged:
        return ""
    read = None if used is None else set(map(id, used))
    for path, part in merged:
        adapters = [
            parameter
            for name, parameter in part.named_parameters()
            if not name.startswith("base_layer.") and name not in ("weight", "bias")
        ]
        if read is None or any(id(adapter) in read for adapter in adapters):
            return (
                f"{path} of the {'target' if read is None else 'source'} has its adapters merged "
                "into its weights; unmerge them (unmerge_adapter() in PEFT)"
                + (", or leave the adapters out" if read is not None else "")
            )
    return ""
