"""Rosters: the parameters of a whole model, gathered from what every rank has.

A rank's roster lists its parameters by local names, one list for each of its model chunks. Put
together, the rosters say what each parameter of the whole model is:

1. local names become global ones (`names`);
2. the ranks that list a name are those that hold it: their places along `pp`, and along `ep` for
   an expert, are where it lives. Every rank at such a place must list it;
3. what the ranks say must agree, but for the local shape: tensor-parallel ranks may have a
   shape of their own where the cut is uneven.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reshard._validation import check_int, check_ints
from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError
from reshard.megatron.names import MegatronNames
from reshard.megatron.parameters import MegatronParameter, Shape
from reshard.megatron.ranks import places_along


@dataclass(frozen=True)
class LocalParameter:
    """One of a rank's parameters, as the rank knows it; see `MegatronParameter` for each field."""

    shape: Shape
    tensor_model_parallel: bool = False
    partition_dim: int = 0
    partition_stride: int = 1
    partition_sizes: tuple[int, ...] | None = None
    heads: int | None = None
    true_length: int | None = None
    is_expert: bool = False
    dtype: str | None = None

    @classmethod
    def of(cls, parameter: Any) -> LocalParameter:
        """The description of a live parameter, a torch tensor with Megatron's attributes.

        A parameter whose gradients are not reduced with the others (`allreduce` is False) belongs
        to an expert.

        >>> import numpy as np
        >>> LocalParameter.of(np.zeros((2, 3), np.float32))  # an array says its shape and dtype
        LocalParameter(shape=(2, 3), tensor_model_parallel=False, partition_dim=0,
        partition_stride=1, partition_sizes=None, heads=None, true_length=None, is_expert=False,
        dtype='float32')
        """
        sizes = getattr(parameter, "partition_sizes", None)
        return cls(
            shape=check_ints(parameter.shape, "shape of a parameter", SpecError),
            tensor_model_parallel=bool(getattr(parameter, "tensor_model_parallel", False)),
            # Megatron marks a parameter that is not cut with the dimension -1.
            partition_dim=check_int(
                getattr(parameter, "partition_dim", 0), "partition_dim", SpecError, minimum=-1
            ),
            partition_stride=check_int(
                getattr(parameter, "partition_stride", 1), "partition_stride", SpecError
            ),
            partition_sizes=None
            if sizes is None
            else check_ints(sizes, "partition_sizes", SpecError),
            is_expert=not bool(getattr(parameter, "allreduce", True)),
            dtype=as_dtype(parameter.dtype).name,
        )


_OTHER_LAYER = re.compile(r"(?:^|\.)layers\.\d+(?=\.|$)")
Roster = Mapping[str, LocalParameter] | Iterable[tuple[str, LocalParameter]]


def gather_parameters(
    names: MegatronNames, rosters: Mapping[int, Sequence[Roster]]
) -> dict[str, MegatronParameter]:
    """The parameters of the whole model, by global name, in the order in which ranks list them.

    Args:
        names: the ranks, and how they name their layers and experts.
        rosters: for every rank, one roster a model chunk.

    Raises:
        SpecError: a rank that is missing or lists a name twice, ranks that disagree, a parameter
            that a rank of its group has not, experts that share one name.
        NotationError: a name of a layer or expert that is not there.

    >>> from reshard.megatron.ranks import MegatronRanks
    >>> half = LocalParameter((4, 2), tensor_model_parallel=True)
    >>> names = MegatronNames(MegatronRanks(tp=2))
    >>> gather_parameters(names, {0: [{"w": half}], 1: [{"w": half}]})["w"].global_shape
    (8, 2)
    """
    ranks = names.ranks
    expected = sorted(ranks.dense.devices)
    if set(rosters) != set(expected):
        missing = sorted(set(expected) - set(rosters))
        raise SpecError(
            f"no roster of rank {missing[0]}; give one for each of the ranks {expected[0]} to "
            f"{expected[-1]}"
            if missing
            else f"a roster of rank {min(set(rosters) - set(expected))}; the ranks are "
            f"{expected[0]} to {expected[-1]}"
        )
    found: dict[str, dict[int, LocalParameter]] = {}
    for rank in expected:
        for chunk, roster in enumerate(rosters[rank]):
            for name, local in roster.items() if isinstance(roster, Mapping) else roster:
                whole = names.global_name(name, rank, chunk)
                held = found.setdefault(whole, {})
                if rank in held:
                    raise SpecError(
                        f"rank {rank} lists {whole!r} twice, as {name!r} of chunk {chunk} again; "
                        "local names become global ones by the layers and experts that names has"
                    )
                held[rank] = local
    return {name: _combine(names, name, held) for name, held in found.items()}


