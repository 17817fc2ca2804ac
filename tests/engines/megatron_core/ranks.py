"""Runs of Megatron-core's ranks as processes, and what they saved as recordings for other tests."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from live_processes import run_rank_programs

RECORDINGS = Path(__file__).parents[2] / "golden" / "megatron_checkpoints"
SMALL = {"layers": 2, "hidden": 8, "heads": 2, "groups": 2, "ffn": 8, "vocab": 8}
# Buckets whose length is no multiple of what Megatron-core pads to are more than it can save.
WIDER = {"hidden": 16, "heads": 4, "groups": 2, "ffn": 16, "vocab": 24}
THEN = {"heads": 4, "groups": 2, "ffn": 12, "vocab": 16, "then": "then"}
EVERY = ("legacy", "dp_reshardable", "dp_zero_gather_scatter")
# By name: ranks, what the job says, and how else the same state is saved.
RUNS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "tensor": (4, {"sizes": {"tp": 2}}, EVERY),
    "stages": (4, {"sizes": {"pp": 2}, "tied": True, **WIDER}, EVERY),
    "experts": (2, {"sizes": {"ep": 2}, "experts": 4}, EVERY),
    "grouped": (2, {"sizes": {"ep": 2}, "experts": 4, "grouped": True}, EVERY[:2]),
    "grouped_parts": (
        *(2, {"sizes": {"tp": 2}, "experts": 2, "grouped": True, "distributed_optimizer": False}),
        ("legacy",),
    ),
    "undistributed": (2, {"sizes": {"tp": 2}, "distributed_optimizer": False}, ("legacy",)),
    "scaled": (2, {"sizes": {"ep": 2}, "experts": 4, "fp16": True}, EVERY[:2]),
    "virtual": (2, {"sizes": {"pp": 2, "vp": 2}, "layers": 4}, EVERY),
    "buckets": (2, {"bucket_size": 1000, "bias": True, "qk_norm": True, **WIDER}, EVERY),
    # Models of the Hub's architectures, with what they compute and their next step.
    "llama": (2, {"sizes": {"tp": 2}, "fp32": True, **THEN}, ()),
    "mixtral": (2, {"sizes": {"ep": 2}, "fp32": True, "experts": 4, **THEN}, ()),
    "halves": (2, {"sizes": {"tp": 2}, **THEN}, ()),
    "singleton": (2, {"sizes": {"ep": 2}, "experts": 4, "singleton": True}, ()),
}


def run_ranks(world: int, job: dict[str, Any], folder: Path) -> None:
    """Run a job on so many ranks; an error has what the failing one printed."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    program = Path(__file__).with_name("training_process.py")
    run_rank_programs([sys.executable, program, path], world)


def save_run(name: str, folder: Path) -> dict[str, Path]:
    """Run and save one of `RUNS`; the folders by how they were saved."""
    world, job, others = RUNS[name]
    places = {how: folder / how for how in ("fully_reshardable", *others)}
    more = [
        {"save": str(places[how])}
        | ({"save_format": "legacy"} if how == "legacy" else {"sharding_type": how})
        for how in others
    ]
    own = {**SMALL, **job, "steps": 2, "save": str(places["fully_reshardable"]), "more": more}
    if "then" in own:
        places["then"] = folder / own["then"]
        own["then"] = str(places["then"])
    run_ranks(world, own, folder)
    return places


def record(name: str, places: dict[str, Path]) -> None:
    """Keep what a run saved, for tests without Megatron-core."""
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(RECORDINGS / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for how, folder in places.items():
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    info = archive.gettarinfo(path, f"{how}/{path.relative_to(folder).as_posix()}")
                    info.uid = info.gid = info.mtime = 0
                    info.uname = info.gname = ""
                    with path.open("rb") as content:
                        archive.addfile(info, content)


if __name__ == "__main__":
    import tempfile

    for run in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            record(run, save_run(run, Path(scratch)))
