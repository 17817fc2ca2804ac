"""A rank of DeepSpeed or of FSDP2 that trains transformers' own Llama, and saves it.

`python torch_ranks.py WHAT FOLDER`: started once for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", HF_HUB_OFFLINE="1")

import torch
import transformers

from engines.pretrained.small_llama import CONFIG, TOKENS, write_config, write_live

STEPS = 2


def make_model(**changes: Any) -> Any:
    """A live model with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**CONFIG, **changes})
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape) * 0.1 + (1.0 if one.ndim == 1 else 0.0))
    model.tie_weights()
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    """Tokens of a rank's step."""
    places = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(CONFIG["vocab_size"], (1, 8), generator=places)


def train_deepspeed(rank: int, folder: Path, stage: int, dtype: str, tied: bool) -> None:
    """DeepSpeed's ZeRO, its own `save_checkpoint`."""
    import deepspeed

    from engines.deepspeed.training import make_config, start_engine

    # Its own exchange through shared memory would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = make_model(tie_word_embeddings=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = start_engine(model, optimizer, make_config(stage, dtype))
    for step in range(STEPS):
        tokens = batch(rank, step)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder / "saved")
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        weights = {name: one.detach().clone() for name, one in engine.module.state_dict().items()}
    masters = {}
    if stage == 3:
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    if rank == 0:
        for script in (folder / "saved").glob("zero_to_*.py"):
            script.unlink()
        if stage == 1:
            make_universal(folder)
        finish(folder, {**weights, **masters}, f"deepspeed {deepspeed.__version__}", tied)


def make_universal(folder: Path) -> None:
    """What DeepSpeed's own `ds_to_universal` makes of a save: in a folder of its own."""
    from deepspeed.checkpoint.ds_to_universal import main as convert

    convert(
        argparse.Namespace(
            input_folder=str(folder / "saved" / f"global_step{STEPS}"),
            output_folder=str(folder / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def train_fsdp(rank: int, folder: Path) -> None:
    """FSDP2; files of ranks as verl saves them, torch's DCP beside."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        tokens = batch(rank, step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = folder / "saved"
    write_config(saved / "huggingface")
    for kind, value in (
        ("model", model.state_dict()),
        ("optim", optimizer.state_dict()),
        ("extra_state", {"lr_scheduler": {"last_epoch": 2}, "rng": {"cpu": torch.arange(4)}}),
    ):
        torch.save(value, saved / f"{kind}_world_size_2_rank_{rank}.pt")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": STEPS}, checkpoint_id=folder / "dcp")
    whole = {name: one.full_tensor() for name, one in weights.items()}
    if rank == 0:
        finish(folder, whole, f"torch {torch.__version__}")


def save_pickle(folder: Path, is_whole_state: bool, tied: bool) -> None:
    """A trainer's own `.pt` under DDP's prefix, or `pytorch_model.bin` in parts."""
    model = make_model(tie_word_embeddings=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = batch(0, 0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    saved = folder / "saved"
    saved.mkdir()
    state = model.state_dict()
    if is_whole_state:
        weights = {f"module.{key}": value for key, value in state.items()}
        whole = {"model": weights, "optimizer": optimizer.state_dict(), "epoch": 3}
        torch.save(whole, saved / "checkpoint.pt")
    else:
        files = [f"pytorch_model-{number:05d}-of-00002.bin" for number in (1, 2)]
        places = {name: files[at % 2] for at, name in enumerate(state)}
        for file in files:
            torch.save({n: one for n, one in state.items() if places[n] == file}, saved / file)
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (saved / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    finish(folder, state, f"torch {torch.__version__}", tied)


def finish(
    folder: Path, weights: dict[str, torch.Tensor], program: str, tied: bool = False
) -> None:
    """The live weights and what a model with exactly these answers."""
    types = {one.dtype for one in weights.values()}
    (dtype,) = types
    name = str(dtype).removeprefix("torch.")
    changes = {"tie_word_embeddings": tied, "torch_dtype": name}
    model = make_model(tie_word_embeddings=tied).to(dtype)
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(TOKENS)).logits
    if tied:
        weights = {key: value for key, value in weights.items() if key != "lm_head.weight"}
    more = f", transformers {transformers.__version__}"
    write_live(folder, weights, logits, program + more, **changes)


def main(what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rank = int(os.environ.get("RANK", "0"))
    if what == "fsdp2":
        train_fsdp(rank, folder)
    elif not what.startswith("zero"):
        save_pickle(folder, what.startswith("pt"), what.endswith("tied"))
    else:
        _, stage, dtype, *more = what.split("-")
        train_deepspeed(rank, folder, int(stage), dtype, "tied" in more)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
