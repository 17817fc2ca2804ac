"""One rank of transformers: loads each model of a list, and writes what it holds.

`python rank_process.py LIST`: the file has `[{folder, sizes, out}]`; started once for each
rank, with `RANK` and its like set.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for case in json.loads(Path(sys.argv[1]).read_text()):
        out = Path(case["out"])
        out.mkdir(exist_ok=True)
        # A job for each model: every group of gloo has threads as long as it lives.
        store = dist.FileStore(str(out / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        config = transformers.AutoConfig.from_pretrained(case["folder"])
        try:
            model = getattr(transformers, config.architectures[0]).from_pretrained(
                case["folder"],
                distributed_config=DistributedConfig(**case["sizes"]),
                dtype=torch.float32,
            )
            held = {
                name: (one.to_local() if isinstance(one, DTensor) else one).detach().clone()
                for name, one in model.state_dict().items()
            }
            save_file({name: one.contiguous() for name, one in held.items()}, out / f"{rank}.held")
        except Exception:
            (out / f"{rank}.failed").write_text(traceback.format_exc())
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
