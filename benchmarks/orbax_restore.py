"""Restoring an Orbax checkpoint under another sharding: reshard beside Orbax itself.

`python benchmarks/orbax_restore.py [MIB]` saves MIB (1024) of float32 with Orbax, cut by rows
over 8 simulated devices, compressed and not; then, each in a process of its own, in turns:

    Orbax     restores it cut by columns over 8 devices (`StandardCheckpointer`)
    reshard   loads the parts of 8 ranks, cut by columns, one rank after another, in one process
    reshard   converts it into an Orbax checkpoint cut by columns

Run it in the environment that `make engines ENGINES=orbax` makes. Seconds are of the work alone;
*memory* is the most that was resident beyond what imports and the arrays themselves take; *read* is
what the files' bytes asked for are over those that are needed, as the system counts reads
(`rchar`). The files are in the page cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

ROWS, COLUMNS = 4096, 2048
RUNS = 3


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise SystemExit(f"this system does not tell {name}")


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def make_sharding(*cut: str | None) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(*cut))


def save(folder: Path, mebibytes: int) -> None:
    import jax
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)
    count = max(1, (mebibytes << 20) // (ROWS * COLUMNS * 4))
    rows = make_sharding("x", None)
    state = {
        f"w{n}": jax.device_put(random.standard_normal((ROWS, COLUMNS), np.float32), rows)
        for n in range(count)
    }
    for name, options in (("zstd", {}), ("plain", {"use_compression": False})):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as saver:
            saver.save(folder / name, args=ocp.args.PyTreeSave(state))


def by_orbax(source: Path) -> int:
    import jax
    import orbax.checkpoint as ocp

    columns = make_sharding(None, "x")
    names = json.loads((source / "_METADATA").read_text())["tree_metadata"]
    wanted = {
        name[2:-3]: jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32, sharding=columns)
        for name in names
    }
    with ocp.StandardCheckpointer() as saver:
        found = saver.restore(source, wanted)
    jax.block_until_ready(found)
    return sum(array.nbytes for array in found.values())


def by_load(source: Path) -> int:
    import reshard
    from reshard import checkpoint
    from reshard.checkpoint.blocks.block_io import open_sources

    found = checkpoint.open(source)
    columns = reshard.spec(reshard.DeviceMesh.of(x=8), "-, x").layout((ROWS, COLUMNS))
    layouts = dict.fromkeys(found, columns)
    files = open_sources(found, source.parent)
    arrays = [checkpoint.load(found, layouts, rank=rank, files=files) for rank in range(8)]
    files.close()
    return sum(array.nbytes for one in arrays for array in one.values())


def by_convert(source: Path) -> int:
    from reshard import checkpoint

    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        target = Path(name) / "t"
        checkpoint.convert(source, target, to="x=8", rules=["*=-, x"], format="orbax")
    return 0


WAYS = {"Orbax": by_orbax, "reshard load": by_load, "reshard convert": by_convert}


def measure(way: str, source: Path) -> None:
    if way == "Orbax":
        import jax
        import orbax.checkpoint  # noqa: F401

        jax.devices()
    else:
        import reshard.checkpoint

        _ = reshard.checkpoint.convert
    Path("/proc/self/clear_refs").write_text("5")
    before, began_s, read = status_bytes("VmRSS"), time.monotonic(), read_bytes()
    arrays = WAYS[way](source)
    seconds_s = time.monotonic() - began_s
    held = status_bytes("VmHWM") - before - arrays
    print(json.dumps([seconds_s, held, read_bytes() - read]))


def main(mebibytes: int) -> None:
    print("| checkpoint | way | seconds | memory MiB | read / needed |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as name:
        folder = Path(name)
        command = [sys.executable, __file__]
        subprocess.run([*command, "save", name, str(mebibytes)], check=True)
        for kind in ("zstd", "plain"):
            data = (folder / kind).rglob("*/d/*")
            needed = sum(path.stat().st_size for path in data if "process" in str(path))
            results: dict[str, list[list[float]]] = {way: [] for way in WAYS}
            for _ in range(RUNS):
                for way in WAYS:
                    arguments = [*command, way, str(folder / kind)]
                    run = subprocess.run(arguments, check=True, capture_output=True, text=True)
                    results[way].append(json.loads(run.stdout.splitlines()[-1]))
            for way, rows in results.items():
                seconds, held, read = (min(column) for column in zip(*rows, strict=True))
                print(
                    f"| {kind} | {way} | {seconds:.2f} | {held / 2**20:.0f} | {read / needed:.2f} |"
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["save"]:
        save(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] and sys.argv[1] in WAYS:
        measure(sys.argv[1], Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 1024)
