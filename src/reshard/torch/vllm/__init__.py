"""vLLM: layouts of its ranks, traced from its own loader, and links to it.

    parallelism       sizes of tensor, pipeline, expert and data parallelism
    layouts           `layouts`: the layouts of all ranks, cached in files
    tracing_process   the process in which all ranks are traced
    plugin            the load format `reshard` in vLLM itself
    reloading         refill a served model from staged tensors
    worker            a worker as an end of a link, and methods for vLLM's workers
    weight_transfer   the backend `reshard` of vLLM's own weight transfer

Only the tracing process imports vLLM; see docs/engines.md.
"""

from typing import Any

from reshard.torch.vllm.layouts import layouts
from reshard.torch.vllm.parallelism import VllmParallelism

__all__ = ["VllmParallelism", "layouts"]


def __getattr__(name: str) -> Any:
    # Its base class is vLLM's, which is imported on first use.
    if name == "ReshardTrainerInit":
        from reshard.torch.vllm import weight_transfer

        return weight_transfer.make_init_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
