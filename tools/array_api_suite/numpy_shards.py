"""`reshard.spmd`, but that arrays are made in shards of NumPy."""

from __future__ import annotations

from typing import Any

import reshard.spmd as sp
from array_api_suite.namespace import sharding_functions

__array_api_version__ = sp.__array_api_version__
globals().update(sharding_functions("numpy"))


def __getattr__(name: str) -> Any:
    return getattr(sp, name)
