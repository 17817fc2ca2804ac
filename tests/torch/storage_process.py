"""One of several ranks: FSDP2 loads from checkpoints, saves, and loads under another mesh.

Arguments: the folder with the original model, the format to save in, a folder to save into, then
the folders to load from.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rank_cases import reported
from reshard.torch import StorageReader, StorageWriter
from reshard.torch.storage import writer


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 5, bias=False))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def check(state: dict[str, Any], whole: dict[str, torch.Tensor], what: str) -> None:
    for name, value in state.items():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        if not torch.equal(found, whole[name]):
            raise SystemExit(f"{name} from {what} differs on rank {dist.get_rank()}")


def main(original: str, format: str, target: str, *folders: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    whole = load_file(Path(original) / "model.safetensors")
    if os.environ.get("HOSTS_OF_THEIR_OWN"):
        # Ranks that see nothing of each other's folders.
        os.environ["XDG_CACHE_HOME"] += f"/{dist.get_rank()}"
        writer.name_host = lambda: ("host", dist.get_rank())
    for folder in folders:
        with reported(f"{Path(folder).name}_is_loaded"):
            model = make_model()
            state = get_model_state_dict(model)
            dcp.load(state, storage_reader=StorageReader(folder))
            check(get_model_state_dict(model), whole, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    with reported("what_was_trained_is_saved"):
        # With the state of the optimizer, if the format stores all of it.
        if format == "torch-dcp":
            models, optimizers = get_state_dict(model, optimizer)
            saved = {"model": models, "optim": optimizers}
        else:
            saved = {"model": get_model_state_dict(model)}
        dcp.save(saved, storage_writer=StorageWriter(target, format=format))
    trained = {name: one.full_tensor() for name, one in saved["model"].items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    readers = [StorageReader(target)]
    if format == "torch-dcp" and "://" not in target:
        readers.append(dcp.FileSystemReader(target))
    for reader in readers:
        for placement in (Shard(1), Replicate(), Shard(0)):
            reader_name = f"{type(reader).__module__}.{type(reader).__name__}"
            with reported(f"{reader_name} loads it with {placement} on another mesh"):
                state = {
                    name: distribute_tensor(
                        torch.zeros_like(one),
                        mesh,
                        [placement if one.ndim > 1 else Shard(0)],
                    )
                    for name, one in trained.items()
                }
                dcp.load({"model": state}, storage_reader=reader)
                check(state, trained, f"{reader_name} {placement}")
    if format == "torch-dcp":
        with reported("the_optimizer_state_is_loaded"):
            again = make_model()
            other = torch.optim.AdamW(again.parameters(), lr=0.0)
            models, optimizers = get_state_dict(again, other)
            state = {"model": models, "optim": optimizers}
            dcp.load(state, storage_reader=StorageReader(target))
            for name, values in saved["optim"]["state"].items():
                for key, value in values.items():
                    found = state["optim"]["state"][name][key]
                    if isinstance(value, DTensor):
                        value, found = value.to_local(), found.to_local()
                    if not torch.equal(torch.as_tensor(value), torch.as_tensor(found)):
                        raise SystemExit(f"{key} of {name} differs on rank {dist.get_rank()}")
            if state["optim"]["param_groups"][0]["lr"] != 0.1:
                raise SystemExit(f"groups {state['optim']['param_groups']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
