"""Namespaces whose functions that make arrays shard them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import reshard.spmd as sp
from array_api_suite.shardings import sharded

# The suite makes all its operands by these: Hypothesis by `asarray` and `reshape`.
CREATION = (
    *("arange", "asarray", "empty", "empty_like", "eye", "from_dlpack", "full", "full_like"),
    *("linspace", "ones", "ones_like", "reshape", "zeros", "zeros_like"),
)


def sharding_functions(library: str) -> Mapping[str, Callable[..., Any]]:
    """The functions that make arrays, by name, over shards of a library."""
    runner = sp.in_process(library)

    def sharding(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def make(*arguments: Any, **options: Any) -> Any:
            with sp.running(runner):
                return sharded(function(*arguments, **options))

        return make

    return {name: sharding(getattr(sp, name)) for name in CREATION}
