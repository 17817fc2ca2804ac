"""What conversions of large tensors take, in every format: `python memory_process.py FOLDER`.

1. `WRITTEN` has a row for every format that is written: the conversion to it is measured, then that
   from what it wrote. `READ` has one for every other way in which a format stores tensors.
2. Each is converted twice. The first time its tensors are small: what is imported, made once and
   kept belongs to no tensor. The second time they are 48 MiB, and what it takes is measured.
3. The measure is the kernel's high-water mark of resident memory over what is resident before, as
   in `tests/checkpoint/test_memory.py`. The allocator must give all back that is freed
   (`ENVIRONMENT`), since what it kept would be taken for none. Sources are made by forks.

Prints a line of JSON for each conversion.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.tensor import Shard

from checkpoint import torch_checkpoints
from checkpoint.any_conversion import plan_any
from checkpoint.checkpoint_files import write_holes
from reshard.checkpoint import convert, diff, run_conversion

MIB = 1 << 20
#: The least in which blocks of 4 MiB are moved, and in which their elements are changed.
LIMIT_BYTES, CHANGING_LIMIT_BYTES = 10 * MIB, 30 * MIB
#: Of the larger tensors.
TENSOR_BYTES = 48 * MIB
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
COLUMNS = 1024
SMALL_ROWS, LARGE_ROWS = 64, TENSOR_BYTES // COLUMNS // 4

FC1, FC2 = (f"decoder.layers.0.mlp.linear_{one}.weight" for one in ("fc1", "fc2"))
ROWS_OF_TWO = {"to": "tp=2", "rules": ["*=tp, -"]}


def zeros(rows: int) -> torch.Tensor:
    return torch.zeros(rows, COLUMNS)


def two_weights(folder: Path, rows: int) -> Path:
    return write_holes(folder, {"w": (rows, COLUMNS), "v": (rows, COLUMNS)})


def two_of_vllm(folder: Path, rows: int) -> Path:
    for rank in range(2):
        write_holes(folder, {"w": (rows, COLUMNS)}, f"model-rank-{rank}-part-0.safetensors")
    return folder


def trained(folder: Path, rows: int, name: str = "w") -> Path:
    """A weight with the state that Adam keeps of it."""
    keys = ("master", "exp_avg", "exp_avg_sq")
    names = [name, *(f"optimizer.state.{name}.{key}" for key in keys)]
    return write_holes(folder, dict.fromkeys(names, (rows, COLUMNS)))


def trained_by_megatron(folder: Path, rows: int) -> Path:
    return trained(folder, rows, FC1)


@dataclass(frozen=True)
class LargeSource:
    """A kind of checkpoint: `make(folder, rows)` writes one, and returns its path.

    Attributes:
        name: of the row.
        format: of what is read, or of what is written.
        make: what writes it, or what is converted to it.
        how: arguments of `plan_any`.
        limit_bytes: of the memory that a conversion may take.
    """

    name: str
    format: str
    make: Callable[[Path, int], Path]
    how: Mapping[str, Any] = field(default_factory=dict)
    limit_bytes: int = LIMIT_BYTES


WRITTEN = (
    LargeSource("whole", "safetensors", two_weights, {"to": "full"}),
    LargeSource("shards", "sharded-safetensors", two_weights, ROWS_OF_TWO),
    LargeSource("vLLM", "vllm-sharded-state", two_of_vllm, {"to": "full"}),
    LargeSource("DCP", "torch-dcp", two_weights, ROWS_OF_TWO),
    LargeSource("torch.save", "torch-pickle", two_weights, {"to": "full"}),
    LargeSource("ranks", "rank-files", two_weights, ROWS_OF_TWO),
    LargeSource("Orbax", "orbax", two_weights, ROWS_OF_TWO),
    LargeSource("ZeRO 1", "deepspeed-zero1", trained, {"to": 2}),
    LargeSource("ZeRO 3", "deepspeed-zero3", trained, {"to": 2}),
    LargeSource("universal", "deepspeed-universal", trained, {"to": "full"}),
    LargeSource("Megatron", "torch-dist", trained_by_megatron, {"to": "dp=2"}),
    LargeSource("Megatron ranks", "megatron-legacy", trained_by_megatron, {"to": "tp=2"}),
)


def saved_before_archives(folder: Path, rows: int) -> Path:
    state = {"model": {"w": zeros(rows)}, "step": 3}
    torch.save(state, folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder


def saved_compressed(folder: Path, rows: int) -> Path:
    def state_of_rank(rank: int) -> dict[str, object]:
        mesh = torch_checkpoints.mesh_of(2)
        return {"w": torch_checkpoints.cut(zeros(2 * rows), mesh, [Shard(0)])}

    torch_checkpoints.save(folder, 2, state_of_rank, _extensions=[ZStandard()])
    return folder


def saved_by_ranks(folder: Path, rows: int) -> Path:
    """Files of FSDP1, whose `ShardedTensor` has a rank's rows."""
    places = [
        ShardMetadata([rank * rows, 0], [rows, COLUMNS], f"rank:{rank}/cpu") for rank in (0, 1)
    ]
    for rank, place in enumerate(places):
        with torch_checkpoints.standing_for(rank, 2):
            made = ShardedTensor._init_from_local_shards_and_global_metadata(
                [ShardOfTensor(zeros(rows), place)],
                ShardedTensorMetadata(
                    places, torch.Size([2 * rows, COLUMNS]), TensorProperties(torch.float32)
                ),
            )
            torch.save({"w": made}, folder / f"pytorch_model_fsdp_rank{rank}.bin")
    return folder


