"""A rank of FSDP2 with AdamW that goes on from what Megatron saved, with the recorded gradients.

Arguments: the folder of the distributed checkpoint, and a file with the names of each group of the
optimizer, and gradients. What was loaded is saved again beside the folder, and the weights after
the step.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(folder: str, job: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    from held_model import HeldModel, make_adamw

    dist.init_process_group("gloo")
    said = torch.load(job, weights_only=True)
    gradients = said["gradients"]
    model = HeldModel({name: tuple(one.shape) for name, one in gradients.items()})
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = make_adamw(model, said["groups"])
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "iteration": 2}, checkpoint_id=f"{folder}.again")
    # Every rank has the same gradients: their mean is each of them.
    model(gradients).backward()
    optimizer.step()
    then = {name: one.detach().full_tensor() for name, one in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(then, f"{folder}.then.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
