"""Megatron's parameters: global shape and sharding, from their attributes on each rank.

The attributes of a parameter describe its shape on a rank, whether it is cut by tensor
parallelism, along which dimension, and how the cut is interleaved. `MegatronParameter` combines
them with the ranks, and derives the global shape and the sharding:

1. the dimension's length over all tensor-parallel ranks, from their local lengths;
2. the rule that cuts it::

       no attribute             0 0 0 0 1 1 1 1     a stretch per rank
       partition_stride=2       0 0 1 1 0 0 1 1     gate and up of a GLU, a piece of each
       partition_sizes=(3, 1)   0 0 0 1 1 1 0 1     blocks of 3 and 1 on every rank (Mamba)

3. the axis: `tp`, or `etp` for an expert; the places where it lives along `pp` and `ep`.

`partition_sizes` are local: the tensor's blocks are as many times larger as there are ranks. All
of it is checked against the local shapes, which Megatron does not do.

`gather_parameters` combines the local parameters of all ranks:

1. local names become global names (`reshard.megatron.names`);
2. the ranks that list a name hold it: their places along `pp`, and along `ep` for an expert, are
   where it lives. Every rank at such a place must list it;
3. ranks must agree on a parameter, except for the local shape: tensor-parallel ranks may have
   shapes of their own if the cut is uneven.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from reshard import cut_rules
from reshard._records import Record
from reshard._validation import check_int, check_ints
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RuleError, SpecError
from reshard.megatron.names import MegatronNames
from reshard.megatron.ranks import Ranks, places_along
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec

Shape = tuple[int, ...]

_NUMBERS = ("partition_dim", "partition_stride", "heads", "true_length")
_SEQUENCES = ("shape", "partition_sizes", "stages", "expert_ranks")


class MegatronParameter(Record):
    """A parameter as its ranks describe it.

    Args:
        ranks: the parallel groups.
        shape: the local shape; or a shape for each tensor-parallel rank if they differ.
        tensor_model_parallel: whether it is sharded over `tp` (over `etp`, for an expert).
        partition_dim: the sharded dimension.
        partition_stride: equal blocks, each sharded over all ranks; 2 for a GLU.
        partition_sizes: sizes of such blocks on a rank; or a list for each tensor-parallel rank
            if they differ.
        heads: the heads of the sharded dimension, if ranks may share a head: key/value heads.
        true_length: the length of the sharded dimension without padding, of a vocabulary.
        is_expert: whether it belongs to an expert.
        stages: the stages that hold it; all if None.
        expert_ranks: its coordinates along `ep`; all if None.
        dtype: its element type, if it is to be compared.

    Raises:
        SpecError: shapes that do not fit each other or the number of ranks, a dimension that is
            missing, or contradictory descriptions of the cut.
        RuleError: `partition_sizes` that do not add up to the local length.

    >>> from reshard.megatron.ranks import MegatronRanks
    >>> gated = MegatronParameter(MegatronRanks(tp=2), (8, 4), True, partition_stride=2)
    >>> gated.global_shape
    (16, 4)
    >>> print(gated.spec())
    tp@stride2[8,8], -
    """

    ranks: Ranks
    shape: Shape | tuple[Shape, ...]
    tensor_model_parallel: bool = False
    partition_dim: int = 0
    partition_stride: int = 1
    partition_sizes: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    heads: int | None = None
    true_length: int | None = None
    is_expert: bool = False
    stages: tuple[int, ...] | None = None
    expert_ranks: tuple[int, ...] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        # Lists become tuples and numbers ints, so that equal descriptions are equal and hashable.
        for name in (*_NUMBERS, *_SEQUENCES):
            value = getattr(self, name)
            if value is None and name not in ("shape", "partition_dim", "partition_stride"):
                continue
            frozen = _freeze(name, value)
            if isinstance(frozen, tuple) != (name in _SEQUENCES):
                expected = "a list of numbers" if name in _SEQUENCES else "one number"
                raise SpecError(f"{name}={value!r}, where {expected} was expected")
            object.__setattr__(self, name, frozen)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", as_dtype(self.dtype).name)
        if self.expert_ranks is not None and not self.is_expert:
            raise SpecError(
                f"expert ranks {list(self.expert_ranks)} of a parameter that is no expert's; say "
                "is_expert=True"
            )
        self._check_shapes()
        if self.tensor_model_parallel:
            self._check_cut()

    def _check_shapes(self) -> None:
        shapes = self.local_shapes
        if not all(
            isinstance(shape, tuple) and all(isinstance(size, int) for size in shape)
            for shape in shapes
        ):
            raise SpecError(
                f"shape={self.shape!r}; give one shape of whole numbers, or one for each rank"
            )
        if len(shapes) != self.parts or len({len(shape) for shape in shapes}) != 1:
            raise SpecError(
                f"local shapes {[list(shape) for shape in shapes]} for {self.parts} "
                "tensor-parallel ranks; give one shape, or one of as many dimensions for each"
            )
        if any(size < 0 for shape in shapes for size in shape):
            raise SpecError(f"local shape {list(shapes[0])} has a negative size")
        for dim in range(self.ndim):
            lengths = [shape[dim] for shape in shapes]
            if len(set(lengths)) > 1 and not (
                self.tensor_model_parallel and dim == self.partition_dim
            ):
                raise SpecError(
                    f"local lengths {lengths} of dimension {dim}, which is not cut; ranks must "
                    "agree outside the cut dimension"
                )

    def _check_cut(self) -> None:
        if not 0 <= self.partition_dim < self.ndim:
            raise SpecError(
                f"partition_dim={self.partition_dim} of a parameter of {self.ndim} dimensions; it "
                + (f"is one of 0 to {self.ndim - 1}" if self.ndim else "has no dimension to cut")
            )
        for name, least in (("partition_stride", 1), ("heads", 1), ("true_length", 0)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise RuleError(f"{name}={number} must be at least {least}")
        # Each of these is another way to shard; with two of them, the choice would be a guess.
        described = {
            "partition_stride": self.partition_stride != 1,
            "partition_sizes": self.partition_sizes is not None,
            "heads": self.heads is not None,
            "true_length": self.true_length is not None,
        }
        chosen = [name for name, is_given in described.items() if is_given]
        if len(chosen) > 1:
            raise SpecError(
                f"{' and '.join(chosen)} of one parameter; one of them determines the cut"
            )
        if self.partition_sizes is None:
            return
        # A rank's blocks are pieces of the tensor's blocks, so all ranks have equally many.
        by_rank = self.sizes_by_rank
        if len(by_rank) != self.parts or len({len(sizes) for sizes in by_rank}) != 1:
            raise SpecError(
                f"partition_sizes {[list(sizes) for sizes in by_rank]} for {self.parts} "
                "tensor-parallel ranks; give one list, or one of as many blocks for each rank"
            )
        for rank, (sizes, length) in enumerate(zip(by_rank, self.local_lengths, strict=True)):
            if sum(sizes) != length:
                raise RuleError(
                    f"partition_sizes {list(sizes)} add up to {sum(sizes)}, but tensor-parallel "
                    f"rank {rank} has {length} indices along dimension {self.partition_dim}; sizes "
                    "are those of the blocks on one rank"
                )

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.local_shapes[0])

    @property
    def parts(self) -> int:
        """The number of ranks that share it if sharded: the tensor-parallel size of its grid."""
        return self.ranks.expert_tp if self.is_expert else self.ranks.tp

    @property
    def axis(self) -> str:
        """The axis over which it is sharded."""
        return "etp" if self.is_expert else "tp"

    @property
    def mesh(self) -> DeviceMesh:
        """The grid of the ranks that hold it."""
        return self.ranks.expert if self.is_expert else self.ranks.dense

    @property
    def local_shapes(self) -> tuple[Shape, ...]:
        """The local shape on every tensor-parallel rank."""
        if self.shape and isinstance(self.shape[0], tuple):
            return self.shape
        return (self.shape,) * self.parts  # type: ignore[return-value]

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """The local length of the sharded dimension on every tensor-parallel rank."""
        return tuple(shape[self.partition_dim] for shape in self.local_shapes)

    @property
    def sizes_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """`partition_sizes` of every tensor-parallel rank; without any, none."""
        if not self.partition_sizes:
            return ()
        if isinstance(self.partition_sizes[0], tuple):
            return self.partition_sizes
        return (self.partition_sizes,) * self.parts

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """The sizes of the blocks over all ranks, or None for a rule without blocks."""
        if self.partition_sizes is not None:
            return tuple(map(sum, zip(*self.sizes_by_rank, strict=True)))
        total = sum(self.local_lengths)
        if self.partition_stride == 1:
            return None
        return tuple(cut_rules.ceil_sizes(total, self.partition_stride).tolist())

    @property
    def global_shape(self) -> Shape:
        """The shape of the whole tensor."""
        shape = self.local_shapes[0]
        if not self.tensor_model_parallel:
            return shape
        dim = self.partition_dim
        return (*shape[:dim], self._global_length(), *shape[dim + 1 :])

    def _global_length(self) -> int:
        if self.true_length is not None:
            return self.true_length
        lengths = self.local_lengths
        if self.heads is not None and self.parts > self.heads:
            # More ranks than heads share them; each has a whole head.
            return lengths[0] * self.heads
        return sum(lengths)

    def rule(self) -> cut_rules.CutRule:
        """Return the rule that shards its dimension. Raises RuleError if none gives the
        local shapes.
        """
        lengths = self.local_lengths
        rule = self._find_rule(lengths)
        local = rule.table(self._global_length(), self.parts).local_lengths.tolist()
        if local != list(lengths):
            raise RuleError(
                f"`{rule.text or 'ceil'}` cuts dimension {self.partition_dim} of length "
                f"{self._global_length()} into {local}, but the ranks have {list(lengths)}"
            )
        return rule

    def _find_rule(self, lengths: tuple[int, ...]) -> cut_rules.CutRule:
        # At most one of these is set (`_check_cut`).
        if self.heads is not None:
            return cut_rules.Heads(self.heads)
        if self.true_length is not None:
            # All ranks are as long as the first, padding included; a multiple is at least 1.
            return cut_rules.Padded(max(lengths[0], 1))
        if self.partition_sizes is not None:
            return blocks_rule(self.sizes_by_rank)
        if self.partition_stride > 1:
            stride = self.partition_stride
            # Ranks of unequal lengths have the same number of pieces each, if their lengths divide.
            if len(set(lengths)) > 1 and not any(length % stride for length in lengths):
                return blocks_rule([(length // stride,) * stride for length in lengths])
            return cut_rules.Strided(stride, lengths)
        is_even = cut_rules.ceil_sizes(sum(lengths), self.parts).tolist() == list(lengths)
        return cut_rules.Ceil() if is_even else cut_rules.Sizes(lengths)

    def spec(self) -> ShardingSpec:
        """Return the sharding over its grid of ranks.

        Raises:
            RuleError: a rule that does not give the local shapes.
            SpecError: an unknown stage or expert rank.
        """
        rule = self.rule() if self.tensor_model_parallel else None
        places = {"pp": self.stages, "ep": self.expert_ranks}
        return tensor_parallel_spec(
            self.mesh, self.axis, self.ndim, self.partition_dim, rule, places
        )


def blocks_rule(sizes_by_rank: Sequence[Sequence[int]]) -> cut_rules.CutRule:
    """Return the rule by which every rank has a piece of each block, of its own sizes.

    >>> blocks_rule([(4, 2), (4, 2)]).text, blocks_rule([(4, 2), (3, 1)]).text
    ('blocks[8,4]', 'pieces[4:3,2:1]')
    """
    pieces = cut_rules.Pieces.from_splits(sizes_by_rank)
    if len(set(map(tuple, sizes_by_rank))) == 1:
        return cut_rules.Blocks(tuple(sum(block) for block in pieces.pieces))
    return pieces


def tensor_parallel_spec(
    mesh: DeviceMesh,
    axis: str,
    ndim: int,
    dim: int,
    rule: cut_rules.CutRule | None,
    places: dict[str, tuple[int, ...] | None],
) -> ShardingSpec:
    """Return the sharding of dimension `dim` by `rule` over `axis`, if any, at `places` only."""
    dims = [DimSpec()] * ndim
    if rule is not None:
        dims[dim] = DimSpec([Level([axis], rule)])
    only = {name: at for name, at in places.items() if at is not None}
    return ShardingSpec(mesh, dims, only=only)


def _freeze(name: str, value: object) -> object:
    """Return a whole number, or nested sequences of them as tuples. Raises SpecError for others."""
    if isinstance(value, tuple | list):
        return tuple(_freeze(name, item) for item in value)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(f"{name} has {value!r}, where a whole number was expected") from None


class LocalParameter(Record):
    """A parameter of a rank, as the rank describes it; see `MegatronParameter` for each field."""

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
        """Return the description of a live parameter, a torch tensor with Megatron's attributes.

        A parameter whose gradients are not reduced with the others (`allreduce` is False) belongs
        to an expert.

        >>> import numpy as np
        >>> LocalParameter.of(np.zeros((2, 3), np.float32))  # an array has a shape and a dtype
        LocalParameter(shape=(2, 3), tensor_model_parallel=False, partition_dim=0,
        partition_stride=1, partition_sizes=None, heads=None, true_length=None, is_expert=False,
        dtype='float32')
        """
        sizes = getattr(parameter, "partition_sizes", None)
        return cls(
            shape=check_ints(parameter.shape, "shape of a parameter", SpecError),
            tensor_model_parallel=bool(getattr(parameter, "tensor_model_parallel", False)),
            # Megatron marks a parameter that is not sharded with the dimension -1.
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
ParameterManifest = Mapping[str, LocalParameter] | Iterable[tuple[str, LocalParameter]]


def gather_parameters(
    names: MegatronNames, rosters: Mapping[int, Sequence[ParameterManifest]]
) -> dict[str, MegatronParameter]:
    """Return the parameters of the whole model, by global name, in the order in which ranks
    list them.

    Args:
        names: the ranks, and the names of their layers and experts.
        rosters: for every rank, a manifest per model chunk.

    Raises:
        SpecError: a rank that is missing or lists a name twice, ranks that disagree, a parameter
            that a rank of its group lacks, experts that share a name.
        NotationError: a name of an unknown layer or expert.

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
    # In the order in which names first occur, from the first rank on.
    by_name: dict[str, dict[int, LocalParameter]] = {}
    for rank in expected:
        for chunk, roster in enumerate(rosters[rank]):
            for name, local in roster.items() if isinstance(roster, Mapping) else roster:
                whole = names.global_name(name, rank, chunk)
                held = by_name.setdefault(whole, {})
                if rank in held:
                    raise SpecError(
                        f"rank {rank} lists {whole!r} twice, as {name!r} of chunk {chunk} again; "
                        "local names become global ones by the layers and experts that names has"
                    )
                held[rank] = local
    return {name: _combine(names, name, held) for name, held in by_name.items()}


