"""PyTorch's DTensor: placements as text, as values and as live objects of torch.

A DTensor has a mesh and a *placement* for each mesh axis::

    Shard(dim=0)                              shard dimension 0 by ceil (`torch.chunk`)
    _StridedShard(dim=0, split_factor=2)      2 blocks by ceil, each sharded over the axis
    PartitionedShard(0, 4, (4, 6, 4, 2))      blocks of these sizes, each sharded or left whole
    Replicate()                               copies
    Partial(sum)                              contributions

They are applied from left to right, each to the result of the previous ones, so a tensor dimension
that several axes shard has several levels::

    mesh ("dp": 2, "tp": 2), [Shard(0), Shard(0)]            "dp / tp, ..."
    the same, [_StridedShard(0, split_factor=2), Shard(0)]   "dp@stride2 / tp, ..."
    the same, S(0)[1]S(0)[0]: in another order               "tp / dp, ..."
    the same, [Partial("sum"), Shard(1)]                     "-, tp | sum(dp)"

In a text, a placement is a call, with its long or its short name, with or without commas, and with
the step in which its axis shards the dimension if several do: `S(0)[1]S(0)[0]`. A mesh may
precede the placements, as torch prints it or a program writes it. torch prints a mesh by its sizes,
and its ranks only if `TORCH_DISTRIBUTED_DEBUG=DETAIL` is set::

    DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))                        sizes and names
    DeviceMesh((2, 2), 'cpu', stride=(2, 1), Mesh: [[3, 1], [2, 0]])      sizes and ranks
    DeviceMesh('cpu', [[3, 1], [2, 0]], mesh_dim_names=('dp', 'tp'))      names and ranks

Placements of texts and of torch become plain values here, so torch is not imported. Placement
objects are made of torch's own classes, which are imported then. torch applies placement objects
from left to right, so axes that shard in another order become strides if that leaves every element
in its place::

    mesh ("dp": 2, "tp": 2), "tp / dp, -"     (_StridedShard(0, split_factor=2), Shard(0))

Source: `torch.distributed.tensor` of PyTorch 2.13.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard, cast

import numpy as np

from reshard._records import Record
from reshard.cut_rules import CutRule, Strided
from reshard.errors import MissingExtraError, NotationError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.notation.parsing import Scanner, Vocabulary, find_closing, reading
from reshard.notation.partitioned import PartitionedShard, Splits
from reshard.runs import IntArray, find_distinct
from reshard.sharding import DimSpec, Level, ShardingSpec

Argument = int | str | tuple["Argument", ...]


class PlacementCall(Record):
    """A placement as written in a text: a name, arguments, and `[order]` if given."""

    name: str
    arguments: tuple[Argument, ...] = ()
    named: tuple[tuple[str, Argument], ...] = ()
    order: int | None = None

    def bound(self, *parameters: str, **other_names: str) -> dict[str, Argument]:
        """Return the arguments by parameter; `other_names` gives further names of parameters.

        Raises:
            NotationError: too many arguments, or an unknown or repeated argument.
        """
        by_parameter = dict(zip(parameters, self.arguments, strict=False))
        surplus = [str(argument) for argument in self.arguments[len(parameters) :]]
        for name, value in self.named:
            parameter = other_names.get(name, name)
            if parameter in by_parameter or parameter not in parameters:
                surplus.append(f"{name}={value}")
            else:
                by_parameter[parameter] = value
        if surplus:
            raise NotationError(
                f"{self.name} does not take {', '.join(surplus)}; write "
                f"{self.name}({', '.join(parameters)})"
            )
        return by_parameter


# Long names first: `RaggedShard` begins with torch's short name of `Replicate`.
_NAMES = {
    "_StridedRaggedShard": "_StridedRaggedShard",
    "PartitionedShard": "PartitionedShard",
    "RaggedShard": "RaggedShard",
    "_StridedShard": "_StridedShard",
    "Replicate": "Replicate",
    "Partial": "Partial",
    "Shard": "Shard",
    "_S": "_StridedShard",
    "S": "Shard",
    "R": "Replicate",
    "P": "Partial",
}
# Short names adjoin (`S(0)R`), so only a lower-case letter continues a name.
_NAME = re.compile(r"(?:[A-Za-z_]\w*\.)*(" + "|".join(_NAMES) + r")(?![a-z])")
# A printed spec of torch, around its placements: `Spec(f32[8, 4](S(0)R))`.
_SPEC = re.compile(r"Spec\(\w+(?:\[[^\]]*\])?\((.*)\)\)", re.DOTALL)
# Lists nest no deeper in any placement; a limit keeps hostile text from deep recursion.
_MAX_DEPTH = 3


def read_calls(text: str) -> list[PlacementCall]:
    """Parse the placements in `text`, one per mesh axis, as calls.

    Raises:
        NotationError: text that is not a list of placements.

    >>> [call.name for call in read_calls("[Shard(dim=0), Replicate()]")]
    ['Shard', 'Replicate']
    >>> read_calls("S(0)[1]S(0)[0]")[0]
    PlacementCall(name='Shard', arguments=(0,), named=(), order=1)
    """
    body = text.strip()
    wrapped = _SPEC.fullmatch(body)
    body = wrapped[1].strip() if wrapped else body
    # The brackets of the list itself, if any: `S(0)R` has none.
    if body[:1] + body[-1:] in ("[]", "()"):
        body = body[1:-1]
    scanner = Scanner(body)
    calls: list[PlacementCall] = []
    while scanner.take(r"[\s,]+") or not scanner.is_at_end():
        if not scanner.is_at_end():
            calls.append(_read_call(scanner))
    return calls


def _read_call(scanner: Scanner) -> PlacementCall:
    name = scanner.take(_NAME)
    if not name:
        raise scanner.failure(
            "a placement: Shard(0), _StridedShard(0, split_factor=2), Replicate(), Partial(sum), "
            "PartitionedShard(0, 2, (4, 6)) or RaggedShard((0,), (1, 2))"
        )
    arguments: list[Argument] = []
    named: list[tuple[str, Argument]] = []
    if scanner.accept("("):
        while not scanner.accept(")"):
            keyword = scanner.take(r"([A-Za-z_]\w*)\s*=")
            value = _read_value(scanner)
            if keyword:
                named.append((keyword[1], value))
            else:
                arguments.append(value)
            _expect_separator(scanner, ")")
    # The step follows the call: `S(0)[1]`.
    # At most 18 digits, which fit 64 bits.
    order = scanner.take(r"\[(\d{1,18})\]")
    number = int(order[1]) if order else None
    return PlacementCall(_NAMES[name[1]], tuple(arguments), tuple(named), number)


def _read_value(scanner: Scanner, depth: int = 0) -> Argument:
    for opening, closing in ("()", "[]"):
        if scanner.accept(opening):
            items: list[Argument] = []
            while not scanner.accept(closing):
                if depth == _MAX_DEPTH:
                    raise scanner.failure(f"lists of at most {_MAX_DEPTH} levels")
                items.append(_read_value(scanner, depth + 1))
                _expect_separator(scanner, closing)
            return tuple(items)
    match = scanner.take(r"(-?\d{1,18})(?!\d)|([A-Za-z_]\w*)|'([^']*)'|\"([^\"]*)\"")
    if not match:
        raise scanner.failure("a number, a word, or a list of them in brackets")
    return int(match[1]) if match[1] else match[2] or match[3] or match[4] or ""


def _expect_separator(scanner: Scanner, closing: str) -> None:
    """Move past a comma; the closing bracket may follow instead."""
    if not scanner.accept(",") and not scanner.looks_at(re.escape(closing)):
        raise scanner.failure(f"`,` or `{closing}`")


def is_numbers(value: object) -> TypeGuard[tuple[int, ...]]:
    """Return whether an argument is a list of numbers."""
    return isinstance(value, tuple) and all(isinstance(item, int) for item in value)


_BEFORE = re.compile(r"\s*\(?\s*|\s*DTensor\(.*device_mesh\s*=\s*", re.DOTALL)
_RANKS = re.compile(r"\[[\s\d,\[\]]*\]")
_AXIS_NAMES = re.compile(r"mesh_dim_names\s*=\s*[(\[]([^)\]]*)[)\]]")
_STRIDE = re.compile(r"stride\s*=\s*(\((?:[^()]|\([^()]*\))*\))")
_SIZES = re.compile(r"\(([^()]*)\)")
# At most 9 digits: Python refuses to convert texts of thousands of digits, by an error of its own.
_SIZE = re.compile(r"(?:(\w+)\s*=\s*)?(\d{1,9})")


def split_mesh(text: str, mesh: DeviceMesh | None = None) -> tuple[DeviceMesh | None, str]:
    """Split a text into its mesh and the placements after it.

    Args:
        text: placements, or a mesh and placements, or a printed DTensor.
        mesh: the result for a text without a mesh, or the same mesh by its sizes.

    Raises:
        NotationError: a mesh that cannot be read.
        MeshError: an invalid mesh.

    >>> split_mesh("DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)), (Shard(dim=0), Replicate())")
    (DeviceMesh('torch', dp=2,tp=2), '(Shard(dim=0), Replicate())')
    >>> split_mesh("DeviceMesh('cpu', [[3, 1], [2, 0]]), [Shard(0), Replicate()]")[0]
    DeviceMesh('torch', dim0=2,dim1=2, devices=[3, 1, 2, 0])
    """
    begin = text.find("DeviceMesh(")
    if begin < 0:
        return mesh, text
    before = text[:begin]
    end = find_closing(text, begin + len("DeviceMesh"))
    if end is None or not _BEFORE.fullmatch(before):
        raise NotationError(
            "cannot read the mesh; write DeviceMesh('cpu', [[0, 1], [2, 3]]) in front of the "
            "placements, or give a mesh"
        )
    rest = text[end + 1 :].strip().removeprefix(",").strip()
    # In a printed DTensor the placements are an argument, whose bracket closes after them.
    if "(" in before:
        rest = re.sub(r"^placements\s*=\s*", "", rest).removesuffix(")").strip()
    return _read_mesh(text[begin + len("DeviceMesh(") : end], mesh), rest


def _read_mesh(body: str, mesh: DeviceMesh | None) -> DeviceMesh:
    named = _AXIS_NAMES.search(body)
    names = [name.strip(" '\"") for name in named[1].split(",") if name.strip()] if named else []
    stride = _STRIDE.search(body)
    # Names and strides have brackets of their own, which would be taken for sizes.
    body = _AXIS_NAMES.sub("", _STRIDE.sub("", body))
    listed = _RANKS.search(body)
    shape: tuple[int, ...] = ()
    devices: list[int] | None = None
    if listed:
        ranks = _read_ranks(listed[0])
        shape, devices = ranks.shape, ranks.reshape(-1).tolist()
    sizes = _SIZES.search(body)
    if sizes:
        words = [word.strip() for word in sizes[1].split(",") if word.strip()]
        matches = [match for word in words if (match := _SIZE.fullmatch(word))]
        if len(matches) != len(words):
            raise NotationError(f"cannot read the sizes of a mesh ({sizes[1]})")
        names = names or [match[1] for match in matches if match[1]]
        shape = tuple(int(match[2]) for match in matches)
    elif not listed:
        raise NotationError("a mesh without sizes and ranks; give either")
    if (
        mesh is not None
        and mesh.shape == tuple(shape)
        and (not names or list(mesh.axis_names) == names)
        and (devices is None or list(mesh.devices) == devices)
    ):
        return mesh
    # A slice of a larger mesh has the strides of that mesh, and ranks that the text omits.
    if devices is None and stride and not _is_row_major(stride[1], shape):
        raise NotationError(
            "the mesh is a part of another, whose ranks are not in the text; give a mesh, or print "
            "it with TORCH_DISTRIBUTED_DEBUG=DETAIL"
        )
    return DeviceMesh("torch", shape, names or [f"dim{d}" for d in range(len(shape))], devices)


def _read_ranks(listed: str) -> IntArray:
    """Return the ranks in nested brackets: each depth is an axis."""
    try:
        return np.array(json.loads(listed), dtype=np.int64)
    # Rows of different lengths, numbers beyond 64 bits, and brackets nested too deeply for JSON.
    except (ValueError, OverflowError, RecursionError):
        raise NotationError(
            f"cannot read the ranks {listed[:80]} of the mesh; write equal rows, such as "
            "[[0, 1], [2, 3]]"
        ) from None


def _is_row_major(stride: str, shape: Sequence[int]) -> bool:
    expected = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [int(number) for number in re.findall(r"\d{1,18}", stride)] == expected


REDUCTION_OF_OPERATION = {
    "sum": "sum",
    "avg": "mean",
    "max": "max",
    "min": "min",
    "product": "product",
}
OPERATION_OF_REDUCTION = {name: operation for operation, name in REDUCTION_OF_OPERATION.items()}
_VOCABULARY = Vocabulary(
    "DTensor",
    # Rules that no placement has are refused one by one, by `_find_placement`.
    rules=(CutRule,),
    reductions=tuple(OPERATION_OF_REDUCTION),
    has_levels=True,
    # Axes without another placement are Replicate().
    has_replicated_axes=True,
)


class Shard(Record):
    """The dimension `dim`, sharded by ceil, as by `torch.chunk`; -1 is the last.

    >>> print(Shard(0))
    Shard(0)
    """

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


class StridedShard(Record):
    """`split_factor` blocks of the dimension `dim` by ceil, each sharded by ceil; torch's
    `_StridedShard`.

    >>> print(StridedShard(0, 2))
    _StridedShard(0, split_factor=2)
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise NotationError(
                f"_StridedShard with split_factor {self.split_factor}; it must be at least 1"
            )

    def __str__(self) -> str:
        return f"_StridedShard({self.dim}, split_factor={self.split_factor})"


