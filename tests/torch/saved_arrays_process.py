"""One rank of a job that saves arrays in shards of every kind, and loads them."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import reshard.checkpoint
import reshard.spmd as sp
from reshard import spec
from reshard.errors import RunError, UsageError
from spmd.saved_trees import TURNED, elements_of, expect_elements, make_tree


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    folder = Path(sys.argv[1])
    with sp.running(sp.over_processes()):
        tree = make_tree()
        for format in ("safetensors", "torch-dcp", "sharded-safetensors"):
            sp.save(folder / format, tree, format=format)
            found = sp.load(folder / format, tree)
            expect_elements(found)
            assert found["layers"][0].spec is tree["layers"][0].spec
            (shard,) = found["layers"][0].shards.values()
            (own,) = tree["layers"][0].shards.values()
            assert torch.equal(shard, own)
        like = {"weights": {"up": sp.abstract((7, 5), "float32", spec(TURNED, "-, t"))}}
        up = sp.load(folder / "torch-dcp", like)["weights"]["up"]
        expected = torch.from_numpy(elements_of("weights.up", (7, 5))).float()
        assert str(up.spec) == "-, t" and torch.equal(up.to_dense(), expected)
        # Steps go on beside a save, with messages of their own.
        x = tree["weights"]["up"]
        saving = sp.save_async(folder / "beside", tree)
        for _ in range(20):
            x = sp.tanh(sp.sum(x, axis=0) + tree["weights"]["up"])
        saving.result()
        expect_elements(sp.load(folder / "beside", tree))
        # All ranks hear what is refused, and what is there stays.
        with pytest.raises(UsageError, match="give overwrite=True"):
            sp.save(folder / "beside", {"x": x})
        with pytest.raises(UsageError, match="an array in shards was expected"):
            sp.save(folder / "other", {"x": 3})
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
