"""One rank of Megatron-core that gets its weights from another job of Megatron-core by a link.

Usage: python link_receiver.py JOB.json URL GIVEN RESULT, with the variables of a rank. The job is
one of `training_process`; GIVEN has tokens, RESULT gets the logits that the model computes of them.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    from engines.megatron_core import cpu_shim

    cpu_shim.install()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from engines.megatron_core.link_trainer import build_chunks, fill, read_job, run_forward
    from reshard.torch import MegatronModel, connect

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = read_job(sys.argv[1])
    chunks = build_chunks(job)
    # Other values than the trainer's.
    fill(chunks, -1)
    with connect(sys.argv[2], "engine", rank=dist.get_rank(), ranks=dist.get_world_size()) as link:
        sync = link.prepare(MegatronModel(chunks))
        sync.run()
        sync.verify()
    given = torch.load(sys.argv[3])
    # A column more than what the model sees, as batches of training have it.
    tokens = torch.nn.functional.pad(given["tokens"], (0, 1))
    logits = run_forward(job, chunks, tokens)
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    if logits is not None and is_first and parallel_state.get_data_parallel_rank() == 0:
        torch.save(logits, sys.argv[4])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
