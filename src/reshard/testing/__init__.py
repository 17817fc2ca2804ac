"""For tests of software that uses reshard.

oracle            what layouts and changes mean, element by element, by brute force
rule_definitions  cut rules, as their sources define them
strategies        layouts, meshes and shardings for Hypothesis, which it needs
shard_text        modules of MLIR's `shard` dialect read back, every operation checked
shard_run         such modules carried out on arrays
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.testing import oracle, rule_definitions
from reshard.testing.shard_run import run_shard_module
from reshard.testing.shard_text import parse_shard_module

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