class Replicate(Record):
    """Copies along the axis.

    >>> print(Replicate())
    Replicate()
    """

    def __str__(self) -> str:
        return "Replicate()"


class Partial(Record):
    """Contributions along the axis, still to be reduced by torch's `operation`.

    >>> print(Partial("avg"), Partial("avg").reduction)
    Partial(avg) mean
    """

    operation: str = "sum"

    def __post_init__(self) -> None:
        if self.operation not in REDUCTION_OF_OPERATION:
            raise NotationError(
                f"Partial({self.operation}): the reductions are "
                f"{', '.join(REDUCTION_OF_OPERATION)}; redistribute the tensor first"
            )

    @property
    def reduction(self) -> str:
        """The reduction by reshard's name."""
        return REDUCTION_OF_OPERATION[self.operation]

    def __str__(self) -> str:
        return f"Partial({self.operation})"


Placement = Shard | StridedShard | PartitionedShard | Replicate | Partial


def placement_of_call(call: PlacementCall) -> Placement:
    """Return the placement that a call means.

    Raises:
        NotationError: a name that is not a placement of DTensor, or arguments of another form.

    >>> print(placement_of_call(PlacementCall("_StridedShard", (0,), (("sf", 2),))))
    _StridedShard(0, split_factor=2)
    """
    match call.name:
        case "Shard":
            return Shard(_expect_integer(call, call.bound("dim"), "dim"))
        case "_StridedShard":
            bound = call.bound("dim", "split_factor", sf="split_factor")
            return StridedShard(
                _expect_integer(call, bound, "dim"), _expect_integer(call, bound, "split_factor", 1)
            )
        case "Replicate":
            call.bound()
            return Replicate()
        case "Partial":
            return Partial(str(call.bound("reduce_op").get("reduce_op", "sum")))
        case "PartitionedShard":
            bound = call.bound("dim", "num_partitions", "splits", "aligned")
            return PartitionedShard(
                _expect_integer(call, bound, "dim"),
                _expect_integer(call, bound, "num_partitions"),
                _expect_splits(call, bound.get("splits")),
                _expect_truth(call, bound.get("aligned", "False")),
            )
    raise NotationError(
        f"{call.name} shards several dimensions together, which a sharding cannot express; read it "
        "with `reshard.notation.parse_ragged`, which returns a layout"
    )


