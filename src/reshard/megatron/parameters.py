"""Megatron's parameters: their global shape and sharding, from their attributes on each rank.

The attributes of a parameter describe what one rank knows: the shape it has here, whether it is
cut by tensor parallelism, along which dimension, and how the cut is interleaved.
`MegatronParameter` holds that together with the ranks, and derives the global shape and the
sharding:

1. the dimension's length over all tensor-parallel ranks, from their local lengths;
2. the rule that cuts it::

       no attribute             0 0 0 0 1 1 1 1     one stretch a rank
       partition_stride=2       0 0 1 1 0 0 1 1     gate and up of a GLU, a piece of each
       partition_sizes=(3, 1)   0 0 0 1 1 1 0 1     blocks of 3 and 1 on every rank (Mamba)

3. the axis: `tp`, or `etp` for an expert; where it lives along `pp` and `ep`.

`partition_sizes` are local: the tensor's blocks are as many times larger as there are ranks. All
of it is checked against the local shapes, which Megatron does not do.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.block_rules import Blocks, Pieces, Strided
from reshard.cut_rules import Ceil, CutRule, Heads, Padded, Sizes, ceil_sizes
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RuleError, SpecError
from reshard.megatron.groups import Ranks
from reshard.mesh import DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec

Shape = tuple[int, ...]

_NUMBERS = ("partition_dim", "partition_stride", "heads", "true_length")
_SEQUENCES = ("shape", "partition_sizes", "stages", "expert_ranks")


@dataclass(frozen=True)
class MegatronParameter:
    """A parameter as its ranks describe it.

    Args:
        ranks: the parallel groups.
        shape: the local shape; one for each tensor-parallel rank where they differ.
        tensor_model_parallel: whether it is cut over `tp` (over `etp`, for an expert).
        partition_dim: the dimension that is cut.
        partition_stride: equal blocks that are each cut over all ranks; 2 for a GLU.
        partition_sizes: sizes of such blocks on one rank; one list for each tensor-parallel rank
            where they differ.
        heads: the heads of the cut dimension, where ranks may share one: key/value heads.
        true_length: the length of the cut dimension without padding: a vocabulary.
        is_expert: whether it belongs to an expert.
        stages: where it lives along `pp`; everywhere when None.
        expert_ranks: where it lives along `ep`; everywhere when None.
        dtype: its element type, when that is to be compared.

    Raises:
        SpecError: shapes that do not fit each other or the number of ranks, a dimension that is
            not there, or two descriptions of one cut.
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
            given = getattr(self, name)
            if given is None and name not in ("shape", "partition_dim", "partition_stride"):
                continue
            frozen = _freeze(name, given)
            if isinstance(frozen, tuple) != (name in _SEQUENCES):
                expected = "a list of numbers" if name in _SEQUENCES else "one number"
                raise SpecError(f"{name}={given!r}, where {expected} was expected")
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
        if not all(isinstance(shape, tuple) and _are_whole(shape) for shape in shapes):
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
        # Each of these is another way to cut: with two of them, which holds would be a guess.
        said = {
            "partition_stride": self.partition_stride != 1,
            "partition_sizes": self.partition_sizes is not None,
            "heads": self.heads is not None,
            "true_length": self.true_length is not None,
        }
        given = [name for name, is_given in said.items() if is_given]
        if len(given) > 1:
            raise SpecError(
                f"{' and '.join(given)} of one parameter; one of them says how it is cut"
            )
        if self.partition_sizes is None:
            return
        # Blocks are pieces of the same blocks of the tensor, so all ranks have equally many.
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
        """How many ranks would share it: the tensor-parallel size of its grid."""
        return self.ranks.expert_tp if self.is_expert else self.ranks.tp

    @property
    def axis(self) -> str:
        """The axis over which it is cut."""
        return "etp" if self.is_expert else "tp"

    @property
    def mesh(self) -> DeviceMesh:
        """The grid of ranks that it lives on."""
        return self.ranks.expert if self.is_expert else self.ranks.dense

    @property
    def local_shapes(self) -> tuple[Shape, ...]:
        """The local shape on every tensor-parallel rank."""
        if self.shape and isinstance(self.shape[0], tuple):
            return self.shape
        return (self.shape,) * self.parts  # type: ignore[return-value]

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """The local length of the cut dimension on every tensor-parallel rank."""
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
        """The sizes of the blocks over all ranks, None for a cut that is not made of blocks."""
        if self.partition_sizes is not None:
            return tuple(map(sum, zip(*self.sizes_by_rank, strict=True)))
        total = sum(self.local_lengths)
        if self.partition_stride == 1:
            return None
        return tuple(ceil_sizes(total, self.partition_stride).tolist())

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
            # More ranks than heads share them, each with one whole head.
            return lengths[0] * self.heads
        return sum(lengths)

    def rule(self) -> CutRule:
        """The rule that cuts its dimension. Raises RuleError where none gives the local shapes."""
        lengths = self.local_lengths
        rule = self._find_rule(lengths)
        found = rule.table(self._global_length(), self.parts).local_lengths.tolist()
        if found != list(lengths):
            raise RuleError(
                f"`{rule.text or 'ceil'}` cuts dimension {self.partition_dim} of length "
                f"{self._global_length()} into {found}, but the ranks have {list(lengths)}"
            )
        return rule

    def _find_rule(self, lengths: tuple[int, ...]) -> CutRule:
        # At most one of these is given (`_check_cut`).
        if self.heads is not None:
            return Heads(self.heads)
        if self.true_length is not None:
            # All ranks are as long as the first, padding included; a multiple is at least 1.
            return Padded(max(lengths[0], 1))
        if self.partition_sizes is not None:
            return blocks_rule(self.sizes_by_rank)
        if self.partition_stride > 1:
            stride = self.partition_stride
            # Ranks of unequal lengths have as many equal pieces each, where their lengths divide.
            if len(set(lengths)) > 1 and not any(length % stride for length in lengths):
                return blocks_rule([(length // stride,) * stride for length in lengths])
            return Strided(stride, lengths)
        is_even = ceil_sizes(sum(lengths), self.parts).tolist() == list(lengths)
        return Ceil() if is_even else Sizes(lengths)

    def spec(self) -> ShardingSpec:
        """The sharding over its grid of ranks.

        Raises:
            RuleError: a cut that does not give the local shapes.
            SpecError: a stage or expert rank that is not there.
        """
        rule = self.rule() if self.tensor_model_parallel else None
        places = {"pp": self.stages, "ep": self.expert_ranks}
        return tensor_parallel_spec(
            self.mesh, self.axis, self.ndim, self.partition_dim, rule, places
        )


def blocks_rule(sizes_by_rank: Sequence[Sequence[int]]) -> CutRule:
    """The cut where every rank has a piece of each block, of the sizes it says.

    >>> blocks_rule([(4, 2), (4, 2)]).text, blocks_rule([(4, 2), (3, 1)]).text
    ('blocks[8,4]', 'pieces[4:3,2:1]')
    """
    pieces = Pieces.from_splits(sizes_by_rank)
    if len(set(map(tuple, sizes_by_rank))) == 1:
        return Blocks(tuple(sum(block) for block in pieces.pieces))
    return pieces


def tensor_parallel_spec(
    mesh: DeviceMesh,
    axis: str,
    ndim: int,
    dim: int,
    rule: CutRule | None,
    places: dict[str, tuple[int, ...] | None],
) -> ShardingSpec:
    """Dimension `dim` cut by `rule` over `axis`, or nothing cut; at `places` only."""
    dims = [DimSpec()] * ndim
    if rule is not None:
        dims[dim] = DimSpec([Level([axis], rule)])
    only = {name: at for name, at in places.items() if at is not None}
    return ShardingSpec(mesh, dims, only=only)


def _are_whole(numbers: Sequence[object]) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _freeze(name: str, given: object) -> object:
    """A whole number, or nested sequences of them as tuples. Raises SpecError for others."""
    if isinstance(given, tuple | list):
        return tuple(_freeze(name, item) for item in given)
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(f"{name} has {given!r}, where a whole number was expected") from None
