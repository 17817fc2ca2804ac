"""Tensors of a source that are declared to be one, and are two.

`ties=` fills a target from the tensor of another name. Where the source has a tensor of each name,
as after `copy.deepcopy` of one or in an optimizer that updates both, their elements must be equal:
those of the name that nothing is filled from would be lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from reshard.torch.models.naming import tied_root

Pairs = tuple[tuple[str, str], ...]


def find_tied_pairs(
    ties: Mapping[str, str], locals_of: Mapping[str, torch.Tensor], used: Collection[str]
) -> Pairs:
    """Return pairs of an unused and a used name of one tied tensor, which this rank has apart.

    Args:
        ties: names that refer to the same tensor as another name.
        locals_of: this rank's parts of the source.
        used: names that targets are filled from, on any rank.

    >>> here = torch.zeros(2)
    >>> find_tied_pairs({"head": "embed"}, {"embed": here, "head": torch.ones(2)}, {"embed"})
    (('head', 'embed'),)
    >>> find_tied_pairs({"head": "embed"}, {"embed": here, "head": here}, {"embed"})
    ()
    """
    used_roots = {tied_root(name, ties): name for name in used if name in locals_of}
    pairs = []
    for name, local in locals_of.items():
        other = used_roots.get(tied_root(name, ties))
        if other is None or name in used:
            continue
        # Parts of other shapes are of another sharding: what they share is not on this rank.
        if local.shape == locals_of[other].shape and not _share_memory(local, locals_of[other]):
            pairs.append((name, other))
    return tuple(pairs)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.data_ptr() == other.data_ptr() and one.stride() == other.stride())


def find_difference(pairs: Iterable[tuple[str, str]], locals_of: Mapping[str, torch.Tensor]) -> str:
    """Return which tied tensors differ on this rank and what to do, or an empty text."""
    for name, other in pairs:
        one, two = locals_of[name], locals_of[other]
        if one.dtype != two.dtype or not torch.equal(_bytes_of(one), _bytes_of(two)):
            return (
                f"{name} of the source differs from {other}, to which ties= declares it tied: its "
                "elements would be lost; tie them again (model.tie_weights()), or leave "
                f"{name!r} out of ties="
            )
    return ""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, a NaN is equal to itself.
    return tensor.contiguous().reshape(-1).view(torch.uint8)
