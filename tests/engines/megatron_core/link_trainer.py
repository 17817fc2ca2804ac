"""One rank of Megatron-core that gives its weights to an engine by a link, and nothing besides.

Usage: python link_trainer.py JOB.json URL FOLDER, with the variables of a rank. The job is one of
`training_process`; its `updates` are numbers of weights, given one after the other. FOLDER gets
`given.pt`, with tokens and the logits that Megatron computes of them by the last weights, and
`rank-N.pt`, with what this rank has then: see `model_records`.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any


def run_forward(job: dict[str, Any], chunks: list[Any], tokens: Any) -> Any:
    """The logits of all stages, on the ranks of the last; None on others."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from engines.megatron_core.training_process import LENGTH, inputs_of

    def forward(rows: Any, model: Any) -> Any:
        return model(*inputs_of(next(rows))), lambda logits, non_loss_data=True: logits

    # As many as a pipeline of virtual stages needs.
    parts = tokens.chunk(2)
    rows = [iter(parts) for _ in chunks]
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=rows if len(chunks) > 1 else rows[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(parts),
            seq_length=LENGTH,
            micro_batch_size=len(parts[0]),
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not found:
        return None
    own = torch.cat(found).float().contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    return torch.cat(every, -1)


def fill(chunks: list[Any], update: int) -> None:
    """Give every tensor values of its own, by its name, place and update; copies are alike.

    Megatron-core begins with norms of 1 and biases of 0, and with the same experts on every rank.
    """
    import torch
    from megatron.core import parallel_state as places

    stage = places.get_pipeline_model_parallel_rank()
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            # Both ends of a tied model are one tensor.
            is_end = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            is_tied = is_end and chunk.share_embeddings_and_output_weights
            words = "tied" if is_tied else f"{name} of {stage}, {number}"
            if ".experts." in name:
                words += f" of experts {places.get_expert_model_parallel_rank()}"
            if getattr(parameter, "tensor_model_parallel", False):
                words += f" part {places.get_tensor_model_parallel_rank()}"
            words += f" at {update}" if update else ""
            seed = torch.Generator().manual_seed(zlib.crc32(words.encode()))
            values = torch.randn(parameter.shape, generator=seed) * 0.2
            with torch.no_grad():
                parameter.copy_(1 + values if "norm" in name else values)


def allow_single_precision(chunks: list[Any]) -> None:
    """Let grouped experts compute in 32 bits: rounded routers would choose other experts.

    `GroupedMLP` asserts that its config says 16 bits, since its kernels for CUDA have no others.
    """
    from megatron.core.transformer.moe.experts import GroupedMLP

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GroupedMLP):
                module.config = copy.copy(module.config)
                module.config.bf16 = True


def read_job(path: str) -> dict[str, Any]:
    """What a job of weights alone says, with what it leaves out."""
    from engines.megatron_core.training_process import DEFAULTS

    own = {"optimizer": False, "fp32": True, "updates": [0], "cast": False, "verify": True}
    return {**DEFAULTS, **own, **json.loads(Path(path).read_text())}


def build_chunks(job: dict[str, Any]) -> list[Any]:
    """The model's chunks on this rank, which compute in 32 bits."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from engines.megatron_core.training_process import build, unwrap

    torch.manual_seed(0)
    chunks, _, _ = build(job)
    if job["grouped"]:
        allow_single_precision(chunks)
    model_parallel_cuda_manual_seed(1)
    return [unwrap(chunk).eval() for chunk in chunks]


def main() -> None:
    from engines.megatron_core import cpu_shim

    cpu_shim.install()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from engines.megatron_core import model_records
    from engines.megatron_core.training_process import batch_of
    from reshard.torch import MegatronModel, connect

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, job = Path(sys.argv[3]), read_job(sys.argv[1])
    chunks = build_chunks(job)
    fill(chunks, job["updates"][-1])
    # Padding of the vocabulary is nobody's token.
    tokens = batch_of(job, 0) % job.get("true_vocab", job["vocab"])
    logits = run_forward(job, chunks, tokens)
    is_last = parallel_state.is_pipeline_last_stage()
    if is_last and parallel_state.get_tensor_model_parallel_rank() == 0:
        is_first_copy = parallel_state.get_data_parallel_rank() == 0
        if is_first_copy:
            torch.save({"tokens": tokens[:, :-1], "logits": logits}, folder / "given.pt")
    torch.save(model_records.describe(chunks), folder / f"rank-{dist.get_rank()}.pt")
    with connect(sys.argv[2], "trainer", rank=dist.get_rank(), ranks=dist.get_world_size()) as link:
        sync = link.prepare(MegatronModel(chunks), cast=job["cast"])
        for update in job["updates"]:
            fill(chunks, update)
            sync.run(update)
        if job["verify"]:
            sync.verify()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
