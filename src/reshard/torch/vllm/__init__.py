"""vLLM: layouts of its ranks, traced from its own loader, and links to it.

    layouts           `layouts`: the layouts of all ranks, cached in files; sizes of parallelism
    tracing_process   the process in which all ranks are traced
    plugin            the load format `reshard` in vLLM itself
    reloading         refill a served model from staged tensors
    worker            a worker as an end of a link, by methods of vLLM's workers or by vLLM's own
                      interface for weight transfer: its backend `reshard`

Only the tracing process imports vLLM; see docs/engines.md.
"""

from typing import Any

from reshard.torch.vllm.layouts import VllmParallelism, layouts

__all__ = ["VllmParallelism", "layouts"]


def __getattr__(name: str) -> Any:
    # Its base class is vLLM's, which is imported on first use.
    if name == "ReshardTrainerInit":
        from reshard.torch.vllm import worker

        return worker.make_init_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
