"""Comparison of replicas: parts of a tensor that several ranks have, by their layouts.

Each rank computes digests of the parts that it shares with others, and all ranks gather them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch

from reshard.errors import ShardError
from reshard.layout import Layout
from reshard.runs import find_distinct
from reshard.text import first_lines
from reshard.torch.exchange.agreement import gather
from reshard.torch.exchange.groups import RankGroup
from reshard.torch.exchange.packing.messages import cells_of
from reshard.torch.models.local_tensors import tensor_digest
from reshard.torch.refitting.plan import PartItem

_SHOWN = 20


def compare_replicas(
    items: Iterable[PartItem],
    source: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    group: RankGroup,
) -> None:
    """Compare the parts of tensors that several ranks have. Collective.

    Args:
        items: this rank's part of the plan.
        source, target: this rank's local tensors by name.
        group: of all ranks.

    Raises ShardError, on all ranks, if replicas differ.
    """
    digests: dict[str, str] = {}
    for item in items:
        match = item.match
        sides = [("source", match.source, match.source_view(source, group.rank))]
        # A transform's output has its own layout.
        if not match.made_at:
            sides.append(("target", match.target, match.target_view(target, group.rank)))
        for side, layout, local in sides:
            shared = _find_shared_cells(layout)
            for cell, tensor in cells_of(layout, group.rank, local).items():
                if shared[cell]:
                    part = ", ".join(map(str, layout.cell_part[cell].tolist()))
                    key = f"{match.name} of the {side}, part ({part})"
                    digests[key] = tensor_digest(tensor)
    messages = gather(json.dumps(digests).encode(), group)
    by_key: dict[str, dict[str, int]] = {}
    for rank, text in messages.items():
        for key, digest in json.loads(text).items():
            by_key.setdefault(key, {}).setdefault(digest, rank)
    wrong = [
        f"{key}: {' and '.join(f'rank {rank}' for rank in list(ranks.values())[:2])} differ"
        for key, ranks in by_key.items()
        if len(ranks) > 1
    ]
    if wrong:
        listed = first_lines(wrong, _SHOWN)
        group.raise_on_all(
            ShardError(f"{len(wrong)} replicas are not equal; whose values count?{listed}")
        )


@lru_cache(maxsize=1024)
def _find_shared_cells(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each cell's part is also on another rank: shape `(cells,)`."""
    if layout.contributions > 1 or not layout.ndim:
        # Partial sums differ between ranks; a scalar without them is whole on all ranks.
        return np.full(layout.cells, layout.contributions == 1 < layout.cells)
    _, _, which = find_distinct(layout.cell_part)
    return np.asarray(np.bincount(which)[which] > 1)
