"""Small checkpoints of every format, and conversions into every format: what campaigns go through.

1. `SOURCES` has a row for every way in which a checkpoint is stored: its name, the format that it
   is read as, and what makes one. Nothing else has a list of formats; `test_small_checkpoints.py`
   fails for a format that no row has.
2. `CONVERSIONS` has one for every format that is written and for what else a conversion does:
   selections, names, training state, adapters, deltas, model folders.

Files that other programs write are their own, recorded, where `tests/golden` has them.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.tensor import Shard

import deepspeed_records
from checkpoint import torch_checkpoints
from checkpoint.checkpoint_files import Tensor, tensor, write_file
from checkpoint.formats.megatron import recordings
from checkpoint.formats.orbax import orbax_states
from checkpoint.formats.torch_dcp.test_reader import as_torch
from checkpoint.model_files import write_llama
from reshard.checkpoint import Checkpoint, convert, diff, open_checkpoint

PEFT = Path(__file__).parents[2] / "golden" / "engines" / "peft.tar.xz"
WHOLES = {
    "w": tensor("float32", (5, 4), 1),
    "b": tensor("bfloat16", (3,), 2),
    "s": tensor("int64", (), 3),
    "e": tensor("float16", (0, 2), 4),
}
#: Other elements for two of them.
CHANGED = {
    "w": Tensor(WHOLES["w"].dtype, WHOLES["w"].bits ^ np.eye(5, 4, dtype=np.uint32)),
    "s": tensor("int64", (), 9),
}
RULES = ["w=tp, -", "b=tp", "*=..."]
CUT = {"to": "tp=2", "rules": RULES}
HALVES = {"to": "tp=2", "rules": ["*w=tp, -", "*=..."]}


@dataclass(frozen=True)
class Source:
    """A kind of checkpoint: `make` writes one below an empty folder and returns its path.

    `opening` are the arguments of `open_checkpoint` that it needs.
    """

    name: str
    format: str
    make: Callable[[Path], Path]
    opening: Mapping[str, Any] = field(default_factory=dict)

    def open(self, path: Path) -> Checkpoint:
        """Read it."""
        return open_checkpoint(path, **self.opening)


def make_file(folder: Path) -> Path:
    """One file of whole tensors."""
    write_file(folder / "model.safetensors", WHOLES, {"format": "pt"})
    return folder


def make_converted(folder: Path, *, with_manifest: bool = False, **options: Any) -> Path:
    """The same, converted."""
    (folder / "whole").mkdir()
    convert(make_file(folder / "whole"), folder / "made", **options)
    shutil.rmtree(folder / "whole")
    if not with_manifest:
        (folder / "made" / "reshard.manifest.json").unlink()
    return folder / "made"


def state_of_rank(rank: int) -> dict[str, object]:
    """What one of two ranks saves of it, with a value."""
    mesh = torch_checkpoints.mesh_of(2)
    cut = torch_checkpoints.cut(as_torch(WHOLES["w"]), mesh, [Shard(0)])
    return {"w": cut, "b": as_torch(WHOLES["b"]), "step": 3}


def make_by_torch(folder: Path, **arguments: Any) -> Path:
    torch_checkpoints.save(folder, 2, state_of_rank, **arguments)
    return folder


def make_by_ranks_apart(folder: Path) -> Path:
    for rank in range(2):
        with torch_checkpoints.standing_for(rank, 2):
            writer = dcp.FileSystemWriter(folder)
            dcp.save(state_of_rank(rank), storage_writer=writer, use_collectives=False)
    return folder


def make_nested(folder: Path, **options: Any) -> Path:
    """A nested state in one file of `torch.save`."""
    nested = {"model": {"w": as_torch(WHOLES["w"])}, "step": 3, "b": as_torch(WHOLES["b"])}
    torch.save(nested, folder / "model.pt", **options)
    return folder


def make_rank_files(folder: Path, name: str, state: Callable[[int], Any]) -> Path:
    """A file of `torch.save` for each of two ranks."""
    for rank in range(2):
        with torch_checkpoints.standing_for(rank, 2):
            torch.save(state(rank), folder / name.format(rank))
    return folder


def sharded_state(rank: int) -> dict[str, object]:
    """What FSDP1 saves: a `ShardedTensor` of the rows of each rank."""
    whole = as_torch(WHOLES["w"])
    places = [
        ShardMetadata([start, 0], [rows, 4], f"rank:{number}/cpu")
        for number, (start, rows) in enumerate([(0, 3), (3, 2)])
    ]
    place = places[rank]
    start, rows = place.shard_offsets[0], place.shard_sizes[0]
    kind = TensorProperties(dtype=whole.dtype)
    made = ShardedTensor._init_from_local_shards_and_global_metadata(
        [ShardOfTensor(whole[start : start + rows].clone(), place)],
        ShardedTensorMetadata(places, whole.size(), kind),
        process_group=dist.group.WORLD,
    )
    return {"w": made, "b": as_torch(WHOLES["b"])}


def plain_state(rank: int) -> dict[str, object]:
    """Plain parts, of which no file says what they are."""
    return {"w": as_torch(WHOLES["w"])[2 * rank : 2 * rank + 2].clone(), "b": torch.ones(3)}


def make_from_deepspeed(folder: Path, name: str) -> Path:
    return next(path for path in deepspeed_records.unpack(name, folder).iterdir() if path.is_dir())


def make_from_megatron(folder: Path, name: str, how: str) -> Path:
    return recordings.unpack(name, folder) / how


def make_megatron_fsdp(folder: Path) -> Path:
    from checkpoint.formats.megatron.test_fsdp_dtensor import save

    step = folder / "iter_0000007"
    save(step)
    return step


def make_from_orbax(folder: Path, name: str) -> Path:
    return orbax_states.extract(folder) / name


def make_vllm(folder: Path) -> Path:
    for rank in range(2):
        own = {"w": WHOLES["w"], "b": tensor("bfloat16", (3 + rank,), rank)}
        write_file(folder / f"model-rank-{rank}-part-0.safetensors", own, {"format": "pt"})
    return folder


def make_from_peft(folder: Path, part: str = "") -> Path:
    """A base with its adapter in a folder beside it, as PEFT saved them; or one of them."""
    with tarfile.open(PEFT) as archive:
        members = [one for one in archive.getmembers() if one.name.startswith("plain/")]
        archive.extractall(folder, members, filter="data")
    return folder / "plain" / part


SOURCES: tuple[Source, ...] = (
    Source("one file", "safetensors", make_file),
    Source("several files", "safetensors", partial(make_converted, to="full", most_file_bytes=60)),
    Source("adapter", "safetensors", partial(make_from_peft, part="adapter")),
    Source("shards", "sharded-safetensors", partial(make_converted, **CUT)),
    Source("manifest", "sharded-safetensors", partial(make_converted, with_manifest=True, **CUT)),
    Source("vLLM", "vllm-sharded-state", make_vllm),
    Source("torch-dcp", "torch-dcp", partial(make_converted, format="torch-dcp", **CUT)),
    Source("PyTorch", "torch-dcp", make_by_torch),
    Source("compressed", "torch-dcp", partial(make_by_torch, _extensions=[ZStandard()])),
    Source("ranks apart", "torch-dcp", make_by_ranks_apart),
    Source("torch.save", "torch-pickle", make_nested),
    Source(
        "torch.save before 1.6",
        "torch-pickle",
        partial(make_nested, _use_new_zipfile_serialization=False),
    ),
    Source(
        "torch.save with an index",
        "torch-pickle",
        partial(make_converted, to="full", format="torch-pickle", most_file_bytes=60),
    ),
    Source("FSDP2", "rank-files", partial(make_rank_files, name="rank{}.pt", state=state_of_rank)),
    Source(
        "FSDP1",
        "rank-files",
        partial(make_rank_files, name="pytorch_model_fsdp_rank{}.bin", state=sharded_state),
    ),
    Source(
        "plain ranks",
        "rank-files",
        partial(make_rank_files, name="mp_rank_0{}.pt", state=plain_state),
        {"mesh": "tp=2", "rules": ["w=tp, -", "*=..."]},
    ),
    *(
        Source(name, form, partial(make_from_deepspeed, name=record))
        for name, form, record in [
            ("ZeRO 1", "deepspeed-zero1", "zero1-bf16-2-plain"),
            ("ZeRO 2", "deepspeed-zero1", "zero2-bf16-2-plain-parameter"),
            ("ZeRO experts", "deepspeed-zero1", "zero2-fp32-2-experts-over2"),
            ("ZeRO pipeline", "deepspeed-zero1", "zero1-fp32-2-pipelinetied-over2"),
            ("ZeRO 3", "deepspeed-zero3", "zero3-bf16-2-plain"),
            ("DeepSpeed universal", "deepspeed-universal", "zero1-bf16-2-plain-universal"),
        ]
    ),
    *(
        Source(name, form, partial(make_from_megatron, name=record, how=how))
        for name, form, record, how in [
            ("Megatron", "torch-dist", "undistributed", "fully_reshardable"),
            ("Megatron distributed", "torch-dist", "tensor", "fully_reshardable"),
            ("Megatron by buckets", "torch-dist", "tensor", "dp_reshardable"),
            ("Megatron gathered", "torch-dist", "experts", "dp_zero_gather_scatter"),
            ("Megatron ranks", "megatron-legacy", "virtual", "legacy"),
            ("Megatron ranks by buckets", "megatron-legacy", "buckets", "legacy"),
        ]
    ),
    Source("Megatron FSDP", "megatron-fsdp", make_megatron_fsdp),
    *(
        Source(f"Orbax {name}", "orbax", partial(make_from_orbax, name=name))
        for name in ("ocdbt", "zarr", "zarr3", "ocdbt-zarr3", "chunked")
    ),
)


@dataclass(frozen=True)
class SmallConversion:
    """A kind of conversion, to checkpoints of `format`.

    `make` writes what it is made of below an empty folder, and returns the source and the
    arguments of `plan_any`, which JSON can say.
    """

    name: str
    format: str
    make: Callable[[Path], tuple[Path, dict[str, Any]]]


def convert_source(name: str, format: str, **options: Any) -> SmallConversion:
    """A conversion of a kind of source to a format."""
    (source,) = (one for one in SOURCES if one.name == name)

    def make(folder: Path) -> tuple[Path, dict[str, Any]]:
        return source.make(folder), {"format": format, "opening": dict(source.opening), **options}

    called = ", ".join([f"{name} to {format}", *(one for one in options if one not in CUT)])
    return SmallConversion(called, format, make)


def make_with_adapter(folder: Path) -> tuple[Path, dict[str, Any]]:
    made = make_from_peft(folder)
    return made / "base", {"to": "full", "adapters": [str(made / "adapter")]}


def make_with_delta(folder: Path) -> tuple[Path, dict[str, Any]]:
    base = make_converted(folder, with_manifest=True, **CUT)
    after = folder / "after"
    after.mkdir()
    write_file(after / "model.safetensors", {**WHOLES, **CHANGED}, {"format": "pt"})
    diff(base, after, folder / "delta")
    return base, {"to": "full", "deltas": [str(folder / "delta")]}


def make_for_pretrained(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A small model in shards, its names with a prefix and a config beside it."""
    whole = write_llama(folder / "whole")
    options = {"to": "tp=2", "rules": ["*norm*=...", "*=tp, -"], "rename": ["*=module.*"]}
    convert(whole, folder / "cut", format="torch-dcp", **options)
    return folder / "cut", {"is_pretrained": True, "config": str(whole)}