def saved_plain_parts(folder: Path, rows: int) -> Path:
    for rank in range(2):
        torch.save({"w": zeros(rows)}, folder / f"mp_rank_0{rank}.pt")
    return folder


def saved_by_megatron_fsdp(folder: Path, rows: int) -> Path:
    from checkpoint.formats.megatron.test_fsdp_dtensor import save

    save(folder / "iter_0000007", (rows, COLUMNS))
    return folder / "iter_0000007"


def saved_by_tensorstore(folder: Path, rows: int, form: str) -> Path:
    """What Orbax writes: each shard one chunk, compressed, with a checksum in Zarr 3."""
    import tensorstore

    two_weights(folder / "whole", rows)
    convert(folder / "whole", folder / "made", to="full", format="orbax")
    shutil.rmtree(folder / "whole")
    made = folder / "made"
    for path in made.iterdir():
        if path.name.startswith(("ocdbt", "manifest", "reshard")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    tree = json.loads((made / "_METADATA").read_text())
    tree |= {"use_zarr3": form == "zarr3", "use_ocdbt": False}
    (made / "_METADATA").write_text(json.dumps(tree))
    packing = {"compressor": {"id": "zstd", "level": 1}, "chunks": [rows, COLUMNS]}
    if form == "zarr3":
        chunk = {"name": "regular", "configuration": {"chunk_shape": [rows, COLUMNS]}}
        codecs = [{"name": "bytes"}, {"name": "crc32c"}]
        packing = {"codecs": codecs, "chunk_grid": chunk}
    for name in ("w", "v"):
        opened = tensorstore.open(
            {
                "driver": form,
                "kvstore": {"driver": "file", "path": f"{made / name}/"},
                "metadata": packing,
            },
            create=True,
            dtype="float32",
            shape=[rows, COLUMNS],
        ).result()
        # A chunk of zeros would not be stored.
        opened.write(np.ones((rows, COLUMNS), np.float32)).result()
    return made


def with_adapter(folder: Path, rows: int) -> Path:
    name = "model.layers.0.self_attn.q_proj"
    write_holes(folder / "base", {f"{name}.weight": (rows, COLUMNS)})
    low = {f"base_model.model.{name}.lora_A.weight": (4, COLUMNS)}
    low |= {f"base_model.model.{name}.lora_B.weight": (rows, 4)}
    write_holes(folder / "adapter", low, "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder / "base"


def with_delta(folder: Path, rows: int) -> Path:
    two_weights(folder / "base", rows)
    write_holes(folder / "after", {"w": (rows, COLUMNS), "v": (rows, COLUMNS)})
    with (folder / "after" / "model.safetensors").open("r+b") as file:
        file.seek(-rows * COLUMNS * 4, os.SEEK_END)
        file.write(b"\1" * (rows * COLUMNS * 4))
    diff(folder / "base", folder / "after", folder / "delta")
    return folder / "base"


READ = (
    LargeSource("torch.save before 1.6", "torch-pickle", saved_before_archives),
    LargeSource("DCP compressed", "torch-dcp", saved_compressed),
    LargeSource("FSDP1", "rank-files", saved_by_ranks),
    LargeSource(
        "plain ranks",
        "rank-files",
        saved_plain_parts,
        {"opening": {"mesh": "tp=2", "rules": ["*=tp, -"]}},
    ),
    LargeSource("Megatron FSDP", "megatron-fsdp", saved_by_megatron_fsdp),
    *(
        LargeSource(
            f"Orbax {form}",
            "orbax",
            partial(saved_by_tensorstore, form=form),
        )
        for form in ("zarr", "zarr3")
    ),
    LargeSource(
        "other elements", "safetensors", two_weights, {"dtype": "bf16"}, CHANGING_LIMIT_BYTES
    ),
    LargeSource("other names", "safetensors", two_weights, {"rename": ["*=a.*"]}),
    LargeSource(
        "training state", "safetensors", trained, {"training": "fsdp2", "format": "torch-dcp"}
    ),
    LargeSource(
        "with an adapter",
        "safetensors",
        with_adapter,
        {"adapters": ["../adapter"]},
        CHANGING_LIMIT_BYTES,
    ),
    LargeSource(
        "with a delta", "safetensors", with_delta, {"deltas": ["../delta"]}, CHANGING_LIMIT_BYTES
    ),
)


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[name].split()[0]) * 1024


def measure(source: Path, target: Path, how: Mapping[str, Any], limit_bytes: int) -> dict[str, int]:
    """What a conversion takes, and what its plan says that it takes."""
    beside = {
        key: [str(source / one) for one in how[key]] for key in ("adapters", "deltas") if key in how
    }
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before_bytes = status("VmRSS")
    conversion = plan_any(source, target, **{"to": "full", **how, **beside})
    run_conversion(conversion, extra_bytes=limit_bytes)
    return {
        "peak_bytes": status("VmHWM") - before_bytes,
        "promised_bytes": conversion.extra_bytes(extra_bytes=limit_bytes),
    }


def make_apart(row: LargeSource, folder: Path, rows: int) -> Path:
    """A source, made by a process of its own: what a program that saves keeps is not counted."""
    child = os.fork()
    if not child:
        code = 1
        try:
            path = row.make(folder, rows)
            folder.with_name("path").write_text(str(path))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, ended = os.waitpid(child, 0)
    if ended:
        raise RuntimeError(f"{row.name!r} was not made")
    return Path(folder.with_name("path").read_text())


def run(folder: Path, row: LargeSource, is_written: bool) -> None:
    for rows in (SMALL_ROWS, LARGE_ROWS):
        own = folder / f"{row.name} {rows}"
        (own / "source").mkdir(parents=True)
        source = make_apart(row, own / "source", rows)
        how = {**row.how, "format": row.format} if is_written else row.how
        found = {
            "written" if is_written else "read": measure(source, own / "made", how, row.limit_bytes)
        }
        if is_written:
            back = {"to": "full"} if row.name != "vLLM" else {"to": "full", "format": row.format}
            found["read"] = measure(own / "made", own / "back", back, row.limit_bytes)
        shutil.rmtree(own)
    for way, measured in found.items():
        told = {"name": row.name, "format": row.format, "way": way, **measured}
        sys.stdout.write(json.dumps(told) + "\n")


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    wanted = sys.argv[2:]
    for rows, is_written in ((WRITTEN, True), (READ, False)):
        for row in rows:
            if not wanted or row.name in wanted:
                run(folder, row, is_written)


if __name__ == "__main__":
    main()