def _expect_integer(
    call: PlacementCall, bound: Mapping[str, Argument], name: str, default: int | None = None
) -> int:
    value = bound.get(name, default)
    if not isinstance(value, int):
        raise NotationError(f"{call.name} needs a number for {name}, got {value!r}")
    return value


def _expect_splits(call: PlacementCall, value: Argument | None) -> Splits:
    if is_numbers(value) or (isinstance(value, tuple) and all(map(is_numbers, value))):
        return cast(Splits, value)
    raise NotationError(
        f"{call.name} needs splits such as (4, 6, 4, 2), or a row of them for each rank, "
        f"got {value!r}"
    )


def _expect_truth(call: PlacementCall, value: Argument) -> bool:
    if value not in ("True", "False"):
        raise NotationError(f"{call.name} needs True or False for aligned, got {value!r}")
    return value == "True"


def as_placement(item: object) -> Placement:
    """Return a placement from a placement, or from an object of torch, which is not imported.

    Raises:
        NotationError: anything else, and placements of torch that reshard cannot express.

    >>> as_placement(Replicate())
    Replicate()
    """
    if isinstance(item, Placement):
        return item
    # Known by names, so that torch is not imported.
    names = [kind.__name__ for kind in type(item).__mro__ if kind.__module__.startswith("torch")]
    # A subclass may mean more than its base, as a masked partial does, so only the class counts.
    live: Any = item
    match names[0] if names and type(item).__name__ == names[0] else "":
        case "Shard":
            return Shard(int(live.dim))
        case "_StridedShard":
            return StridedShard(int(live.dim), int(live.split_factor))
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(str(live.reduce_op))
    raise NotationError(
        f"placement {item!s} of type {type(item).__name__} is not known; known are Shard, "
        "_StridedShard, Replicate, Partial and PartitionedShard"
    )


ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]


