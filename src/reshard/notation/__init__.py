"""Shardings in the words of other systems: their texts and live objects, both ways.

Start at `registry`: a row for each notation, and the notation that a text is written in. A notation
is a module (`mlir`, `jax`, `hlo`, `shardy`, `scalapack`, `megatron`, `dtensor`, `partitioned`,
`ragged`) with `parse_NAME` and `NAME_text`, and in `jax` and `dtensor` also functions for live
objects; torch and jax are not imported for them.

    parsing         tools that they share: a scanner, and the vocabulary of a notation
    objects         `sharding_of`: the sharding of a live object of any system
    flat_buffer     the long buffers of ZeRO and FSDP

Their public names are names of this package, too; each is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach
from reshard.notation.registry import (
    NOTATIONS,
    Notation,
    ParsedSharding,
    list_public_names,
    read_sharding,
    write_sharding,
)

if TYPE_CHECKING:
    from reshard.notation.dtensor import (
        dtensor_text,
        parse_dtensor,
        parse_partitioned,
        partitioned_text,
        sharding_of_dtensor,
        sharding_of_placements,
        to_placements,
    )
    from reshard.notation.flat_buffer import FlatBuffer
    from reshard.notation.hlo import hlo_text, parse_hlo
    from reshard.notation.jax import (
        jax_text,
        parse_jax,
        sharding_of_jax,
        to_named_sharding,
        to_partition_spec,
    )
    from reshard.notation.megatron import megatron_text, parse_megatron
    from reshard.notation.mlir import (
        mlir_mesh_text,
        mlir_operation_text,
        mlir_text,
        parse_mlir,
        parse_mlir_mesh,
    )
    from reshard.notation.objects import sharding_of
    from reshard.notation.partitioned import PartitionedShard
    from reshard.notation.ragged import RaggedShard, parse_ragged, ragged_layout, ragged_text
    from reshard.notation.registry import native_text, parse_native
    from reshard.notation.scalapack import Descriptor, parse_scalapack, process_grid, scalapack_text
    from reshard.notation.shardy import (
        parse_shardy,
        parse_shardy_mesh,
        shardy_mesh_text,
        shardy_text,
    )

__all__ = [
    "NOTATIONS",
    "Descriptor",
    "FlatBuffer",
    "Notation",
    "ParsedSharding",
    "PartitionedShard",
    "RaggedShard",
    "dtensor_text",
    "hlo_text",
    "jax_text",
    "megatron_text",
    "mlir_mesh_text",
    "mlir_operation_text",
    "mlir_text",
    "native_text",
    "parse_dtensor",
    "parse_hlo",
    "parse_jax",
    "parse_megatron",
    "parse_mlir",
    "parse_mlir_mesh",
    "parse_native",
    "parse_partitioned",
    "parse_ragged",
    "parse_scalapack",
    "parse_shardy",
    "parse_shardy_mesh",
    "partitioned_text",
    "process_grid",
    "ragged_layout",
    "ragged_text",
    "read_sharding",
    "scalapack_text",
    "sharding_of",
    "sharding_of_dtensor",
    "sharding_of_jax",
    "sharding_of_placements",
    "shardy_mesh_text",
    "shardy_text",
    "to_named_sharding",
    "to_partition_spec",
    "to_placements",
    "write_sharding",
]

__getattr__, __dir__ = attach(
    __name__,
    list_public_names(),
    {
        "reshard.notation.dtensor": [
            "sharding_of_dtensor",
            "sharding_of_placements",
            "to_placements",
        ],
        "reshard.notation.flat_buffer": ["FlatBuffer"],
        "reshard.notation.jax": ["sharding_of_jax", "to_named_sharding", "to_partition_spec"],
        "reshard.notation.mlir": ["mlir_mesh_text", "mlir_operation_text", "parse_mlir_mesh"],
        "reshard.notation.objects": ["sharding_of"],
        "reshard.notation.partitioned": ["PartitionedShard"],
        "reshard.notation.ragged": ["ragged_layout", "RaggedShard"],
        "reshard.notation.scalapack": ["Descriptor", "process_grid"],
        "reshard.notation.shardy": ["parse_shardy_mesh", "shardy_mesh_text"],
    },
)
