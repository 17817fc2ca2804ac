"""Sharding propagation, and arrays that live in shards and compute at once."""

from __future__ import annotations

from reshard.spmd.rule import OpShardingRule

__all__ = ["OpShardingRule"]