def _combine(
    names: MegatronNames, name: str, held: Mapping[int, LocalParameter]
) -> MegatronParameter:
    ranks = names.ranks
    first_rank, first = next(iter(held.items()))
    for rank, local in held.items():
        # Tensor parallelism may be uneven: the local shape and sizes are a rank's own.
        if replace(local, shape=first.shape, partition_sizes=first.partition_sizes) != first:
            raise SpecError(
                f"ranks {first_rank} and {rank} disagree on {name!r}: {first} and {local}; all "
                "must say the same, but for the local shape and partition_sizes"
            )
    if first.is_expert and ranks.ep > 1 and names.expert(name) is None:
        raise SpecError(
            f"{name!r} belongs to experts, but its name has no expert number that num_experts="
            f"{names.num_experts} explains; on different ep ranks it is different tensors, "
            "which need names of their own"
        )
    # Where it lives: the places of the ranks that list it. Along the other axes it must be
    # everywhere, which is checked below.
    mesh = ranks.expert if first.is_expert else ranks.dense
    at = {axis: places_along(mesh, axis) for axis in mesh.axis_names}
    places = {
        axis: tuple(sorted({at[axis][rank] for rank in held}))
        for axis in ("pp", "ep")
        if axis in at
    }
    # Layers that are counted from 0 on every stage would be taken for one.
    if len(places["pp"]) > 1 and names.layer(name) is not None:
        raise SpecError(
            f"{name!r} is on stages {list(places['pp'])}, but a layer is on one; the ranks count "
            "their layers from 0, so say how many each stage has: MegatronNames(ranks, layers)"
        )
    if len(places["pp"]) > 1 and _OTHER_LAYER.search(name):
        raise SpecError(
            f"{name!r} is on stages {list(places['pp'])}, but a layer is on one; the pipeline "
            f"shares out the layers of {names.stack!r}, so name another stack where they are its"
        )
    absent = [
        rank
        for rank in mesh.devices
        if rank not in held and all(at[axis][rank] in held_at for axis, held_at in places.items())
    ]
    if absent:
        raise SpecError(
            f"rank {min(absent)} has no {name!r}, which rank {first_rank} of its group has; every "
            "rank of a stage (and of an expert rank) lists it"
        )
    # One description for each tensor-parallel rank, written once where all are equal.
    by_part = _group_by_part(name, at["etp" if first.is_expert else "tp"], held)
    shapes = tuple(local.shape for local in by_part)
    sizes = tuple(local.partition_sizes for local in by_part)
    says = asdict(first) | {
        "shape": shapes if len(set(shapes)) > 1 else first.shape,
        "partition_sizes": sizes if len(set(sizes)) > 1 else first.partition_sizes,
    }
    # None stands for all places along an axis.
    stages = places["pp"] if len(places["pp"]) < ranks.pp else None
    expert_ranks = places.get("ep")
    if expert_ranks is not None and len(expert_ranks) == ranks.ep:
        expert_ranks = None
    return MegatronParameter(ranks, **says, stages=stages, expert_ranks=expert_ranks)


def _group_by_part(
    name: str, part: Mapping[int, int], held: Mapping[int, LocalParameter]
) -> list[LocalParameter]:
    """The description by each tensor-parallel rank; copies of one must agree."""
    found: dict[int, tuple[int, LocalParameter]] = {}
    for rank, local in held.items():
        first_rank, first = found.setdefault(part[rank], (rank, local))
        if local != first:
            raise SpecError(
                f"ranks {first_rank} and {rank} hold the same part of {name!r}, but one has "
                f"{list(first.shape)} and the other {list(local.shape)}"
            )
    return [local for _, (_, local) in sorted(found.items())]
