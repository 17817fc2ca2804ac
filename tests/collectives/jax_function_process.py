"""Run by test_jax_lowering with 8 devices: the functions that are written, on JAX's devices.

Reads cases as JSON from the standard input, and writes one answer a case.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def answer(case: dict[str, Any]) -> str:
    import jax
    import jax.numpy as jnp
    import numpy as np

    made: dict[str, Any] = {}
    exec(case["module"], made)
    shape = tuple(case["shape"])
    stacked = np.arange(case["contributions"] * int(np.prod(shape)), dtype=np.float32) % 251
    whole = stacked.reshape(case["contributions"], *shape)
    combined = getattr(whole, case["reduction"])(axis=0)
    given = whole if case["contributions"] > 1 else combined
    devices = {device.id: device for device in jax.devices()}

    def placed(value: Any, side: dict[str, Any]) -> Any:
        grid = np.array([devices[rank] for rank in side["devices"]], dtype=object)
        mesh = jax.sharding.Mesh(grid.reshape(side["sizes"]), tuple(side["names"]))
        entries = [tuple(axes) or None for axes in side["entries"]]
        spec = jax.sharding.PartitionSpec(*entries)
        return jax.device_put(jnp.asarray(value), jax.sharding.NamedSharding(mesh, spec))

    found = made["reshard"](placed(given, case["source"]))
    wanted = placed(combined, case["target"])
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.shape} {found.dtype}, not {wanted.shape} {wanted.dtype}"
    expected = {shard.device.id: np.asarray(shard.data) for shard in wanted.addressable_shards}
    for shard in found.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), expected[shard.device.id]):
            return f"other elements on device {shard.device.id}"
    return "same" if len(expected) == len(found.addressable_shards) else "other devices"


def main() -> None:
    json.dump([answer(case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
