"""The checkpoints that benchmarks read, written by the packages that people write them with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama import llama_shapes
from turns import in_a_process, in_ranks, join_job

TENSOR_MIB = 32
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def llama_dimension(name: str) -> int | None:
    """Which dimension tensor parallelism cuts."""
    if "norm" in name:
        return None
    return 1 if "down_proj" in name or "o_proj" in name else 0


def uniform(shards: int, size_mib: int, seed: int) -> dict[str, Any]:
    """One row shard of each tensor: 32 MiB in all, one half float32, the other bfloat16."""
    import torch

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(size_mib // TENSOR_MIB):
        kind, rows = (torch.float32, 2048) if number % 2 == 0 else (torch.bfloat16, 4096)
        tensors[f"layers.{number:03}.weight"] = _noise((rows // shards, 4096), kind, random)
    return tensors


def _noise(shape: tuple[int, ...], kind: Any, random: Any) -> Any:
    import torch

    bits = torch.randint(0, 2**15, shape, dtype=torch.int16, generator=random)
    wide = bits if kind == torch.bfloat16 else bits.to(torch.int32) * 40503
    return wide.view(kind)


def write_whole(folder: Path, size_mib: int) -> None:
    """One file, as a small model of Hugging Face is."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(uniform(1, size_mib, 1), folder / "model.safetensors", metadata={"format": "pt"})


def write_rows(folder: Path, size_mib: int, shards: int = 4) -> None:
    """Row shards in PyTorch's convention: their data begin anywhere in their pages."""
    from safetensors.torch import save_file

    folder.mkdir()
    for shard in range(shards):
        tensors = uniform(shards, size_mib, shard)
        offsets = {
            name: {"saved_offsets": [shard * tensor.shape[0], 0]}
            for name, tensor in tensors.items()
        }
        convention = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        name = f"shard-{shard + 1:05}-model-00001-of-00001.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt", **convention})


def write_dcp(folder: Path, size_mib: int) -> None:
    """One rank's part of a distributed checkpoint of DTensors in row shards."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank = join_job()
    mesh = init_device_mesh("cpu", (4,))
    tensors = uniform(4, size_mib, rank)
    state = {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in tensors.items()}
    dcp.save(state, checkpoint_id=folder)


def empty_columns(folder: Path, ranks: int) -> dict[str, Any]:
    """This rank's columns of every tensor of a distributed checkpoint, as zeros of DTensors."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for name, tensor in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        high, wide = tensor.size
        part = torch.zeros((high, wide // ranks), dtype=tensor.properties.dtype)
        state[name] = DTensor.from_local(part, mesh, [Shard(1)])
    return state


def write_llama(folder: Path, size_mib: int) -> None:
    """A model of Hugging Face, of real shapes; its size is its own."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    random = torch.Generator().manual_seed(8)
    # Llama-3-8B, with fewer layers.
    shapes = llama_shapes(hidden=4096, inner=14336, key_value=1024, layers=2)
    tensors = {name: _noise(shape, torch.bfloat16, random) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))


def write_llama_parallel(folder: Path, size_mib: int) -> None:
    """The same model cut over four tensor-parallel ranks, by reshard."""
    from reshard.checkpoint import convert

    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        write_llama(Path(beside, "whole"), size_mib)
        convert(Path(beside, "whole"), folder, to="tp=4", recipe="llama")


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "whole": write_whole,
    "rows4": write_rows,
    "dcp-rows4": write_dcp,
    "llama": write_llama,
    "llama-tp4": write_llama_parallel,
}


def write(script: str, kind: str, folder: Path, size_mib: int) -> Path:
    """A checkpoint in `folder`, written by processes of their own; kept if it is there."""
    path = folder / kind
    if not path.exists() and kind.startswith("dcp"):
        in_ranks(script, 4, "write", kind, path, size_mib)
    elif not path.exists():
        in_a_process(script, "write", kind, path, size_mib)
    return path


def size_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
