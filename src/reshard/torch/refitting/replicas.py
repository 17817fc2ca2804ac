"""Replicas of tensors on several ranks, compared by digests.

A layout says that ranks have the same part of a tensor. Whether they have the same values is told
by a digest of each: every rank says those of the parts that others have too, and all compare them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np
import torch

from reshard.errors import ShardError
from reshard.layout import Layout
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import cells_of
from reshard.torch.models.memory import tensor_digest
from reshard.torch.refitting.plan import PartItem

_SHOWN = 20


def check_replicas(
    items: Iterable[PartItem],
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    group: RankGroup,
) -> None:
    """Compare what several ranks have, as all of them say. All ranks call this.

    Args:
        items: this rank's part of the plan.
        source, target: this rank's local tensors by name.
        group: of all ranks.

    Raises ShardError, on all ranks, where replicas differ.
    """
    own: dict[str, str] = {}
    for item in items:
        match = item.match
        sides = [("source", match.source, match.source_view(source, group.rank))]
        # What a transform makes has a layout of its own.
        if not match.made_at:
            sides.append(("target", match.target, match.target_view(target, group.rank)))
        for side, layout, local in sides:
            for key, digest in _describe_cells(layout, group.rank, local):
                own[f"{match.name} of the {side}, {key}"] = digest
    found = gather(json.dumps(own).encode(), group).values
    by_key: dict[str, dict[str, int]] = {}
    for rank, text in found.items():
        for key, digest in json.loads(text).items():
            by_key.setdefault(key, {}).setdefault(digest, rank)
    wrong = [
        f"{key}: {' and '.join(f'rank {rank}' for rank in list(ranks.values())[:2])} differ"
        for key, ranks in by_key.items()
        if len(ranks) > 1
    ]
    if wrong:
        rest = len(wrong) - _SHOWN
        lines = [*wrong[:_SHOWN], *([f"... {rest} more"] if rest > 0 else [])]
        group.raise_on_all(
            ShardError(
                f"{len(wrong)} replicas are not equal; whose values count?\n  " + "\n  ".join(lines)
            )
        )


def _describe_cells(
    layout: Layout, rank: int, local: torch.Tensor | None
) -> Iterator[tuple[str, str]]:
    """Each part that other ranks have as well: which it is, and its digest."""
    shared = _find_shared_cells(layout)
    for cell, tensor in cells_of(layout, rank, local).items():
        if shared[cell]:
            part = ", ".join(map(str, layout.cell_part[cell].tolist()))
            yield f"part ({part})", tensor_digest(tensor)


@lru_cache(maxsize=1024)
def _find_shared_cells(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether a cell's part is on another rank too: shape `(cells,)`."""
    if layout.contributions > 1 or not layout.ndim:
        # Ranks of one part have different contributions to it; of a number all have the whole.
        return np.full(layout.cells, layout.contributions == 1 < layout.cells)
    _, which, counts = np.unique(layout.cell_part, axis=0, return_inverse=True, return_counts=True)
    return np.asarray(counts[which.reshape(-1)] > 1)
