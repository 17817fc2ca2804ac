"""One process of a job that reshards by `parallel`, and says what it copied and allocated.

Arguments: a folder with the arrays of each source rank, the number of those, and of target ranks.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np

import reshard
from reshard.checkpoint.processes import running_processes
from reshard.recipes.resharding import TensorMetadata, create_strategy


def main(folder: Path, sources: int, targets: int) -> None:
    held = [
        {path.stem: np.load(path, mmap_mode="r") for path in sorted((folder / str(rank)).iterdir())}
        for rank in range(sources)
    ]
    mesh = reshard.DeviceMesh.of(x=sources)
    metadata = {}
    for name, array in held[0].items():
        shape = (sum(len(named[name]) for named in held), *array.shape[1:])
        layout = reshard.spec(mesh, ", ".join(["x", *"-" * (array.ndim - 1)])).layout(shape)
        metadata[name] = TensorMetadata(array.dtype, layout)
    with running_processes() as coordinator:
        strategy = create_strategy("parallel", coordinator)
        plan = strategy.create_plan(metadata, targets)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        result = strategy.execute(plan, held)
        _, peak = tracemalloc.get_traced_memory()
        for rank, named in result.target_shards.items():
            for name, array in named.items():
                whole = np.concatenate([shard[name] for shard in held])
                np.testing.assert_array_equal(array, np.array_split(whole, targets)[rank])
    told = {"copied_bytes": result.copied_bytes, "allocated_bytes": peak - before}
    sys.stdout.write(json.dumps(told | {"ranks": list(result.target_shards)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