def _combine(
    names: MegatronNames, name: str, held: Mapping[int, LocalParameter]
) -> MegatronParameter:
    ranks = names.ranks
    first_rank, first = next(iter(held.items()))
    for rank, local in held.items():
        if local == first:
            continue
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
    # The positions of the ranks that list it. Along the other axes it must be
    # everywhere, which is checked below.
    mesh = ranks.expert if first.is_expert else ranks.dense
    at = {axis: places_along(mesh, axis) for axis in mesh.axis_names}
    places = {
        axis: tuple(sorted({at[axis][rank] for rank in held}))
        for axis in ("pp", "ep")
        if axis in at
    }
    # Layers that are counted from 0 on every stage would be merged.
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
    # A description for each tensor-parallel rank, written once if all are equal.
    by_part = _group_by_part(name, at["etp" if first.is_expert else "tp"], held)
    shapes = tuple(local.shape for local in by_part)
    sizes = tuple(local.partition_sizes for local in by_part)
    fields = asdict(first) | {
        "shape": shapes if len(set(shapes)) > 1 else first.shape,
        "partition_sizes": sizes if len(set(sizes)) > 1 else first.partition_sizes,
    }
    # None means all positions along an axis.
    stages = places["pp"] if len(places["pp"]) < ranks.pp else None
    expert_ranks = places.get("ep")
    if expert_ranks is not None and len(expert_ranks) == ranks.ep:
        expert_ranks = None
    return MegatronParameter(ranks, **fields, stages=stages, expert_ranks=expert_ranks)


def _group_by_part(
    name: str, part: Mapping[int, int], held: Mapping[int, LocalParameter]
) -> list[LocalParameter]:
    """Return the description by each tensor-parallel rank; copies must agree."""
    by_part: dict[int, tuple[int, LocalParameter]] = {}
    for rank, local in held.items():
        first_rank, first = by_part.setdefault(part[rank], (rank, local))
        if local != first:
            raise SpecError(
                f"ranks {first_rank} and {rank} hold the same part of {name!r}, but one has "
                f"{list(first.shape)} and the other {list(local.shape)}"
            )
    return [local for _, (_, local) in sorted(by_part.items())]
