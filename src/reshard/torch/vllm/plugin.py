"""vLLM's plug-in: the load format `reshard`, by which each rank reads only its own bytes.

    vllm serve FOLDER --load-format reshard
    vllm serve FOLDER --load-format reshard --model-loader-extra-config '{"checkpoint": "s3://b/m"}'

FOLDER is a checkpoint of any format and sharding that `reshard.checkpoint.open` opens, with the
`config.json` of the model; or the weights are at another path or address. On every rank:

1. vLLM builds its model as usual. Its `load_weights` is traced with the checkpoint's names and
   shapes, on this model. Nothing is read for that, and nothing is stored.
2. Copied elements are read from the files into the parameters. From an address, data that several
   ranks of a host need is requested once.
3. Computed parameters, and those that the tracer cannot follow, are loaded by `load_weights`
   itself, from those tensors alone.

vLLM finds the plug-in by the entry point `vllm.general_plugins`, and processes weights afterwards
as usual.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.loading.arrays import load_layouts
from reshard.checkpoint.options import LoadOptions
from reshard.checkpoint.storage.remote_paths import RemotePath
from reshard.dtypes import dtype as as_dtype
from reshard.execution.arrays import TorchTensors
from reshard.layout import Layout
from reshard.recipes.engine_layouts import ParameterLayout
from reshard.system import name_host
from reshard.torch.exchange.agreement import gather

LOAD_FORMAT = "reshard"
# Memory in addition to the model, for parameters that are not read in place: on a GPU, or cast.
STAGED_BYTES = 256 << 20
# The report of the last load in this process.
last_report: RankReport | None = None


def register() -> None:
    """Register the load format and the weight transfer with vLLM; may be called again."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from reshard.torch.vllm.worker import register_backend

    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(_make_loader_class())
    register_backend()


def _make_loader_class() -> Any:
    """Return the class of the loader, whose base is vLLM's."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class ReshardModelLoader(BaseModelLoader):  # type: ignore[misc]
        """Load any checkpoint that reshard opens, each rank only its own bytes."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            extra = dict(load_config.model_loader_extra_config or {})
            self.threads = extra.pop("threads", None)
            self.checkpoint = extra.pop("checkpoint", None)
            if extra:
                raise ValueError(
                    f"model_loader_extra_config has {sorted(extra)}; the load format "
                    f"{LOAD_FORMAT!r} knows checkpoint and threads"
                )

        def download_model(self, model_config: Any) -> None:
            """Do nothing: data is read from where it is stored."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill the model of this rank."""
            from vllm.distributed.parallel_state import get_world_group

            place = self.checkpoint or model_config.model_weights or model_config.model
            group = get_world_group().cpu_group
            global last_report
            last_report = load_rank(model, place, threads=self.threads, group=group)

    return ReshardModelLoader


@dataclass(frozen=True, slots=True)
class RankReport:
    """The result of loading a rank.

    `read_bytes` were read from files; `needed_bytes` are those of the elements of the rank that
    are in files, each source element once; `by_loader` names the sources that `load_weights` loaded
    itself.
    """

    parameters: int
    needed_bytes: int
    read_bytes: int
    by_loader: tuple[str, ...]
    seconds_s: float


