"""A process with 8 devices that runs lowered functions, for test_jax."""

from __future__ import annotations

import json
import sys
from typing import Any

PADDING = {"f": float("nan"), "i": -99}


def answer(case: dict[str, Any]) -> str:
    import jax
    import jax.numpy as jnp
    import numpy as np

    made: dict[str, Any] = {}
    exec(case["module"], made)
    shape = tuple(case["shape"])
    counts = tuple(case["contributions"])
    stacked = np.arange(int(np.prod(counts)) * int(np.prod(shape)))
    # Numbers whose products and sums have no remainder.
    whole = (stacked % (3 if counts else 101) + 1).reshape(*counts, *shape).astype(case["dtype"])
    axes = tuple(n for n, is_reduced in enumerate(case["reduced"]) if is_reduced)
    target = getattr(whole, case["reduction"])(axis=axes).astype(whole.dtype)
    given, target = (
        value.reshape(*([-1] if side["is_partial"] else []), *shape)
        for value, side in ((whole, case["source"]), (target, case["target"]))
    )
    devices = {device.id: device for device in jax.devices()}

    def placed(value: Any, side: dict[str, Any]) -> Any:
        grid = np.array([devices[rank] for rank in side["devices"]], dtype=object)
        mesh = jax.sharding.Mesh(grid.reshape(side["sizes"]), tuple(side["names"]))
        entries = [tuple(axes) or None for axes in side["entries"]]
        spec = jax.sharding.PartitionSpec(*entries)
        # What JAX has to have behind the tensor holds numbers that must not come through.
        width = [(0, size - own) for own, size in zip(shape, side["padded"], strict=True)]
        width = [(0, 0)] * (value.ndim - len(shape)) + width
        whole = jnp.asarray(np.pad(value, width, constant_values=PADDING.get(value.dtype.kind, 0)))
        return jax.device_put(whole, jax.sharding.NamedSharding(mesh, spec))

    found = made["reshard"](placed(given, case["source"]))
    wanted = placed(target, case["target"])
    real = placed(np.ones(target.shape, dtype=bool), case["target"])
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.shape} {found.dtype}, not {wanted.shape} {wanted.dtype}"
    expected = {
        shard.device.id: (np.asarray(shard.data), np.asarray(is_own.data))
        for shard, is_own in zip(wanted.addressable_shards, real.addressable_shards, strict=True)
    }
    for shard in found.addressable_shards:
        values, own = expected[shard.device.id]
        if not np.array_equal(np.asarray(shard.data)[own], values[own]):
            return f"other elements on device {shard.device.id}"
    return "same" if len(expected) == len(found.addressable_shards) else "other devices"


def main() -> None:
    json.dump([answer(case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
