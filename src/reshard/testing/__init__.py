"""Modules of MLIR's `shard` dialect, parsed, checked and run on arrays (`shard_dialect`).

They show what a lowered program computes, without a compiler.
"""

from reshard.testing.shard_dialect import parse_shard_module, run_shard_module

__all__ = ["parse_shard_module", "run_shard_module"]
