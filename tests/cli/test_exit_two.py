"""Exit code 2, for wrong use and bad input: whatever is found wrong, the folder stays as it was."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoint.model_files import contents, write_llama
from cli.command_runs import run_here
from reshard import checkpoint
from reshard.errors import InterruptedRunError

COMMANDS = [
    "convert nowhere out --to full",
    "convert llama out --recipe llama",
    "convert llama out --to tp=x",
    "convert llama out --to tp=2 --recipe nothing",
    "convert llama out --to tp=2 --rule *=tp",
    "convert llama out --to tp=3 --recipe llama",
    "convert llama out --to full --target-names megatron",
    "convert llama out --to full --include zzz*",
    "convert llama out --to dp=2 --format deepspeed-zero1",
    "convert llama out --to full --training fsdp2",
    "convert llama tp2 --to full",
    "convert llama llama/in --to full",
    "convert llama nowhere/out --to full",
    "convert llama text --to full",
    "convert llama out --to full --memory 1",
    "convert llama out --to full --adapter nowhere",
    "convert llama out --for hf --to tp=2",
    "convert llama out --for vllm --layout nowhere",
    "convert llama ftp://x/y --to full",
    "convert cut out --to full",
    # Found while the conversion runs.
    "convert damaged out --to full",
    "convert damaged out --to tp=2 --recipe llama",
    "convert damaged out --for hf",
    "convert damaged out --to full --format torch-pickle",
    "convert damaged out --to full --format orbax",
    "convert damaged out --to full --restart",
    "convert damaged tp2 --to full --overwrite",
    "apply next delta out",
    "apply damaged delta out",
    "apply damaged delta tp2 --overwrite",
    "apply llama text out",
    "apply llama delta out --to tp=3 --recipe nothing",
    "diff llama nowhere -o new",
    "diff llama next -o delta",
    "plan nowhere --to full",
    "plan llama --to tp=2 --recipe nothing",
    "verify llama nowhere",
    "inspect cut",
    "recipe derive llama layout.json --engine nothing --to tp=2",
    "recipe check llama --to tp=2 --recipe nothing",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, cut for two ranks, with other weights, damaged, and cut off."""
    root = tmp_path_factory.mktemp("made")
    llama = write_llama(root / "llama")
    tensors: dict[str, np.ndarray] = load_file(llama / "model.safetensors")
    (root / "next").mkdir()
    save_file({name: one + 1 for name, one in tensors.items()}, root / "next/model.safetensors")
    recipe = ("--recipe", "llama")
    assert run_here("convert", str(llama), str(root / "tp2"), "--to", "tp=2", *recipe).code == 0
    assert run_here("convert", str(llama), str(root / "damaged"), "--to", "full").code == 0
    content = bytearray((root / "damaged/model.safetensors").read_bytes())
    content[-5] ^= 1
    (root / "damaged/model.safetensors").write_bytes(content)
    (root / "cut").mkdir()
    (root / "cut/model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-10])
    (root / "text").write_text("no checkpoint")
    assert run_here("diff", str(llama), str(root / "next"), "-o", str(root / "delta")).code == 0
    return root


@pytest.fixture
def placed(made: Path, folder: Path) -> Path:
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_the_folder_stays_as_it_was(placed: Path, command: str) -> None:
    names, before = sorted(placed.rglob("*")), contents(placed)
    run = run_here(*command.split())
    assert run.code == 2, run.errors
    assert sorted(placed.rglob("*")) == names
    assert contents(placed) == before


def test_files_staged_by_an_earlier_run_are_kept(placed: Path) -> None:
    # Only the staging folder that a run itself began is removed.
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedRunError):
        checkpoint.convert("damaged", "out", to="full", stop=stop)
    names = sorted(placed.rglob("*"))
    assert placed / ".out.reshard-staging" in names
    assert run_here("convert", "damaged", "out", "--to", "full").code == 2
    assert sorted(placed.rglob("*")) == names
