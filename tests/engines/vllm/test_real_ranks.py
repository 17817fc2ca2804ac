"""Traced layouts beside real ranks: every element of every parameter of every family.

What was compared is recorded in `tests/golden/engines/vllm`, a file a family, which `make test`
replays (`tests/torch/vllm/test_recorded_layouts.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("RESHARD_ENGINE") != "vllm":
    pytest.skip("needs vLLM", allow_module_level=True)

from engines.layout_records import write_layout
from engines.vllm.comparison import differences
from engines.vllm.models import MODELS
from engines.vllm.real_ranks import run_ranks
from reshard.torch.vllm.layouts import VllmParallelism
from reshard.torch.vllm.tracing_process import engine_version, trace_ranks

EXPERTS = ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "glm4-moe", "gpt-oss", "llama4"]
STAGES = ["llama", "llama-8", "qwen2", "gemma2", "gpt2", "mixtral", "deepseek-v3"]

PARALLELISMS = {
    **{VllmParallelism(tp=n): [f for f, m in MODELS.items() if n in m.tp] for n in (1, 2, 3, 4)},
    VllmParallelism(tp=2, ep=2): EXPERTS,
    VllmParallelism(tp=2, pp=2): STAGES,
    VllmParallelism(tp=2, dp=2, ep=4): EXPERTS,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny models' configurations and names, a folder each."""
    made = tmp_path_factory.mktemp("models")
    program = Path(__file__).parent / "models.py"
    subprocess.run([sys.executable, program, "all", str(made)], check=True)
    return made


@pytest.mark.parametrize("parallelism", PARALLELISMS, ids=lambda one: one.text)
def test_traced_layouts_are_what_real_ranks_hold(
    parallelism: VllmParallelism, folder: Path, tmp_path: Path
) -> None:
    families = PARALLELISMS[parallelism]
    run_ranks(
        tmp_path,
        [folder / family for family in families],
        parallelism.tp,
        parallelism.pp,
        parallelism.ep > 1,
        parallelism.dp,
    )
    wrong = {}
    for family in families:
        names = json.loads((folder / family / "names.json").read_text())
        request = {
            "folder": str(folder / family),
            "sources": names,
            "dtype": "auto",
            **{axis: getattr(parallelism, axis) for axis in ("tp", "pp", "ep", "dp")},
        }
        try:
            layout = trace_ranks(request)
            found = differences(layout, names, tmp_path / family)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            wrong[family] = found[:3]
            continue
        config = json.loads((folder / family / "config.json").read_text())
        versions = {
            "vllm": engine_version(),
            **{name: importlib.metadata.version(name) for name in ("transformers", "torch")},
        }
        write_layout("vllm", family, versions, config, parallelism.text, layout)
    assert not wrong, json.dumps(wrong, indent=1)
