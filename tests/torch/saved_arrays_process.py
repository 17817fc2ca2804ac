"""One rank of a job that saves arrays in shards of every kind, and loads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.checkpoint
import reshard.spmd as sp
from rank_cases import reported
from reshard import spec
from reshard.errors import PlanError, RunError, UsageError
from spmd.saved_trees import TURNED, elements_of, expect_elements, make_tree


def _refuse_together(folder: Path, x: Any) -> None:
    """What one rank alone does wrong is refused on all, before anything moves or is written."""
    rank, target = dist.get_rank(), folder / "alone"
    pending = sp.sum(x, axis=0)
    assert "sum" in str(pending.spec)
    wrong: list[tuple[int, str, Callable[[bool], Any]]] = [
        (2, "'y' is 3, a int", lambda own: sp.save(target, {"p": pending, "y": 3 if own else x})),
        (0, "'y' is None", lambda own: sp.save(target, {"y": "None" if own else pending})),
        (3, "unknown format 'no'", lambda own: sp.save(target, {"p": pending}, format=_name(own))),
        (1, "two arrays are named 'a.b'", lambda own: sp.save_async(target, _repeat(x, own))),
    ]
    for who, said, save in wrong:
        kind, told = (UsageError, "") if rank == who else (RunError, f"not begun: .*rank {who}: .*")
        with pytest.raises(kind, match=told + said.replace("None", "'None'")):
            save(rank == who)
    with pytest.raises(PlanError, match="'the target': ranks 0, 2, 3 mean one thing; rank 1"):
        sp.save(folder / ("other" if rank == 1 else "alone"), {"x": x})
    assert not target.exists() and not (folder / "other").exists()


def _name(is_wrong: bool) -> str:
    return "no" if is_wrong else "safetensors"


def _repeat(x: Any, is_repeated: bool) -> dict[str, Any]:
    return {"a.b": x, "a": {"b": x} if is_repeated else x}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    folder = Path(sys.argv[1])
    with sp.running(sp.over_processes()):
        tree = make_tree()
        for format in ("safetensors", "torch-dcp", "sharded-safetensors"):
            with reported(f"arrays of {format} are loaded as they were saved"):
                sp.save(folder / format, tree, format=format)
                found = sp.load(folder / format, tree)
                expect_elements(found)
                assert found["layers"][0].spec is tree["layers"][0].spec
                (shard,) = found["layers"][0].shards.values()
                (own,) = tree["layers"][0].shards.values()
                assert torch.equal(shard, own)
        with reported("an array is loaded in another sharding"):
            like = {"weights": {"up": sp.abstract((7, 5), "float32", spec(TURNED, "-, t"))}}
            up = sp.load(folder / "torch-dcp", like)["weights"]["up"]
            expected = torch.from_numpy(elements_of("weights.up", (7, 5))).float()
            assert str(up.spec) == "-, t" and torch.equal(up.to_dense(), expected)
        with reported("operations continue during a save"):
            # Steps go on beside a save, with messages of their own.
            x = tree["weights"]["up"]
            saving = sp.save_async(folder / "beside", tree)
            for _ in range(20):
                x = sp.tanh(sp.sum(x, axis=0) + tree["weights"]["up"])
            saving.result()
            expect_elements(sp.load(folder / "beside", tree))
        with reported("all ranks refuse a save together"):
            # All ranks hear what is refused, and what is there stays.
            with pytest.raises(UsageError, match="give overwrite=True"):
                sp.save(folder / "beside", {"x": x})
            with pytest.raises(UsageError, match="an array in shards was expected"):
                sp.save(folder / "other", {"x": 3})
            _refuse_together(folder, x)
            expect_elements(sp.load(folder / "beside", tree))
            (folder / "file").write_text("in the way")
            with pytest.raises(RunError, match="cannot make the folder"):
                sp.save(folder / "file" / "none", {"x": x})
            sp.save(folder / "beside", {"x": x}, overwrite=True)
            assert list(reshard.checkpoint.open(folder / "beside").tensors) == ["x"]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
