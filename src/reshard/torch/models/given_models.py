"""Models as they are given to a rank, and how each of their tensors is known to be cut.

=============================  ==================================================================
a model on one rank            how its tensors are cut
a module, a state dict         DTensors as they say; other tensors are whole on every rank that
                               has them. Parameters and persistent buffers count
`{name: (tensor, Layout)}`     as the layouts say, over the ranks of the model
`{name: PartitionedTensor}`    as its placement says, where all ranks know all splits
`MegatronModel`                as Megatron's attributes of all ranks together say, which are where
                               sizes or live process groups say (`megatron_groups`)
`by_recipe(...)`               as the rules of a recipe cut the whole tensors (`recipe_models`)
`None`                         the rank has nothing
=============================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from reshard.errors import UsageError
from reshard.megatron.names import MegatronNames


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A rank's model chunks, whose parameters carry Megatron's attributes.

    The arrangement of the ranks is given either by sizes (`names`), or by the process groups of the
    job (`groups`).

    Args:
        chunks: a module, or one for each virtual stage of this rank.
        names: the ranks, and how they name their layers and experts; the same on every rank.
        parameters: information that the attributes lack, by local name or pattern: fields of
            `LocalParameter` such as `heads`, `true_length` or `is_expert`.
        groups: this rank's process groups, instead of names: an object or a dictionary with torch's
            groups, or lists of their ranks, as `tp`, `pp`, `ep`, `expt_tp` (or `etp`), `cp`, `dp`,
            `expt_dp` (or `edp`), as far as they exist. Without names and groups, the
            `pg_collection` of the first chunk is used. Groups have global ranks, so no offset is
            added; the layers of all stages are counted.
        stack: the module whose numbered layers are distributed over the pipeline, if groups are
            given.
        config: of the model on the Hub: the content of its config.json, or transformers' object.
            When None, the configs of the modules are used (`megatron_configs`).
        problems: why the model cannot be used on this rank, for all ranks to raise.
    """

    chunks: torch.nn.Module | Sequence[torch.nn.Module]
    names: MegatronNames | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Any = None
    stack: str = "decoder.layers"
    config: Any = None
    problems: tuple[str, ...] = ()


class LaidModel(dict[str, Any]):
    """`{name: (tensor, Layout)}`, made of a model of other names.

    `module` is what it was made of, if that is one. `own_names` are the model's, where they
    differ. `problems` are why it cannot be used on this rank: a refit raises them on every rank,
    where an error of one would let the others wait.
    `first_rank` is the rank of this process's job that the layouts call 0.
    """

    def __init__(self, first_rank: int = 0) -> None:
        super().__init__()
        self.first_rank = first_rank
        self.module: torch.nn.Module | None = None
        self.own_names: dict[str, str] = {}
        self.problems: list[str] = []


Model: TypeAlias = "torch.nn.Module | Mapping[str, Any] | MegatronModel | None"


def chunks_of(model: MegatronModel) -> list[torch.nn.Module]:
    """A model's chunks."""
    given = model.chunks
    if isinstance(given, torch.nn.Module):
        return [given]
    if not isinstance(given, Sequence) or not all(isinstance(c, torch.nn.Module) for c in given):
        raise UsageError(f"a MegatronModel of {given!r}; give a module, or a list of modules")
    return list(given)
