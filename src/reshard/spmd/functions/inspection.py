"""Inspection of the namespace, as the array API defines it."""

from __future__ import annotations

from typing import Any

from reshard.dtypes import DType
from reshard.spmd.core.result_types import BY_KIND
from reshard.spmd.functions import data_types
from reshard.spmd.functions.data_types import check_device, isdtype


class NamespaceInfo:
    """Answers about the namespace `reshard.spmd`. Get one by `__array_namespace_info__()`.

    >>> NamespaceInfo().default_dtypes()["real floating"]
    DType('float64')
    """

    def capabilities(self) -> dict[str, Any]:
        """The capabilities that the standard leaves open."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """The device of new arrays by default."""
        return "cpu"

    def devices(self) -> list[str]:
        """The devices that arrays can be made on. Meshes say where shards are."""
        return ["cpu"]

    def default_dtypes(self, *, device: object = None) -> dict[str, DType]:
        """The types that numbers get, by kind."""
        check_device(device)
        return {
            "real floating": data_types.float64,
            "complex floating": data_types.complex128,
            "integral": data_types.int64,
            "indexing": data_types.int64,
        }

    def dtypes(self, *, device: object = None, kind: Any = None) -> dict[str, DType]:
        """The types of a kind, or of several; all when None."""
        check_device(device)
        return {
            one.name: one
            for types in BY_KIND.values()
            for one in types
            if kind is None or isdtype(one, kind)
        }


def namespace_info() -> NamespaceInfo:
    """The object with which the namespace describes itself."""
    return NamespaceInfo()