class DTensorPlacements(Record):
    """The placement of each mesh axis, and the order in which axes shard a dimension.

    Attributes:
        placements: in the order of the mesh's axes.
        shard_order: for each sharded tensor dimension, its mesh axes by number, the axis that
            shards first in front; torch's `shard_order`.
    """

    placements: tuple[Placement, ...]
    shard_order: ShardOrder

    @property
    def is_left_to_right(self) -> bool:
        """Whether axes shard every dimension in the order of the mesh, as in torch."""
        return all(list(axes) == sorted(axes) for _, axes in self.shard_order)

    def __str__(self) -> str:
        if self.is_left_to_right:
            return f"[{', '.join(map(str, self.placements))}]"
        step = {axis: i for _, axes in self.shard_order for i, axis in enumerate(axes)}
        several = {axis for _, axes in self.shard_order if len(axes) > 1 for axis in axes}
        words = [
            f"{placement}[{step[axis]}]" if axis in several else str(placement)
            for axis, placement in enumerate(self.placements)
        ]
        return f"[{', '.join(words)}]"


def parse_dtensor(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding that a list of placements describes.

    Args:
        text: in any form that torch prints: `[Shard(dim=0), Replicate()]`, `S(0)R`,
            `S(0)[1]S(0)[0]` with the order of the axes on one dimension. A
            `PartitionedShard` may be among them. A mesh may precede them, as in a
            printed DTensor.
        mesh: the devices, for a text without a mesh; a placement for each of its axes, major to
            minor.
        shape: of the tensor, whose rank the placements do not determine.

    Raises:
        NotationError: text that cannot be read, or that does not fit the mesh or the shape.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> print(parse_dtensor("[Shard(0), Shard(0)]", mesh, (6, 4)))
    dp / tp, -
    >>> print(parse_dtensor("S(0)[1]S(0)[0]", mesh, (6, 4)))
    tp / dp, -
    >>> print(parse_dtensor("P(avg) S(-1)", mesh, (6, 4)))
    -, tp | mean(dp)
    """
    with reading("placements", text):
        mesh, placed = split_mesh(text, mesh)
        calls = read_calls(placed)
        if mesh is None or shape is None:
            missing = "mesh" if mesh is None else "shape"
            raise NotationError(
                f"the placements lack the tensor's {missing}; give a {missing} with them"
            )
        placements = [placement_of_call(call) for call in calls]
        order = _order_steps(placements, [call.order for call in calls], len(shape))
        return sharding_of_placements(mesh, placements, len(shape), order)


def dtensor_text(spec: ShardingSpec) -> str:
    """Return the placements of a sharding as text, in the form that torch takes.

    Axes that shard a dimension in another order than the mesh's are written with their steps,
    as torch prints a `shard_order`.

    Raises:
        NotationError: a sharding that DTensor cannot express; the message names the part.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> dtensor_text(ShardingSpec(mesh, [DimSpec([Level(["dp"], Strided(2)), Level(["tp"])])]))
    '[_StridedShard(0, split_factor=2), Shard(0)]'
    >>> dtensor_text(ShardingSpec(mesh, [DimSpec([Level(["tp"]), Level(["dp"])])]))
    '[Shard(0)[1], Shard(0)[0]]'
    >>> dtensor_text(ShardingSpec(mesh, [["dp", "tp"]]))
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: DTensor cannot express `dp tp` of the sharding `dp tp`: each
    placement shards over one mesh axis; `dp / tp` shards the parts again
    """
    return str(placements_of(spec))


def parse_partitioned(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """Return the sharding of placements, `PartitionedShard` included.

    Reads the same texts as `parse_dtensor`.

    Raises:
        NotationError: text that cannot be read, sizes that do not add up to the dimension.

    >>> mesh = DeviceMesh.of(ep=2)
    >>> print(parse_partitioned("PartitionedShard(0, 4, (6, 10, 12, 4))", mesh, (32,)))
    ep@blocks[6,10,12,4]
    """
    return parse_dtensor(text, mesh, shape)


def partitioned_text(spec: ShardingSpec) -> str:
    """Return the placements of a sharding as text, in which `PartitionedShard` may occur.

    Raises:
        NotationError: a sharding that placements cannot express.

    >>> mesh = DeviceMesh.of(dp=2, ep=2)
    >>> partitioned_text(ShardingSpec(mesh, [["dp"], []]))
    '[Shard(0), Replicate()]'
    """
    return str(placements_of(spec, partitioned=True))


def sharding_of_placements(
    mesh: DeviceMesh,
    placements: Iterable[object],
    ndim: int,
    shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
) -> ShardingSpec:
    """Return the sharding for placements, given as values or as torch's own objects.

    Args:
        mesh: the devices.
        placements: one per axis of the mesh.
        ndim: dimensions of the tensor.
        shard_order: for each sharded dimension the numbers of its mesh axes, the first to shard
            in front, as torch's `DTensorSpec.shard_order`; by rising number when None.

    Raises:
        NotationError: a wrong number of placements, a dimension out of range, several
            kinds of reduction, or an order that does not fit the placements.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> print(sharding_of_placements(mesh, [Shard(1), StridedShard(1, 2)], 2))
    -, dp / tp@stride2
    """
    order = None
    if shard_order is not None:
        order = tuple((int(dim), tuple(map(int, axes))) for dim, axes in shard_order)
    return _make_sharding(mesh, tuple(map(as_placement, placements)), ndim, order)


# Most tensors of a model have equal placements.
@lru_cache(maxsize=1024)
def _make_sharding(
    mesh: DeviceMesh, values: tuple[Placement, ...], ndim: int, shard_order: ShardOrder | None
) -> ShardingSpec:
    if len(values) != len(mesh.shape):
        raise NotationError(
            f"{len(values)} placements for a mesh of {len(mesh.shape)} axes ({mesh.text}); give a "
            "placement for each axis, major to minor"
        )
    # Levels of each dimension by number of the mesh axis; their order comes below.
    by_dim: dict[int, dict[int, Level]] = {dim: {} for dim in range(ndim)}
    partial: list[str] = []
    reductions: list[str] = []
    for number, (axis, value) in enumerate(zip(mesh.axis_names, values, strict=True)):
        if isinstance(value, Partial):
            partial.append(axis)
            reductions.append(value.reduction)
        elif not isinstance(value, Replicate):
            level = _make_level(axis, value, mesh.shape[number])
            by_dim[_check_dimension(value, ndim)][number] = level
    if len(set(reductions)) > 1:
        raise NotationError(
            f"contributions are reduced by {' and '.join(sorted(set(reductions)))}; a tensor has "
            "a single reduction, redistribute the other axes first"
        )
    order = _check_order(shard_order, by_dim)
    dim_specs = [DimSpec([levels[n] for n in order[dim]]) for dim, levels in by_dim.items()]
    return ShardingSpec(mesh, dim_specs, (), partial, reductions[0] if reductions else "sum")


def _make_level(axis: str, value: Shard | StridedShard | PartitionedShard, size: int) -> Level:
    if isinstance(value, PartitionedShard):
        if value.by_rank is not None and len(value.by_rank) != size:
            raise NotationError(
                f"{value} gives sizes for {len(value.by_rank)} ranks, but axis {axis} has {size}; "
                "give a row for each rank"
            )
        return Level([axis], value.rule)
    return Level([axis], Strided(value.split_factor) if isinstance(value, StridedShard) else None)


def _check_dimension(value: Shard | StridedShard | PartitionedShard, ndim: int) -> int:
    if not -ndim <= value.dim < ndim:
        raise NotationError(
            f"{value} shards dimension {value.dim} of a tensor of {ndim} dimensions; give "
            f"{-ndim} to {ndim - 1}"
            if ndim
            else f"{value} shards a tensor without dimensions; it can only be replicated or partial"
        )
    return value.dim % ndim


def _order_steps(
    placements: Sequence[Placement], steps: Sequence[int | None], ndim: int
) -> ShardOrder | None:
    """Return the order given by steps after placements, `S(0)[1]S(0)[0]`; None without steps."""
    if all(step is None for step in steps):
        return None
    by_dim: dict[int, list[int]] = {}
    for number, (value, step) in enumerate(zip(placements, steps, strict=True)):
        if not isinstance(value, Replicate | Partial):
            by_dim.setdefault(_check_dimension(value, ndim), []).append(number)
        elif step is not None:
            raise NotationError(
                f"{value}[{step}] on mesh axis {number}: only axes that shard have an order"
            )
    order = []
    for dim, numbers in sorted(by_dim.items()):
        # The only axis of a dimension needs no step.
        at = {steps[number]: number for number in numbers} if len(numbers) > 1 else {0: numbers[0]}
        if set(at) != set(range(len(numbers))):
            raise NotationError(
                f"the axes on dimension {dim} have the steps {[steps[n] for n in numbers]}; give "
                f"0 to {len(numbers) - 1}, each once"
            )
        order.append((dim, tuple(at[step] for step in range(len(numbers)))))
    return tuple(order)


def _check_order(
    shard_order: ShardOrder | None, by_dim: dict[int, dict[int, Level]]
) -> dict[int, list[int]]:
    """Return the axes of every dimension, by number, in the order in which they shard it."""
    rising = {dim: sorted(levels) for dim, levels in by_dim.items()}
    if shard_order is None:
        return rising
    order = {dim: list(axes) for dim, axes in shard_order}
    sharded = {dim: axes for dim, axes in rising.items() if axes}
    if {dim: sorted(axes) for dim, axes in order.items()} != sharded:
        raise NotationError(
            f"shard order {order} does not fit the placements, which shard {sharded}; name every "
            "axis of every sharded dimension once"
        )
    return rising | order


def placements_of(spec: ShardingSpec, *, partitioned: bool = False) -> DTensorPlacements:
    """Return the placements of a sharding, and the order in which axes shard each dimension.

    Args:
        spec: the sharding.
        partitioned: whether `PartitionedShard` may be used in addition to torch's placements.

    Raises:
        NotationError: a part that placements cannot express: a sub-axis, a level of several axes,
            another rule, marks for propagation, coordinates to which a tensor is restricted.

    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> found = placements_of(ShardingSpec(mesh, [DimSpec([Level(["tp"]), Level(["dp"])])]))
    >>> found.shard_order
    ((0, (1, 0)),)
    """
    _VOCABULARY.check(spec)
    axis_names = spec.mesh.axis_names
    placements: dict[str, Placement] = dict.fromkeys(axis_names, Replicate())
    order: list[tuple[int, tuple[int, ...]]] = []
    for dim, dim_spec in enumerate(spec.dim_specs):
        for level in dim_spec.levels:
            if len(level.axes) > 1:
                nested = " / ".join(map(str, level.axes))
                why = f"each placement shards over one mesh axis; `{nested}` shards the parts again"
                raise _VOCABULARY.refusal(spec, str(level), why)
            placements[level.axes[0].name] = _find_placement(spec, dim, level, partitioned)
        if dim_spec.levels:
            order.append((dim, tuple(axis_names.index(axis.name) for axis in dim_spec.axes)))
    partial = [axis.name for axis in spec.partial_axes]
    # Contributions are numbered by their axes, major to minor: another order is another numbering.
    if partial != [axis for axis in axis_names if axis in partial]:
        raise _VOCABULARY.refusal(
            spec,
            f"{spec.reduction}({' '.join(partial)})",
            "contributions are numbered in the order of the mesh's axes",
        )
    if spec.reduction is not None:
        placements |= dict.fromkeys(partial, Partial(OPERATION_OF_REDUCTION[spec.reduction]))
    return DTensorPlacements(tuple(placements.values()), tuple(order))


def _find_placement(
    spec: ShardingSpec, dim: int, level: Level, partitioned: bool
) -> Shard | StridedShard | PartitionedShard:
    """Return the placement of a level, which has a single axis."""
    if level.rule.is_default:
        return Shard(dim)
    if isinstance(level.rule, Strided) and level.rule.local_lengths is None:
        return StridedShard(dim, level.rule.stride)
    words = ["by ceil (Shard)", "by a stride (_StridedShard)"]
    if partitioned:
        size = spec.mesh.axis_size(level.axes[0])
        placement = PartitionedShard.from_rule(dim, level.rule, size)
        if placement is not None:
            return placement
        words.append("in partitions (PartitionedShard)")
    why = f"its placements shard {', '.join(words[:-1])} or {words[-1]}"
    raise _VOCABULARY.refusal(spec, str(level), why)


def mesh_of(mesh: Any) -> DeviceMesh:
    """Return the mesh of a torch `DeviceMesh`, with its ranks in its order.

    Axes without a name get `dim0`, `dim1`...

    Raises:
        MeshError: invalid axis names.
    """
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or tuple(f"dim{d}" for d in range(ranks.ndim))
    return DeviceMesh("torch", tuple(ranks.shape), names, ranks.reshape(-1).tolist())


def sharding_of_dtensor(tensor: Any, mesh: DeviceMesh | None = None) -> ShardingSpec:
    """Return the sharding of a DTensor, or of a `DTensorSpec` that has a shape.

    Accepts any object with `placements`, a `shape`, and a `mesh` or `device_mesh` of torch, which
    is not imported.

    Args:
        tensor: the DTensor.
        mesh: its mesh, if known; read from the tensor if None.

    Raises:
        NotationError: a placement that reshard cannot express.
    """
    spec = getattr(tensor, "_spec", tensor)
    if mesh is None:
        mesh = mesh_of(spec.mesh if hasattr(spec, "mesh") else spec.device_mesh)
    return sharding_of_placements(
        mesh,
        spec.placements,
        len(tensor.shape),
        getattr(spec, "shard_order", None),
    )


def to_placements(spec: ShardingSpec, shape: Sequence[int] | None = None) -> tuple[Any, ...]:
    """Return torch's placement objects for a sharding, one per mesh axis. Imports torch.

    A dimension that axes shard in another order than the mesh's is expressed by `_StridedShard`, as
    in torch, if every rank then holds the same elements of a tensor of `shape`.

    Args:
        spec: the sharding.
        shape: of the tensor; needed for an order other than the mesh's.

    Raises:
        NotationError: a part that DTensor cannot express, see `placements_of`.
        MissingExtraError: torch is not installed.
    """
    placements = find_placements(spec, shape)
    try:
        from torch.distributed.tensor import placement_types
    except ImportError as error:
        raise MissingExtraError(
            "placement objects need torch, which is not installed; `dtensor_text` writes them "
            "without it"
        ) from error
    objects: list[Any] = []
    for value in placements:
        if isinstance(value, Shard):
            objects.append(placement_types.Shard(value.dim))
        elif isinstance(value, StridedShard):
            objects.append(
                # torch lacks a public name for this placement.
                placement_types._StridedShard(value.dim, split_factor=value.split_factor)
            )
        elif isinstance(value, Partial):
            objects.append(placement_types.Partial(value.operation))
        else:
            objects.append(placement_types.Replicate())
    return tuple(objects)


def find_placements(
    spec: ShardingSpec, shape: Sequence[int] | None = None
) -> tuple[Placement, ...]:
    """Return placements to be applied from left to right, as torch does, one per mesh axis.

    Args:
        spec: the sharding.
        shape: of the tensor; needed if axes shard a dimension in another order than the mesh's.

    Raises:
        NotationError: a part that DTensor cannot express, see `placements_of`.

    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(dp=2, tp=2)
    >>> print(*find_placements(spec(mesh, "tp / dp, -"), (8, 4)))
    _StridedShard(0, split_factor=2) Shard(0)
    """
    ordered = placements_of(spec)
    return ordered.placements if ordered.is_left_to_right else _find_strided(ordered, spec, shape)


def _find_strided(
    ordered: DTensorPlacements, spec: ShardingSpec, shape: Sequence[int] | None
) -> tuple[Placement, ...]:
    """Return placements that give the layout of ordered placements if applied from left to right.

    An axis that shards a dimension after later axes of the mesh takes their parts as its blocks.
    Source: `DTensorSpec._convert_shard_order_to_StridedShard`.
    """
    if shape is None:
        why = (
            "axes shard a dimension in another order than the mesh's; give the shape, so that "
            "`_StridedShard` can be tried"
        )
        raise _VOCABULARY.refusal(spec, str(spec), why)
    placements = list(ordered.placements)
    for dim, axes in ordered.shard_order:
        for step, axis in enumerate(axes):
            blocks = 1
            # Axes that shard before this axis, but follow it in the mesh, are applied after it.
            for earlier in axes[:step]:
                blocks *= spec.mesh.shape[earlier] if earlier > axis else 1
            if blocks > 1 and placements[axis] == Shard(dim):
                placements[axis] = StridedShard(dim, blocks)
    # Blocks are by ceil, so uneven shapes may be split at other indices: compare for this shape.
    strided = sharding_of_placements(spec.mesh, placements, spec.ndim)
    if not _are_equal(strided.layout(shape), spec.layout(shape)):
        why = (
            "axes shard a dimension in another order than the mesh's, and the blocks of "
            f"`_StridedShard` differ for shape {list(shape)}; pad it, or take a mesh whose axes "
            "are in that order"
        )
        raise _VOCABULARY.refusal(spec, str(spec), why)
    return tuple(placements)


def _are_equal(first: Layout, second: Layout) -> bool:
    """Return whether every rank holds the same elements in the same order.

    The numbers of parts may differ.
    """
    for dim in range(first.ndim):
        pairs = np.stack((first.cell_part[:, dim], second.cell_part[:, dim]), axis=1)
        for part, counterpart in find_distinct(pairs)[0].tolist():
            if first.tables[dim].runs_of(part) != second.tables[dim].runs_of(counterpart):
                return False
    return True
