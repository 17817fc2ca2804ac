"""The table of formats agrees with the formats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.checkpoint.formats.registry import (
    is_format_file,
    shipped_formats,
    written_format,
    written_names,
)


def test_names_are_known_without_formats() -> None:
    formats = shipped_formats()
    assert written_names() == tuple(sorted(one.name for one in formats if one.is_written))
    for name in written_names():
        assert written_format(name, to_whole=True).name == name
    assert not next(one for one in formats if one.name == "megatron-fsdp").is_written


@pytest.mark.parametrize(
    "name",
    [
        *("a.safetensors", "model.safetensors.index.json", "__0_0.distcp", "__3.metadata"),
        *("mp_rank_00_model_states.pt", "x_optim_states.pt", "model_optim_rng.pt", "model_rng.pt"),
        *("distrib_optim.pt", "pytorch_model.bin.index.json", "config.json", "__x.metadata"),
        *("pytorch_model.bin", "_METADATA", "rank0.pt", "a.npy"),
    ],
)
def test_files_of_formats_are_found_by_the_table(name: str) -> None:
    assert is_format_file(name) == any(format.has_file(name) for format in shipped_formats())


def test_opening_imports_only_the_formats_of_the_path(tmp_path: Path) -> None:
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import json, sys; from reshard.checkpoint import open_checkpoint; "
        f"print(open_checkpoint({str(tmp_path)!r}).format); "
        "print(json.dumps([name for name in sys.modules if 'checkpoint.formats.' in name]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    format, modules = done.stdout.splitlines()
    assert format == "safetensors"
    others = ("megatron", "deepspeed", "orbax", "torch_dcp", "torch_pickle", "rank_files", "vllm")
    assert not [name for name in json.loads(modules) if any(part in name for part in others)]