def load_rank(
    model: torch.nn.Module,
    place: str | os.PathLike[str],
    *,
    threads: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> RankReport:
    """Fill a rank's model from a checkpoint with the elements that its `load_weights` copies.

    Args:
        model: a model with `load_weights`, such as vLLM's.
        place: the path or address of a checkpoint.
        threads: the number of reader threads; by default 4, and 16 from an address.
        group: the CPU group of the ranks that load at the same time. From an address, ranks of a
            host request shared data once.

    Raises:
        CheckpointError: a checkpoint that cannot be used.
        RunError: the loader refuses its tensors.
    """
    from reshard.checkpoint.engines.rank_parameters import RankParameters
    from reshard.checkpoint.formats.opening import open_checkpoint
    from reshard.torch.loaders.tracing import trace_loading

    begun = time.perf_counter()
    checkpoint = open_checkpoint(place)
    sources = {
        name: (tensor.dtype.name, tensor.shape) for name, tensor in checkpoint.tensors.items()
    }
    load_weights: Any = model.load_weights
    traced = trace_loading(load_weights, sources, model, values=False)
    # 1. Copied elements are read in place; the loader computes the others from their sources.
    tied = {name for group in traced.tied for name in sorted(group)[1:]}
    to_read, by_loader = RankParameters(checkpoint), dict[str, None]()
    for name, parameter in traced.parameters.items():
        if name in tied or not parameter.sources:
            continue
        copied = _find_copied(parameter, checkpoint)
        if copied is None:
            by_loader.update(dict.fromkeys(parameter.sources))
        else:
            to_read.add_parameter(copied)
    tensors = model.state_dict(keep_vars=True)
    read_bytes = _read_parameters(to_read.bound, tensors, threads, group)
    # 2. The loader runs last. It writes only parameters that were not read.
    if by_loader:
        load_weights((name, _read_whole(checkpoint, name)) for name in by_loader)
    whole_bytes = sum(checkpoint[name].size_bytes for name in by_loader)
    copied_bytes = sum(tensor.size_bytes for tensor in to_read.tensors.values())
    # Constants, such as the padding of a vocabulary, are not in files.
    constant_bytes = sum(file.size_bytes for file in to_read.made.values())
    return RankReport(
        len(traced.parameters),
        copied_bytes - constant_bytes + whole_bytes,
        read_bytes + whole_bytes,
        tuple(by_loader),
        time.perf_counter() - begun,
    )


def _find_copied(parameter: ParameterLayout, checkpoint: Checkpoint) -> ParameterLayout | None:
    """Return a parameter in the dtype of its sources, or None if part of it is not copied."""
    if parameter.computed or parameter.unfilled:
        return None
    types = {checkpoint[piece.source].dtype for piece in parameter.pieces}
    if len(types) != 1 or (parameter.constants and types != {parameter.dtype}):
        return None
    pieces = [piece._replace(steps=()) for piece in parameter.pieces]
    steps = [step for piece in parameter.pieces for step in piece.steps]
    if any(not step.startswith("to ") for step in steps):
        return None
    return ParameterLayout.of(
        parameter.name, parameter.shape, types.pop(), pieces, (), parameter.constants
    )


def _read_parameters(
    bound: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    threads: int | None,
    group: dist.ProcessGroup | None,
) -> int:
    """Read the tensors of a checkpoint into parameters; return the number of bytes read."""
    in_place, sizes_bytes = {}, {}
    for name, stored in bound.tensors.items():
        tensor = tensors[name].detach()
        is_same = as_dtype(tensor.dtype) is stored.dtype and tensor.is_contiguous()
        if is_same and tensor.device.type == "cpu" and stored.size_bytes:
            in_place[name] = TorchTensors(tensor).storage(tensor, name)
        elif stored.size_bytes:
            sizes_bytes[name] = stored.size_bytes
    own_names = frozenset(sizes_bytes)
    readers = 1
    if group is not None and isinstance(bound.folder, RemotePath):
        readers, sizes_bytes = _agree_with_host(sizes_bytes, group)
    asked_bytes: list[int] = []

    def read(out: dict[str, Any]) -> None:
        layouts = {name: Layout.whole(bound[name].shape, [0], 1) for name in out}
        options = LoadOptions(
            out=out, threads=threads, readers_on_host=readers, count_read=asked_bytes.append
        )
        load_layouts(bound, layouts, 0, options)

    read(in_place)
    for batch in _make_batches(sizes_bytes):
        # A rank that needs nothing of a batch takes part in it, because its host's ranks share
        # reads.
        entries = [bound[name] for name in batch if name in own_names]
        staged = {
            tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.name))
            for tensor in entries
        }
        read({name: TorchTensors(tensor).storage(tensor, name) for name, tensor in staged.items()})
        for name, tensor in staged.items():
            tensors[name].detach().copy_(tensor)
    return sum(asked_bytes)


def _make_batches(sizes_bytes: Mapping[str, int]) -> list[list[str]]:
    """Return names in batches of at most `STAGED_BYTES`, or of a single larger tensor."""
    batches: list[list[str]] = []
    room = 0
    for name, size_bytes in sizes_bytes.items():
        if size_bytes > room:
            batches.append([])
            room = STAGED_BYTES
        batches[-1].append(name)
        room -= size_bytes
    return batches


def _agree_with_host(
    sizes_bytes: Mapping[str, int], group: dist.ProcessGroup
) -> tuple[int, dict[str, int]]:
    """Return the number of ranks on this host, and the largest size of each name on any of them.

    Ranks that share reads read the same names at the same time.
    """
    host = list(name_host())
    message = json.dumps([host, sizes_bytes])
    answers = map(json.loads, gather(message.encode(), group).values())
    sizes_here = [sizes for its_host, sizes in answers if its_host == host]
    names = dict.fromkeys(name for sizes in sizes_here for name in sizes)
    return len(sizes_here), {
        name: max(sizes.get(name, 0) for sizes in sizes_here) for name in names
    }


def _read_whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    stored = checkpoint[name]
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype.name))
    if tensor.numel():
        out = {name: TorchTensors(tensor).storage(tensor, name)}
        layouts = {name: Layout.whole(stored.shape, [0], 1)}
        load_layouts(checkpoint, layouts, 0, LoadOptions(out=out))
    return tensor
