"""The process that traces vLLM's loader: each rank in turn, and a document of all.

    python -m reshard.torch.vllm.tracing_process REQUEST RESULT

REQUEST is a JSON file: the folder of the model, its tensors, the parallelism and the dtype of
parameters. RESULT receives the document of the layout, or `{"failure": [kind, text]}`.

1. For each rank, vLLM builds its model on the `meta` device. vLLM asks its process groups for the
   rank; here one process is each rank in turn (`loaders.fake_ranks`). No kernel runs, so the
   platform is the CPU on any machine.
2. Its `load_weights` is traced with the checkpoint's names and shapes
   (`reshard.torch.trace_loading`).

vLLM stores the rank in module variables, which are reset after each rank. Such a process cannot run
an engine afterwards, so it is a child process.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError
from reshard.plans.serialization import to_json
from reshard.recipes.engine_layouts import (
    Constant,
    EngineLayout,
    ParameterLayout,
    RankLayout,
    SourceTensor,
)
from reshard.torch.loaders.fake_ranks import fake_rank
from reshard.torch.vllm.layouts import VllmParallelism, engine_version


def trace_ranks(request: dict[str, Any]) -> EngineLayout:
    """Return the layouts of all ranks in a request."""
    from reshard.torch.loaders.tracing import trace_loading

    prepare_process()
    sizes = {axis: request[axis] for axis in ("tp", "pp", "ep", "dp")}
    parallelism = VllmParallelism(**sizes)
    sources = {
        name: SourceTensor(as_dtype(dtype), tuple(shape))
        for name, (dtype, shape) in request["sources"].items()
    }
    folder = Path(request["folder"])
    ranks: list[RankLayout] = []
    for rank in range(parallelism.ranks):
        with rank_model(folder, parallelism, rank, request["dtype"]) as model:
            traced = trace_loading(model.load_weights, sources, model, rank=rank)
            ranks.append(with_initial_values(traced, model.state_dict()))
            del model
        gc.collect()
    notes = (f"parallelism {parallelism.text}",)
    return EngineLayout("vllm", engine_version(), parallelism.mesh, sources, ranks, notes)


def with_initial_values(traced: RankLayout, tensors: Mapping[str, Any]) -> RankLayout:
    """Return a rank's layout with the values of scalars that the loader does not fill."""
    parameters = dict(traced.parameters)
    for name, parameter in traced.parameters.items():
        tensor = tensors.get(name)
        # A scalar on `meta` has an unknown value.
        if tensor is None or tensor.numel() != 1 or tensor.device.type == "meta":
            continue
        if parameter.unfilled:
            (box,) = parameter.unfilled
            constant = Constant(box, float(tensor.item()))
            parameters[name] = ParameterLayout.of(
                name, parameter.shape, parameter.dtype, constants=[constant]
            )
    return dataclasses.replace(traced, parameters=parameters)


def prepare_process() -> None:
    """Set vLLM's environment variables for tracing, before it is imported."""
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
    """Yield the model that vLLM builds on a rank.

    Args:
        folder: the folder with `config.json`.
        parallelism: of all ranks.
        rank: the number of this rank.
        dtype: of the parameters; `"auto"` chooses it by the configuration.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with fake_rank(rank, parallelism.ranks), _pretend_host():
        config = make_config(folder, parallelism, dtype)
        with set_current_vllm_config(config):
            init_distributed_environment(parallelism.ranks, rank, "env://", rank, "fake")
            initialize_model_parallel(parallelism.tp, parallelism.pp)
            with set_default_torch_dtype(config.model_config.dtype):
                try:
                    with torch.device("meta"), _GivenValues():
                        model = initialize_model(vllm_config=config)
                except NotImplementedError:
                    # A model that computes with tensors in its constructor, such as Bloom's slopes.
                    _forget_layers(config)
                    with torch.device("cpu"):
                        model = initialize_model(vllm_config=config)
            yield model


class _GivenValues(TorchFunctionMode):  # type: ignore[misc]
    """Keep the values of literal scalars, such as scales of 1.0 that no checkpoint contains."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and isinstance(args[0], int | float):
            kwargs = {"device": "cpu", **kwargs}
        return function(*args, **kwargs)


def _forget_layers(config: Any) -> None:
    """Unregister attention layers, so that a second model can register the same names."""
    config.compilation_config.static_forward_context.clear()


@contextmanager
def _pretend_host() -> Iterator[None]:
    """Replace what the ranks of a host share, and destroy vLLM's groups on exit."""
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
    """A replacement for the shared memory of a host's ranks."""

    def __init__(self, communicator: object) -> None:
        pass

    @staticmethod
    def make_group_name(communicator: object) -> str:
        """Return the name of a group, on which all its ranks would agree."""
        return "reshard"


def make_config(folder: Path, parallelism: VllmParallelism, dtype: str) -> Any:
    """Return vLLM's configuration of a model and parallelism for this process's rank."""
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            # Nothing is computed, so a short cache suffices.
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


def main() -> None:
    """Trace the request, and write the document."""
    request, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        text = to_json(trace_ranks(json.loads(request.read_text())))
    except ReshardError as error:
        text = json.dumps({"failure": [type(error).__name__, str(error)]})
    except Exception as error:
        # The condition of an assertion without a message is in the source line.
        last = traceback.extract_tb(error.__traceback__)[-1].line
        reason = " ".join((str(error) or last or "").split())[:600]
        text = json.dumps({"failure": ["EngineError", f"{type(error).__name__}: {reason}"]})
        traceback.print_exc()
    result.write_text(text)


if __name__ == "__main__":
    main()
