"""A rank of Megatron-core that trains a Llama, saves it, and says what the live model is.

`python megatron_rank.py FOLDER SIZES TIED`: started once for each rank. The weights by Hugging
Face's names are put together here from the ranks' own parameters, by nothing of reshard.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_core"))

import cpu_shim
import torch
import training_process

from engines.pretrained.small_llama import CONFIG, TOKENS, write_live

PADDED = 64
JOB = {
    "layers": CONFIG["num_hidden_layers"],
    "hidden": CONFIG["hidden_size"],
    "heads": CONFIG["num_attention_heads"],
    "groups": CONFIG["num_key_value_heads"],
    "ffn": CONFIG["intermediate_size"],
    "vocab": PADDED,
    "fp32": True,
}


def whole_parameters(model: Any) -> dict[str, torch.Tensor]:
    """This stage's parameters with those of the tensor-parallel ranks beside it."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    size = torch.distributed.get_world_size(group)
    found = {}
    for name, one in model.named_parameters():
        parts = [torch.empty_like(one.data) for _ in range(size)]
        torch.distributed.all_gather(parts, one.data.contiguous(), group=group)
        if not getattr(one, "tensor_model_parallel", False):
            found[name] = parts[0]
        elif name.endswith("linear_fc1.weight"):
            # A rank has its rows of the gate, then its rows of what is gated.
            halves = [part.chunk(2) for part in parts]
            found[name] = torch.cat([half[i] for i in (0, 1) for half in halves])
        else:
            found[name] = torch.cat(parts, dim=one.partition_dim)
    return found


def as_hugging_face(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters of Megatron as those of transformers' Llama."""
    heads, groups, wide = JOB["heads"], JOB["groups"], CONFIG["head_dim"]
    found = {}
    for name, one in own.items():
        at = re.sub(r"^decoder\.layers\.", "model.layers.", name)
        if name == "embedding.word_embeddings.weight":
            found["model.embed_tokens.weight"] = one[: CONFIG["vocab_size"]]
        elif name == "output_layer.weight":
            found["lm_head.weight"] = one[: CONFIG["vocab_size"]]
        elif name == "decoder.final_layernorm.weight":
            found["model.norm.weight"] = one
        elif name.endswith("linear_qkv.weight"):
            # By groups: the queries of one, its key, its value.
            per = heads // groups
            rows = one.view(groups, per + 2, wide, -1)
            at = at.removesuffix("linear_qkv.weight")
            found[f"{at}q_proj.weight"] = rows[:, :per].reshape(heads * wide, -1)
            found[f"{at}k_proj.weight"] = rows[:, per].reshape(groups * wide, -1)
            found[f"{at}v_proj.weight"] = rows[:, per + 1].reshape(groups * wide, -1)
        elif name.endswith("linear_fc1.weight"):
            at = at.removesuffix("linear_fc1.weight")
            found[f"{at}gate_proj.weight"], found[f"{at}up_proj.weight"] = one.chunk(2)
        else:
            for theirs, ours in (
                ("self_attention.linear_proj", "self_attn.o_proj"),
                ("mlp.linear_fc2", "mlp.down_proj"),
                ("pre_mlp_layernorm", "post_attention_layernorm"),
            ):
                at = at.replace(theirs, ours)
            found[at] = one
    return {
        name.replace("self_attention", "self_attn"): one.contiguous() for name, one in found.items()
    }


def outputs(chunks: list[Any]) -> Any:
    """Logits of Megatron's own forward pass; of a pipeline, on its last stage."""
    from megatron.core import parallel_state as places
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    (model,) = [training_process.unwrap(chunk) for chunk in chunks]
    tokens = torch.tensor(TOKENS)
    length = tokens.shape[1]
    positions = torch.arange(length)[None].expand(len(tokens), -1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        model.eval()
        if places.get_pipeline_model_parallel_world_size() == 1:
            found = model(tokens, positions, mask)
            return gather_from_tensor_model_parallel_region(found)[..., : CONFIG["vocab_size"]]
        rank = places.get_pipeline_model_parallel_rank()
        if rank == 0:
            torch.distributed.send(model(tokens, positions, mask).contiguous(), 1)
            return None
        hidden = torch.empty(length, len(tokens), JOB["hidden"])
        torch.distributed.recv(hidden, 0)
        model.set_input_tensor(hidden)
        return model(None, positions, mask)[..., : CONFIG["vocab_size"]]


def main(folder: Path, sizes: dict[str, int], tied: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    import megatron.core
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    job = {**training_process.DEFAULTS, **JOB, "sizes": sizes, "tied": tied}
    chunks, optimizer, config = training_process.build(job)
    model_parallel_cuda_manual_seed(1)
    training_process.initialize(chunks, optimizer)
    # Tokens of training are those that there are.
    for step in range(2):
        real = {**job, "vocab": CONFIG["vocab_size"]}
        training_process.train(real, chunks, optimizer, config, step)
    for how in ("torch_dist", "legacy"):
        place = {"save": str(folder / how), "save_format": how}
        training_process.save({**job, **place}, chunks, optimizer, 2)
    own = as_hugging_face(
        {
            re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) + first_layer()), name): one
            for name, one in whole_parameters(training_process.unwrap(chunks[0])).items()
        }
    )
    logits = outputs(chunks)
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, (own, logits))
    if torch.distributed.get_rank() == 0:
        weights = {name: one for part, _ in reversed(every) for name, one in part.items()}
        if tied:
            weights.pop("lm_head.weight", None)
        found = [one for _, one in every if one is not None][-1]
        write_live(
            folder, weights, found, f"megatron-core {megatron.core.__version__}",
            tie_word_embeddings=tied,
        )  # fmt: skip
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def first_layer() -> int:
    """The number of this stage's first layer."""
    from megatron.core import parallel_state as places

    stages = places.get_pipeline_model_parallel_world_size()
    return places.get_pipeline_model_parallel_rank() * JOB["layers"] // stages


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cpu_shim.install()
    cpu_shim.use_own_adam()
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "tied")