CONVERSIONS: tuple[SmallConversion, ...] = (
    convert_source("shards", "safetensors", to="full"),
    convert_source("PyTorch", "safetensors", to="full", most_file_bytes=60),
    convert_source("plain ranks", "safetensors", to="full"),
    convert_source("Megatron by buckets", "safetensors", to="full"),
    convert_source("one file", "sharded-safetensors", **CUT),
    convert_source("vLLM", "vllm-sharded-state", to="full"),
    convert_source("torch.save", "torch-dcp", **HALVES),
    convert_source("FSDP2", "torch-pickle", to="full"),
    convert_source("one file", "torch-pickle", to="full", most_file_bytes=60),
    convert_source("ZeRO 3", "rank-files", to="fsdp=2", rules=["*=fsdp, ..."]),
    convert_source("Megatron", "deepspeed-zero1", to=2),
    convert_source("ZeRO 1", "deepspeed-zero3", to=3),
    convert_source("ZeRO 3", "deepspeed-universal", to="full"),
    convert_source("Megatron ranks", "torch-dist", to="dp=2"),
    convert_source("Megatron", "megatron-legacy", to="tp=2"),
    convert_source("torch.save before 1.6", "orbax", **HALVES),
    convert_source("PyTorch", "torch-dcp", to="full", dtype="bf16"),
    convert_source(
        "ZeRO 1",
        "torch-dcp",
        to="full",
        include=["*embed*", "*.exp_avg"],
        rename=["embed.*=words.*"],
    ),
    convert_source("ZeRO 2", "torch-dcp", to="full", training="fsdp2"),
    SmallConversion("with an adapter", "safetensors", make_with_adapter),
    SmallConversion("with a delta", "safetensors", make_with_delta),
    SmallConversion("for transformers", "safetensors", make_for_pretrained),
)
