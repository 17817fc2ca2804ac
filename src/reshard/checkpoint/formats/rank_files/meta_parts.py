"""How Meta's Llama is sharded over `consolidated.*.pth`, of which each has plain tensors.

Its own model says which dimension of a tensor is over the files, and `params.json` next to them how
long dimensions are. The embedding is over its columns in Llama 1 and 2, and over its rows in
Llama 3; its shape tells which.

Source: `llama/model.py` of Meta, with fairscale's `ParallelEmbedding`, `ColumnParallelLinear`
and `RowParallelLinear`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.checkpoint.formats.rank_files.joining import Parts
from reshard.checkpoint.formats.source_sharding import SourceSharding
from reshard.errors import UsageError

PARAMETERS = "params.json"
_EMBEDDING = "tok_embeddings.weight"
_RULES = (
    *("*.attention.w[qkv].weight=mp, -", "*.attention.wo.weight=-, mp"),
    *("*.feed_forward.w[13].weight=mp, -", "*.feed_forward.w2.weight=-, mp"),
    "output.weight=mp, -",
)


def find_meta_cut(folder: Path, parts: Mapping[str, Parts], ranks: int) -> SourceSharding | None:
    """Return how files of Meta's Llama shard its tensors; None for files of others.

    Raises:
        UsageError: files of Meta's Llama whose sharding is not known: without `params.json`, or
            with fewer key/value heads than files.
    """
    names = {file for of_ranks in parts.values() for file, _ in of_ranks.values()}
    if not all(name.startswith("consolidated.") for name in names) or _EMBEDDING not in parts:
        return None
    given = _read_parameters(folder)
    if given is None:
        raise UsageError(
            f"{folder} has consolidated.* files of {ranks} ranks and no {PARAMETERS}, which says "
            f"how long their dimensions are; put the {PARAMETERS} of this model next to the files, "
            f"or give the mesh and rules: --source-mesh tp={ranks} --source-rule 'PATTERN=tp, -'"
        )
    heads = given.get("n_kv_heads") or given.get("n_heads")
    if not isinstance(heads, int) or heads % ranks:
        raise UsageError(
            f"{folder} has consolidated.* files of {ranks} ranks, and {PARAMETERS} {heads} "
            "key/value heads, which they do not divide: which ranks hold which heads is not known; "
            f"give the mesh and rules: --source-mesh tp={ranks} --source-rule 'PATTERN=tp, -'"
        )
    _, first = next(iter(parts[_EMBEDDING].values()))
    is_by_columns = first.shape[-1] != given.get("dim")
    embedding = f"{_EMBEDDING}={'-, mp' if is_by_columns else 'mp, -'}"
    return SourceSharding.of(f"mp={ranks}", (embedding, *_RULES, "*=..."))


def _read_parameters(folder: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads((folder / PARAMETERS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
