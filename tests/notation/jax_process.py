"""Run by test_jax with 8 devices: what JAX says about shardings, and what we make of its objects.

Reads cases as JSON from the standard input, and writes one answer a case. The shardings are
built here from the cases, with nothing of reshard's.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def answer(case: dict[str, Any]) -> dict[str, Any]:
    import jax
    import numpy as np

    from reshard.notation.jax import parse_jax, sharding_of_jax, to_named_sharding

    spec_type = jax.sharding.PartitionSpec
    entries = [
        spec_type.UNCONSTRAINED if entry == "?" else tuple(entry) if entry else None
        for entry in case["entries"]
    ]
    axis_type = jax.sharding.AxisType
    unreduced = set(case["unreduced"])
    mesh = jax.sharding.Mesh(
        np.array(jax.devices())[case["devices"]].reshape(case["mesh_shape"]),
        tuple(case["axis_names"]),
        axis_types=tuple(
            axis_type.Explicit if name in unreduced else axis_type.Auto
            for name in case["axis_names"]
        ),
    )
    partition = spec_type(*entries, unreduced=unreduced)
    sharding = jax.sharding.NamedSharding(mesh, partition)
    shape = tuple(case["shape"])
    # JAX has no index map of a sharding with unreduced axes: devices that differ along them
    # hold the same indices of different contributions.
    reduced = jax.sharding.NamedSharding(mesh, spec_type(*entries))
    indices = reduced.devices_indices_map(shape)
    spec = sharding_of_jax(sharding, shape=shape)
    array_spec = spec
    if not unreduced and "?" not in case["entries"]:
        array_spec = sharding_of_jax(jax.device_put(np.zeros(shape, dtype=np.int8), sharding))
    return {
        "boxes": {
            str(device.id): [
                list(index.indices(size)[:2]) for index, size in zip(box, shape, strict=True)
            ]
            for device, box in indices.items()
        },
        "spec": str(spec),
        "devices": list(spec.mesh.devices),
        "is_same_array_spec": array_spec is spec,
        "is_same_of_partition_spec": sharding_of_jax(partition, spec.mesh, shape) is spec,
        "is_same_of_text": parse_jax(repr(sharding), spec.mesh, shape) is spec
        and parse_jax(repr(partition), spec.mesh, shape) is spec,
        "is_equivalent": to_named_sharding(spec).is_equivalent_to(sharding, len(shape)),
        "is_same_again": sharding_of_jax(to_named_sharding(spec)) is spec,
    }


def other_objects() -> dict[str, Any]:
    """Objects that are not NamedShardings over a mesh of devices, and what is said of them."""
    import jax
    import numpy as np

    from reshard.errors import LayoutError
    from reshard.mesh import DeviceMesh
    from reshard.notation.jax import (
        is_jax,
        mesh_of,
        sharding_of_jax,
        to_named_sharding,
    )
    from reshard.sharding import DimSpec, ShardingSpec

    sharding = jax.sharding
    mesh = sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    single = sharding.SingleDeviceSharding(jax.devices()[3])

    def refusal(of: Any, *arguments: Any) -> str:
        try:
            of(*arguments)
        except LayoutError as error:
            return f"{type(error).__name__}: {error}"
        return "read"

    far = ShardingSpec(DeviceMesh.of(x=2, devices=[1, 9]), [["x"]])
    return {
        "abstract": repr(mesh_of(mesh.abstract_mesh)),
        "reduced": str(
            sharding_of_jax(sharding.PartitionSpec("x", reduced={"y"}), mesh_of(mesh), (4,))
        ),
        "single": str(sharding_of_jax(single, shape=(4, 4))),
        "single_devices": list(sharding_of_jax(single, shape=(4, 4)).mesh.devices),
        "single_array": repr(sharding_of_jax(jax.device_put(np.zeros((2, 3)), jax.devices()[5]))),
        "are_jax": [is_jax(value) for value in (mesh, single, sharding.PartitionSpec(), "x")],
        "refused": [
            refusal(sharding_of_jax, single),
            refusal(sharding_of_jax, sharding.PartitionSpec("x")),
            refusal(sharding_of_jax, sharding.PartitionSpec("z"), DeviceMesh.of(x=2)),
            refusal(sharding_of_jax, mesh),
            refusal(sharding_of_jax, "x"),
            refusal(mesh_of, single),
            refusal(mesh_of, sharding.Mesh(np.array([]), ("x",))),
            refusal(to_named_sharding, far),
            refusal(to_named_sharding, far, jax.devices()[:1]),
            refusal(
                to_named_sharding,
                ShardingSpec(DeviceMesh.of(x=2), [DimSpec(is_open=True)], partial_axes=["x"]),
            ),
        ],
    }


def main() -> None:
    cases = json.load(sys.stdin)
    json.dump({"answers": [answer(case) for case in cases], "others": other_objects()}, sys.stdout)


if __name__ == "__main__":
    main()
