"""Tools for tests of software that uses reshard.

oracle            the meaning of layouts and changes, element by element, by brute force
rule_definitions  cut rules, as their sources define them
strategies        Hypothesis strategies for layouts, meshes and shardings
shard_dialect     modules of MLIR's `shard` dialect: parsed, checked, and run on arrays
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.testing import oracle, rule_definitions
from reshard.testing.shard_dialect import parse_shard_module, run_shard_module

if TYPE_CHECKING:
    from reshard.testing import strategies

__all__ = [
    "oracle",
    "parse_shard_module",
    "rule_definitions",
    "run_shard_module",
    "strategies",
]


def __getattr__(name: str) -> Any:
    # The rest is of use without Hypothesis, which only the strategies need.
    if name == "strategies":
        import reshard.testing.strategies as found

        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
