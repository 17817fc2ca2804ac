"""vLLM: which element of a checkpoint each of its ranks holds, by its own loader; and links to it.

    parallelism       sizes of tensor, pipeline, expert and data parallelism
    rank_models       vLLM's model of a rank, without memory
    tracing_process   the process in which all ranks are traced
    layout_cache      layouts that are kept in files
    layouts           `layouts`: the layouts of all ranks
    plugin            the load format `reshard` in vLLM itself
    staging           what a rank takes of a trainer's tensors, and its parameters made of it
    reloading         a model that serves, filled again
    linked_rank       a rank as an end of a link
    worker            methods that vLLM's workers learn
    weight_transfer   the backend `reshard` of vLLM's own weight transfer

vLLM is imported in the process that traces only; see docs/engines.md.
"""

from typing import Any

from reshard.torch.vllm.layouts import layouts
from reshard.torch.vllm.parallelism import VllmParallelism

__all__ = ["VllmParallelism", "layouts"]


def __getattr__(name: str) -> Any:
    # Its base is vLLM's, which is imported when it is asked for.
    if name == "ReshardTrainerInit":
        from reshard.torch.vllm import weight_transfer

        return weight_transfer.make_init_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
