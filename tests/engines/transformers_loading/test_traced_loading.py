"""What is traced of transformers' loading, against what its real ranks hold.

Every element of a checkpoint has a value of its own. Real processes load it with
`from_pretrained(distributed_config=...)`; each element of each rank must be the one that the
traced layout says.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RESHARD_ENGINE") != "transformers":
    pytest.skip("needs transformers", allow_module_level=True)

import torch
from safetensors.torch import load_file, save_file

from engines.judge.family import Family, load_families
from engines.layout_records import write_layout
from reshard.errors import ReshardError
from reshard.recipes.engine_layouts import RankLayout
from reshard.torch import transformers as by_transformers

# Parallelisms by number of ranks; `ep_size` where the model has experts with a plan.
PARALLELISMS: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2}, {"pp_size": 2}),
    3: ({"tp_size": 3},),
    4: ({"tp_size": 2, "fsdp_size": 2}, {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}),
}
# Families that are loaded in all of them; the others with `tp_size=2`.
THOROUGHLY = ("deepseek_v3", "gemma3", "gpt_oss", "llama", "qwen3_moe", "qwen3_next")
OURS = {"tp_size": "tp", "ep_size": "ep", "fsdp_size": "fsdp", "pp_size": "pp"}


class Case:
    """A model in a parallelism: its folder, and where its ranks write."""

    def __init__(self, folder: Path, sizes: dict[str, int], ranks: int) -> None:
        self.folder, self.sizes, self.ranks = folder, sizes, ranks
        text = ",".join(f"{key}={size}" for key, size in sizes.items())
        self.out = folder / text
        self.name = f"{folder.name} {text}"
        self.parallelism = ",".join(f"{OURS[key]}={size}" for key, size in sizes.items())

    def trace(self) -> Any:
        sizes = {OURS[key]: size for key, size in self.sizes.items()}
        return by_transformers.layouts(self.folder, **sizes)


def write_model(folder: Path, family: Family) -> None:
    """A checkpoint as the Hub has it, whose every element has its number as its value."""
    import transformers

    made = transformers.AutoConfig.for_model(**family.config)
    model_class = getattr(transformers, family.auto)
    if family.auto.startswith("Auto"):
        model_class = model_class._model_mapping[type(made)]
    made.architectures = [model_class.__name__]
    made.save_pretrained(folder)
    tensors, first = {}, 1
    for name, (_, shape) in by_transformers.module_tensors(made, as_saved=True).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
        first += count
    assert first < 2**24, "values beyond what float32 tells apart"
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """All models in all parallelisms, loaded by real ranks."""
    base = tmp_path_factory.mktemp("models")
    folders = []
    for name, family in load_families().items():
        folder = base / name
        write_model(folder, family)
        folders.append(folder)
    found = []
    for ranks, parallelisms in PARALLELISMS.items():
        now = [Case(folder, sizes, ranks) for folder in folders for sizes in parallelisms]
        now = [case for case in now if "ep_size" not in case.sizes or has_experts(case.folder)]
        now = [
            case for case in now if case.folder.name in THOROUGHLY or case.sizes == {"tp_size": 2}
        ]
        run_ranks(base, now, ranks)
        found += now
    return found


def has_experts(folder: Path) -> bool:
    return "experts" in (folder / "config.json").read_text()


def run_ranks(base: Path, cases: list[Case], ranks: int) -> None:
    """Load every case on `ranks` processes."""
    listed = base / f"{ranks}.json"
    listed.write_text(
        json.dumps(
            [
                {"folder": str(case.folder), "sizes": case.sizes, "out": str(case.out)}
                for case in cases
            ]
        )
    )
    program = Path(__file__).with_name("rank_process.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(program), str(listed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]


def fill(layout: RankLayout, sources: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Each parameter with the values that its pieces say, and where these are."""
    for name, one in layout.parameters.items():
        values, known = torch.zeros(one.shape), torch.zeros(one.shape, dtype=torch.bool)
        for piece in one.pieces:
            at = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            values[at] = torch.as_strided(
                sources[piece.source], piece.box.shape, piece.view.strides, piece.view.offset
            )
            known[at] = True
        yield name, (values, known)


def test_traced_layouts_are_what_ranks_hold(cases: list[Case]) -> None:
    compared, families = 0, set()
    for case in cases:
        failures = list(case.out.glob("*.failed"))
        if failures:
            # What transformers cannot load is refused when it is traced too.
            with pytest.raises(ReshardError):
                case.trace()
            continue
        layout = case.trace()
        sources = load_file(case.folder / "model.safetensors")
        for rank in range(case.ranks):
            held = load_file(case.out / f"{rank}.held")
            assert set(held) == set(layout.rank(rank).parameters), case.name
            for name, (values, known) in fill(layout.rank(rank), sources):
                assert values.shape == held[name].shape, (case.name, rank, name)
                assert torch.equal(values[known], held[name][known]), (case.name, rank, name)
                # What is not copied is no tensor of the checkpoint: a buffer that is made.
                assert known.all() or not layout.rank(rank)[name].sources, (case.name, rank, name)
                compared += int(known.sum())
        families.add(case.folder.name)
        if os.environ.get("RESHARD_UPDATE_GOLDEN"):
            config = json.loads((case.folder / "config.json").read_text())
            versions = {n: importlib.metadata.version(n) for n in ("transformers", "torch")}
            write_layout(
                "transformers", case.folder.name, versions, config, case.parallelism, layout
            )
    assert len(families) >= 60 and compared > 5_000_000, (len(families), compared)
