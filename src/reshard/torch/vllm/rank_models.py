"""vLLM's model of one rank, without memory, and without the processes of the others.

vLLM builds a model for the rank that its process groups say it is. Here one process is each rank in
turn (`loaders.pretended_ranks`), and its tensors are on the `meta` device. No kernel runs, so the
platform is the CPU whatever the machine has.

vLLM keeps the rank in variables of its modules, which are set back behind each one. A process that
has been such a rank is no place for an engine: it is a child of the one that asks
(`tracing_process`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from reshard.torch.loaders.pretended_ranks import pretend_rank
from reshard.torch.vllm.parallelism import VllmParallelism


def prepare_process() -> None:
    """Say to vLLM, before it is imported, what this process is for."""
    os.environ.update(
        VLLM_TARGET_DEVICE="cpu",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        VLLM_DIST_IDENT="reshard",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_PLUGINS="",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )


@contextmanager
def rank_model(
    folder: Path, parallelism: VllmParallelism, rank: int, dtype: str = "auto"
) -> Iterator[Any]:
    """The model that vLLM builds on one rank.

    Args:
        folder: with `config.json`.
        parallelism: of all ranks.
        rank: which one this is.
        dtype: of the parameters, `"auto"` for what vLLM chooses by the configuration.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with pretend_rank(rank, parallelism.ranks), _pretend_host():
        config = make_config(folder, parallelism, dtype)
        with set_current_vllm_config(config):
            init_distributed_environment(parallelism.ranks, rank, "env://", rank, "fake")
            initialize_model_parallel(parallelism.tp, parallelism.pp)
            with set_default_torch_dtype(config.model_config.dtype):
                try:
                    with torch.device("meta"), _GivenValues():
                        model = initialize_model(vllm_config=config)
                except NotImplementedError:
                    # A model that computes with tensors while it is built, such as Bloom's slopes.
                    _forget_layers(config)
                    with torch.device("cpu"):
                        model = initialize_model(vllm_config=config)
            yield model


class _GivenValues(TorchFunctionMode):  # type: ignore[misc]
    """Numbers that the program itself gives stay: scales of 1.0 that no checkpoint may have."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and isinstance(args[0], int | float):
            kwargs = {"device": "cpu", **kwargs}
        return function(*args, **kwargs)


def _forget_layers(config: Any) -> None:
    """Attention layers register themselves by name, which a second model has again."""
    config.compilation_config.static_forward_context.clear()


@contextmanager
def _pretend_host() -> Iterator[None]:
    """What ranks of one host share, with nobody to share it; vLLM's groups go behind it."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

    def are_on_one_host(group: Any, source_rank: int = 0) -> list[bool]:
        return [True] * int(group.size())

    changes = [
        (parallel_state, "in_the_same_node_as", are_on_one_host),
        (cpu_communicator, "_CPUSHMDistributed", _NoSharedMemory),
        (shm_broadcast.MessageQueue, "create_from_process_group", lambda *_, **__: None),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    for owner, name, replacement in changes:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None
        for owner, name, original in before:
            setattr(owner, name, original)


class _NoSharedMemory:
    """In the place of what ranks of one host send through shared memory."""

    def __init__(self, communicator: object) -> None:
        pass

    @staticmethod
    def make_group_name(communicator: object) -> str:
        """The name of a group that all its ranks would have to agree on."""
        return "reshard"


def make_config(folder: Path, parallelism: VllmParallelism, dtype: str) -> Any:
    """vLLM's configuration of a model in a parallelism, on the rank that this process is."""
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            # Nothing is computed: no cache has to be as long as the model allows.
            max_model_len=64,
            enforce_eager=True,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=parallelism.tp,
            pipeline_parallel_size=parallelism.pp,
            data_parallel_size=parallelism.dp,
            enable_expert_parallel=parallelism.ep > 1,
            distributed_executor_backend="external_launcher",
        ),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(load_format="dummy"),
    )
