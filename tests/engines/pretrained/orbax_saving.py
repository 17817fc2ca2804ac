"""Orbax saves the weights of a recorded model, with a state of Optax: over eight devices.

`python orbax_saving.py RECORD FOLDER`: Orbax has no models, so the live model is the record's.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from engines.orbax.saving import make_mesh
from reshard import checkpoint


def main(record: Path, folder: Path) -> None:
    live = checkpoint.open(record / "live.pt")
    mesh = make_mesh((4, 2), ("x", "y"))
    params: dict[str, Any] = {}
    for name in live:
        array = np.asarray(checkpoint.read_tensor(live, name))
        cut = PartitionSpec("y") if array.shape[0] % 2 == 0 else PartitionSpec()
        *path, last = name.split(".")
        level = params
        for part in path:
            level = level.setdefault(part, {})
        level[last] = jax.device_put(jnp.asarray(array), NamedSharding(mesh, cut))
    optimizer = optax.adamw(1e-3)
    state = {"step": jnp.int32(2), "params": params, "opt_state": optimizer.init(params)}
    with ocp.CheckpointManager((folder / "saved").resolve()) as manager:
        manager.save(2, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    for name in ("live.pt", "logits.json", "config.json"):
        shutil.copyfile(record / name, folder / name)
    program = f"orbax-checkpoint {ocp.__version__}, jax {jax.__version__}"
    (folder / "program.txt").write_text(f"{program}; {(record / 'program.txt').read_text()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
