"""The model that every program trains: a Llama so small that what is saved can be recorded."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[2] / "golden" / "engines" / "pretrained"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    # No multiple of what ranks pad it to.
    "vocab_size": 61,
}
#: What each record has, as folders: a program may save in several ways.
SAVED = {
    "fsdp2": ("saved", "dcp"),
    "zero-1-bf16": ("saved", "universal"),
    "zero-2-fp32-tied": ("saved",),
    "zero-3-bf16": ("saved",),
    "megatron-tp": ("torch_dist", "legacy"),
    "megatron-pp": ("torch_dist", "legacy"),
    "orbax": ("saved",),
    "torch-bin": ("saved",),
    "torch-pt": ("saved",),
}
TOKENS = [[3, 1, 4, 15, 9, 2, 6, 53], [58, 9, 7, 9, 32, 3, 8, 46]]


def read_record(name: str, folder: Path) -> Path:
    """Unpack a record: `saved`, what the program wrote, `live.pt`, `logits.json`."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def write_record(name: str, folder: Path) -> None:
    """Keep what a program saved, for tests without it."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with tarfile.open(GOLDEN / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(one for one in folder.rglob("*") if one.is_file()):
            info = archive.gettarinfo(path, path.relative_to(folder).as_posix())
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with path.open("rb") as content:
                archive.addfile(info, content)


def write_config(folder: Path, **changes: Any) -> None:
    """config.json of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}, indent=1))


def write_live(
    folder: Path, weights: dict[str, Any], logits: Any, program: str, **changes: Any
) -> None:
    """What the live model had when it was saved: weights by Hugging Face's names, and outputs."""
    import torch

    # Of memory that is theirs alone: views are saved with all that they are views of.
    torch.save({name: one.detach().clone() for name, one in weights.items()}, folder / "live.pt")
    (folder / "logits.json").write_text(json.dumps(logits.detach().float().tolist()))
    (folder / "program.txt").write_text(program + "\n")
    write_config(folder, **changes)
