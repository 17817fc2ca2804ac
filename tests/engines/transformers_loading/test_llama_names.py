"""Llama in names of Meta and torchtitan: transformers computes the logits of the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs the environment of transformers", allow_module_level=True)

import torch
import torch.distributed.checkpoint as dcp
import transformers

from checkpoint.pretrained.test_names import (
    CONFIG,
    PARAMETERS,
    made,
    theirs,
    write_config,
    write_meta,
)
from reshard import checkpoint


@pytest.mark.parametrize("kind", ["torchtitan", "torchtitan, new", "meta", "meta, two files"])
@pytest.mark.filterwarnings("ignore")
def test_logits(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "s"
    if kind.startswith("torchtitan"):
        state: dict[str, Any] = dict(theirs(new="new" in kind))
        dcp.save(state, checkpoint_id=source, no_dist=True)
    else:
        write_meta(source, PARAMETERS, 2 if "two" in kind else 1, rows=True)
    config = write_config(tmp_path / "base")
    plan = checkpoint.plan_for_pretrained(source, tmp_path / "hf", config=config)
    checkpoint.run_conversion(plan)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    model.load_state_dict(made())
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
