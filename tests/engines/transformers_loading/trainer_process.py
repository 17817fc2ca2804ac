"""One rank of a trainer: a model under FSDP2, a step of AdamW, saved by torch's own DCP.

`python trainer_process.py LIST`: the file has `[{folder, out}]`; started once for each rank. The
weights after the step, whole, are in `OUT.pt`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        config = transformers.AutoConfig.from_pretrained(case["folder"])
        model_class = getattr(transformers, config.architectures[0])
        model = model_class.from_pretrained(case["folder"], dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(rank)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        weights, state = get_state_dict(model, optimizer)
        values = {"model": weights, "optim": state, "step": 3}
        dcp.save(values, checkpoint_id=case["out"])
        whole = {
            name: one.full_tensor() if hasattr(one, "full_tensor") else one
            for name, one in weights.items()
        }
        if rank == 0:
            torch.save(whole, f"{case['out']}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
