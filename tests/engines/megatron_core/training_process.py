"""One rank of a training run of Megatron-core, which loads, steps and saves checkpoints.

Usage: python training_process.py JOB.json, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
What the job can say stands in `DEFAULTS`. The batches are functions of the step alone, so that runs
of any parallelism see the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    # Parallelism: tp, pp, ep, etp, vp (stages of a rank); what is left is dp.
    "sizes": {},
    "experts": None,
    # The weights of all experts in one, as `GroupedMLP` has them.
    "grouped": False,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "groups": 2,
    "ffn": 48,
    "vocab": 64,
    "tied": False,
    "bias": False,
    "qkv_bias": False,
    "qk_norm": False,
    "fp32": False,
    "fp16": False,
    # At the first step, of fp16.
    "loss_scale": 256.0,
    "optimizer": True,
    "distributed_optimizer": True,
    "sharding_type": "fully_reshardable",
    "bucket_size": None,
    # Load this folder, step from `first` so many times, save there; as `torch_dist` or `legacy`.
    "load": None,
    "load_format": "torch_dist",
    "first": 0,
    "steps": 1,
    "save": None,
    "save_format": "torch_dist",
    # The same state once more, each with a folder, and a format or type of sharding of its own.
    "more": [],
    # What the saved model computes and its next step, in this folder.
    "then": None,
    "batch": 4,
    "homogeneous": True,
    "singleton": False,
}
LENGTH = 8


def parallel_sizes(sizes: dict[str, int]) -> dict[str, int | None]:
    """The sizes of model parallelism by the names that Megatron has for them."""
    return {
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("vp"),
        "expert_model_parallel_size": sizes.get("ep", 1),
        "expert_tensor_parallel_size": sizes.get("etp", sizes.get("tp", 1)),
    }


def element_type(job: dict[str, Any]) -> Any:
    """The type of the weights that the model computes with."""
    import torch

    if job["fp32"]:
        return torch.float32
    return torch.float16 if job["fp16"] else torch.bfloat16


def build(job: dict[str, Any]) -> tuple[list[Any], Any, Any]:
    """The model's chunks on this rank, its optimizer, and its config."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe import moe_utils

    sizes = job["sizes"]
    parallel = parallel_sizes(sizes)
    parallel_state.initialize_model_parallel(**parallel, create_gloo_process_groups=True)
    # It is asked for where Transformer Engine is not there, too.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    experts, dtype = job["experts"], element_type(job)
    config = TransformerConfig(
        num_layers=job["layers"],
        hidden_size=job["hidden"],
        num_attention_heads=job["heads"],
        num_query_groups=job["groups"],
        ffn_hidden_size=job["ffn"],
        moe_ffn_hidden_size=job["ffn"] // 2 if experts else None,
        num_moe_experts=experts,
        moe_grouped_gemm=job["grouped"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=job["bias"],
        add_qkv_bias=job["qkv_bias"],
        normalization="RMSNorm",
        qk_layernorm=job["qk_norm"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **parallel,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=job["grouped"],
        normalization="RMSNorm",
        qk_layernorm=job["qk_norm"],
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=job["distributed_optimizer"],
        overlap_grad_reduce=job["bucket_size"] is not None,
        bucket_size=job["bucket_size"],
    )
    chunks = []
    for number in range(sizes.get("vp") or 1):
        stage = {"vp_stage": number} if sizes.get("vp") else {}
        model = GPTModel(
            config,
            spec,
            vocab_size=job["vocab"],
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=job["tied"],
            **stage,
        )
        # Initial values are those of the whole model's names, whatever the parallelism.
        if experts and sizes.get("tp", 1) > 1:
            # Megatron-core refuses to train it without sequence parallelism, which needs kernels.
            model.eval()
        wrapped = model if dtype is torch.float32 else Float16Module(config, model)
        if job["optimizer"]:
            wrapped = DistributedDataParallel(config, ddp, wrapped, disable_bucketing=number > 0)
        chunks.append(wrapped)
    if not job["optimizer"]:
        return chunks, None, config
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.1,
        bf16=config.bf16,
        fp16=config.fp16,
        initial_loss_scale=job["loss_scale"],
        params_dtype=config.params_dtype,
        use_distributed_optimizer=job["distributed_optimizer"],
        clip_grad=1.0,
    )
    return chunks, get_megatron_optimizer(optimizer_config, chunks), config


def state_of(job: dict[str, Any], chunks: list[Any], optimizer: Any, step: int, load: bool) -> Any:
    """The nested state as Megatron-LM puts it together for `torch_dist`."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {
        "distrib_optim_sharding_type": job["sharding_type"],
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": job["singleton"],
        "non_homogeneous_layers": not job["homogeneous"],
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    if not job["distributed_optimizer"]:
        metadata.pop("distrib_optim_sharding_type")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata["dp_cp_group"] = group
    state: dict[str, Any] = {
        "args": argparse.Namespace(**arguments(job)),
        "checkpoint_version": 3.0,
        "iteration": step,
    }
    for number, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        state[key] = unwrap(chunk).sharded_state_dict(metadata=metadata)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(
            {key: value for key, value in state.items() if key.startswith("model")},
            is_loading=load,
            metadata=metadata,
        )
    state["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": step * job["batch"]}
    pp, tp = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    dp = torch.distributed.get_rank(group)
    random = [{"random_rng_state": torch.arange(4, dtype=torch.uint8), "place": (pp, tp)}]
    # A run of another parallelism does not load the state of the random number generators.
    if not load:
        state["rng_state"] = ShardedObject("rng_state", random, sizes, (pp, tp), replica_id=dp)
    return state, metadata


def unwrap(chunk: Any) -> Any:
    """The model inside of its wrappers, whose names are saved."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments: those that say what the model is and how it is cut."""
    import torch

    sizes = job["sizes"]
    return {
        "num_layers": job["layers"],
        "hidden_size": job["hidden"],
        "ffn_hidden_size": job["ffn"],
        "moe_ffn_hidden_size": job["ffn"] // 2 if job["experts"] else None,
        "num_attention_heads": job["heads"],
        "group_query_attention": True,
        "num_query_groups": job["groups"],
        "kv_channels": job["hidden"] // job["heads"],
        "num_experts": job["experts"],
        "moe_grouped_gemm": job["grouped"],
        "swiglu": True,
        "add_bias_linear": job["bias"],
        "qk_layernorm": job["qk_norm"],
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": not job["tied"],
        "padded_vocab_size": job["vocab"],
        "position_embedding_type": "rope",
        **parallel_sizes(sizes),
        "data_parallel_size": int(os.environ["WORLD_SIZE"])
        // (sizes.get("tp", 1) * sizes.get("pp", 1)),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "use_distributed_optimizer": job["distributed_optimizer"],
        "transformer_impl": "local",
        "bf16": element_type(job) is torch.bfloat16,
        "fp16": job["fp16"],
        "params_dtype": element_type(job),
        "ddp_bucket_size": job["bucket_size"],
        "ckpt_format": "torch",
    }


def save(
    job: dict[str, Any],
    chunks: list[Any],
    optimizer: Any,
    step: int,
    others: dict[int, Any] | None = None,
) -> None:
    """Save the state as the job says: and `others` for parameters, by where these begin."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    if job["save_format"] == "torch_dist":
        folder = Path(job["save"])
        folder.mkdir(parents=True, exist_ok=True)
        state, metadata = state_of(job, chunks, optimizer, step, load=False)
        for part in nested_values(state) if others else ():
            if isinstance(data := getattr(part, "data", None), torch.Tensor):
                part.data = others.get(data.data_ptr(), data)
                part.dtype = part.data.dtype
        content = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
        dist_checkpointing.save(state, str(folder), content_metadata=content)
        return
    # Megatron-LM's own layout: a folder for each model-parallel rank, saved by its first copy.
    own = legacy_folder(Path(job["save"]), step)
    is_first = parallel_state.get_expert_data_parallel_rank() == 0
    if is_first:
        own.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    if job["distributed_optimizer"]:
        optimizer.save_parameter_state(str(own / "distrib_optim.pt"))
    if is_first:
        state = {
            "args": argparse.Namespace(**arguments(job)),
            "checkpoint_version": 3.0,
            "iteration": step,
        }
        for number, chunk in enumerate(chunks):
            key = "model" if len(chunks) == 1 else f"model{number}"
            state[key] = unwrap(chunk).state_dict_for_save_checkpoint()
        state["optimizer"] = optimizer.state_dict()
        state["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": step * job["batch"]}
        state["rng_state"] = [{"random_rng_state": torch.arange(4, dtype=torch.uint8)}]
        torch.save(state, own / "model_optim_rng.pt")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(job["save"]) / "latest_checkpointed_iteration.txt").write_text(str(step))


def legacy_folder(root: Path, step: int) -> Path:
    """The folder of this rank's model-parallel place."""
    from megatron.core import parallel_state as places

    name = f"mp_rank_{places.get_tensor_model_parallel_rank():02d}"
    if places.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{places.get_pipeline_model_parallel_rank():03d}"
    if places.get_expert_model_parallel_world_size() > 1:
        name += f"_{places.get_expert_model_parallel_rank():03d}"
    return root / f"iter_{step:07d}" / name


def load(job: dict[str, Any], chunks: list[Any], optimizer: Any) -> int:
    """Load what the job says, as Megatron-LM does; the step it was saved at."""
    import torch
    from megatron.core import dist_checkpointing

    if job["load_format"] == "torch_dist":
        state, _ = state_of(job, chunks, optimizer, 0, load=True)
        found = dist_checkpointing.load(state, job["load"])
    else:
        step = int((Path(job["load"]) / "latest_checkpointed_iteration.txt").read_text())
        own = legacy_folder(Path(job["load"]), step)
        found = torch.load(own / "model_optim_rng.pt", weights_only=False)
    for number, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        unwrap(chunk).load_state_dict(found[key], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(found["optimizer"])
    if job["load_format"] == "legacy" and job["distributed_optimizer"]:
        optimizer.load_parameter_state(str(own / "distrib_optim.pt"))
    return int(found["iteration"])


def batch_of(job: dict[str, Any], step: int) -> Any:
    """The tokens of a step."""
    import torch

    places = torch.Generator().manual_seed(1000 + step)
    return torch.randint(job["vocab"], (job["batch"], LENGTH + 1), generator=places)


def inputs_of(rows: Any) -> tuple[Any, Any, Any]:
    """What the model is called with: tokens, their positions, and what each may not look at."""
    import torch

    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return rows[:, :-1], torch.arange(LENGTH)[None].expand(len(rows), -1), mask


def train(job: dict[str, Any], chunks: list[Any], optimizer: Any, config: Any, step: int) -> float:
    """One step: the same batch for every parallelism. The norm of its gradients."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    dp = parallel_state.get_data_parallel_world_size()
    own = parallel_state.get_data_parallel_rank()
    mine = batch_of(job, step)[own * job["batch"] // dp : (own + 1) * job["batch"] // dp]

    def forward(rows: Any, model: Any) -> Any:
        row = next(rows)[None]
        losses = model(*inputs_of(row), labels=row[:, 1:])
        return losses, lambda losses: (losses.float().mean(), {})

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    # Megatron's scheduler does this before every step.
    for group in getattr(optimizer, "param_groups", ()):
        group["weight_decay"] = 0.1 * group.get("wd_mult", 1.0)
    config.finalize_model_grads_func = finalize
    rows = [iter(mine) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=rows if len(chunks) > 1 else rows[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(mine),
        seq_length=LENGTH,
        micro_batch_size=1,
    )
    return float(optimizer.step()[1])


def show_next(
    job: dict[str, Any], chunks: list[Any], optimizer: Any, config: Any, step: int
) -> None:
    """Save what the model computes, then its next step: the gradients, and the weights after it.

    `logits.pt` has tokens and logits; gradients are those that are stepped with, after clipping, in
    `gradients` under the names of their parameters; the weights are in `next`. One stage only.
    """
    import torch
    from megatron.core import parallel_state

    folder = Path(job["then"])
    tokens = batch_of(job, step)
    with torch.no_grad():
        own = chunks[0](*inputs_of(tokens)).float().contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own, group=group)
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
        torch.save({"tokens": tokens[:, :-1], "logits": torch.cat(parts, -1)}, folder / "logits.pt")
    norm = train(job, chunks, optimizer, config, step)
    # A distributed optimizer has reduced each rank's share of a bucket only.
    for buffer in chunks[0].buffers + chunks[0].expert_parallel_buffers:
        ranks = buffer.data_parallel_group.size()
        for bucket in buffer.buckets if job["distributed_optimizer"] else []:
            shares = list(bucket.grad_data.chunk(ranks))
            mine = shares[buffer.data_parallel_group.rank()].clone()
            torch.distributed.all_gather(shares, mine, group=buffer.data_parallel_group)
    scale = min(1.0, 1.0 / (norm + 1e-6))
    gradients = {one.data_ptr(): one.main_grad * scale for one in chunks[0].parameters()}
    save({**job, "save": folder / "gradients"}, chunks, None, step, gradients)
    save({**job, "save": folder / "next"}, chunks, None, step + 1)


def finalize(*args: Any, **kwargs: Any) -> None:
    """What Megatron-LM does with gradients behind the last microbatch."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(*args, **kwargs)


def initialize(chunks: list[Any], optimizer: Any) -> None:
    """Values that follow from a parameter's name and place alone, for every parallelism."""
    import torch

    state = {}
    for number, chunk in enumerate(chunks):
        state |= {f"{number}.{k}": v for k, v in unwrap(chunk).sharded_state_dict().items()}
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for part in nested_values(state):
        tensors = [part] if isinstance(part, ShardedTensor) else []
        # Of stacked experts these are copies: they have the values that Megatron-core gives them.
        if hasattr(part, "build"):
            tensors = [
                one for one in nested_values([part.build()]) if isinstance(one, ShardedTensor)
            ]
        for one in tensors:
            seed = sum(ord(letter) * (at + 1) for at, letter in enumerate(one.key))
            whole = torch.randn(one.global_shape, generator=torch.Generator().manual_seed(seed))
            if "norm" in one.key:
                whole = 1 + whole * 0.01
            with torch.no_grad():
                one.data.copy_((whole * (1.0 if "norm" in one.key else 0.1))[one.global_slice()])
    optimizer.reload_model_params()


def main(job: dict[str, Any]) -> None:
    """Run this rank."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    chunks, optimizer, config = build(job)
    model_parallel_cuda_manual_seed(1)
    step = job["first"]
    if job["load"]:
        # Parameters of 32 bits are views of the model's own, which are filled in place.
        with torch.no_grad():
            step = load(job, chunks, optimizer)
    else:
        initialize(chunks, optimizer)
    for number in range(job["steps"]):
        train(job, chunks, optimizer, config, step + number)
    for other in [{}, *job["more"]] if job["save"] else []:
        save({**job, **other}, chunks, optimizer, step + job["steps"])
    if job["then"]:
        show_next(job, chunks, optimizer, config, step + job["steps"])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import cpu_shim

    warnings.simplefilter("ignore")
    cpu_shim.install()
    cpu_shim.use_own_adam()
    main({**DEFAULTS, **json.loads(Path(sys.argv[1]).read_text())})
