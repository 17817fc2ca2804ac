"""All parameters of an engine's ranks, by the loader of that engine.

An `EngineLayout` describes, for a model, an engine and a parallelism, what `load_weights` does on
every rank. It has two views: the sources of each parameter (`ranks`), and the ranks that hold each
tensor of the checkpoint (`source_layouts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from reshard._validation import check_int, check_ints, check_type
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import LayoutError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.engine_layouts.parameter_layout import ParameterLayout, ParameterPattern
from reshard.recipes.engine_layouts.source_layouts import list_source_layouts

# How the layout of a rank was found: by following copies, or from values that encode positions.
METHODS = ("followed", "values")


class SourceTensor(NamedTuple):
    """A tensor that a loader reads: its element type and shape."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankLayout:
    """The parameters of a rank, by the engine's names.

    Attributes:
        rank: among all ranks of the engine.
        parameters: by name, in the engine's order.
        unread: sources that the loader was given, and that no parameter of this rank contains.
        tied: groups of parameters that share their memory.
        method: how it was found: `"followed"`, or `"values"` where the loader had to see values.
        notes: for the user.
    """

    rank: int
    parameters: Mapping[str, ParameterLayout]
    unread: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    method: str = METHODS[0]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_int(self.rank, "rank", LayoutError))
        hint = "give {name: ParameterLayout}"
        check_type(self.parameters, Mapping, "parameters", hint, LayoutError)
        for name, parameter in self.parameters.items():
            if not isinstance(parameter, ParameterLayout) or parameter.name != name:
                raise LayoutError(f"parameter {name!r} is {parameter!r}; {hint} by its own name")
        if self.method not in METHODS:
            raise LayoutError(f"method {self.method!r}; it is one of {', '.join(METHODS)}")
        object.__setattr__(self, "unread", tuple(self.unread))
        object.__setattr__(self, "tied", tuple(tuple(group) for group in self.tied))
        object.__setattr__(self, "notes", tuple(self.notes))
        for group in self.tied:
            for name in group:
                if name not in self.parameters:
                    raise LayoutError(f"{name!r} is tied to others, and is not a parameter")

    def __getitem__(self, name: str) -> ParameterLayout:
        if name not in self.parameters:
            raise LayoutError(
                f"rank {self.rank} has no parameter {name!r}; it has {len(self.parameters)}, such "
                f"as {next(iter(self.parameters), 'none')!r}"
            )
        return self.parameters[name]

    @property
    def size_bytes(self) -> int:
        """The bytes of all parameters; tied parameters count once."""
        again = {name for group in self.tied for name in group[1:]}
        return sum(
            math.prod(parameter.shape) * parameter.dtype.itemsize_bytes
            for name, parameter in self.parameters.items()
            if name not in again
        )


@dataclass(frozen=True)
class EngineLayout:
    """The parameters of an engine's ranks, filled from a checkpoint, in a parallelism.

    Args:
        engine: its name, such as `"vllm"`.
        version: of the engine.
        mesh: the parallelism; its devices are the ranks.
        sources: the checkpoint's tensors by name: element type and shape.
        ranks: the layout of each rank, in the order of their numbers.
        notes: for the user.

    Raises:
        LayoutError: ranks other than those of the mesh, or that read an unknown source, or
            beyond its end.

    >>> from reshard.binding import View
    >>> from reshard.layout import Box
    >>> from reshard.recipes.engine_layouts import SourcePiece
    >>> def rank(number):
    ...     half = SourcePiece(Box((0, 0), (2, 8)), "up", View(16 * number, (8, 1)))
    ...     return RankLayout(number, {"w": ParameterLayout.of("w", (2, 8), "float32", [half])})
    >>> engine = EngineLayout(
    ...     "toy", "1.0", DeviceMesh.of(tp=2), {"up": ("float32", (4, 8))}, (rank(0), rank(1))
    ... )
    >>> print(engine.source_layouts()["up"])
    4 x 8 on ranks 0,1
    dimension 0 in 2 parts
      0:2  rank 0
      2:4  rank 1
    dimension 1 whole
    """

    document_kind: ClassVar[str] = "engine-layout"

    engine: str
    version: str
    mesh: DeviceMesh
    sources: Mapping[str, SourceTensor]
    ranks: Sequence[RankLayout]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, text in (("engine", self.engine), ("version", self.version)):
            check_type(text, str, what, "give a text, such as 'vllm'", LayoutError)
        check_type(self.mesh, DeviceMesh, "mesh", "such as DeviceMesh.of(tp=2)", LayoutError)
        hint = "give {name: (dtype, shape)}"
        check_type(self.sources, Mapping, "sources", hint, LayoutError)
        object.__setattr__(
            self,
            "sources",
            {name: _as_source(name, source) for name, source in self.sources.items()},
        )
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "notes", tuple(self.notes))
        numbers = [layout.rank for layout in self.ranks]
        if numbers != sorted(self.mesh.devices):
            raise LayoutError(
                f"layouts of the ranks {numbers} for the mesh {self.mesh.text}, whose ranks are "
                f"{sorted(self.mesh.devices)}; give a layout for each, in order"
            )
        sizes = {name: math.prod(source.shape) for name, source in self.sources.items()}
        # Ranks and layers share patterns, so each pattern is checked once for its sources.
        checked: set[tuple[ParameterPattern, tuple[str, ...]]] = set()
        for rank in self.ranks:
            for name in rank.unread:
                if name not in sizes:
                    raise LayoutError(
                        f"{name!r}, which rank {rank.rank} does not read, is not a source"
                    )
            for parameter in rank.parameters.values():
                key = (parameter.pattern, parameter.sources)
                if key not in checked:
                    _check_reach(rank.rank, parameter, sizes)
                    checked.add(key)

    def rank(self, rank: int) -> RankLayout:
        """Return the layout of a rank. Raises UsageError for an unknown rank."""
        for layout in self.ranks:
            if layout.rank == rank:
                return layout
        raise UsageError(
            f"rank {rank!r} of a layout for {self.mesh.text}; its ranks are "
            f"{min(self.mesh.devices)} to {max(self.mesh.devices)}"
        )

    def source_layouts(self) -> dict[str, Layout]:
        """Return the layout over ranks of every source.

        Indices of a rank are in rising order, and each is there once, however often its
        parameters have it. A rank holds the elements that its parameters copy or compute
        elementwise, and the whole of sources used in another way. Unread sources are on no rank.
        """
        slots = max(self.mesh.devices) + 1
        shapes = {name: source.shape for name, source in self.sources.items()}
        held: list[tuple[int, Sequence[tuple[ParameterPattern, tuple[str, ...]]]]] = [
            (layout.rank, [(p.pattern, p.sources) for p in layout.parameters.values()])
            for layout in self.ranks
        ]
        return list_source_layouts(shapes, held, slots)

    @property
    def computed(self) -> dict[str, tuple[str, ...]]:
        """The parameters that are computed, on any rank: their operations by name."""
        result: dict[str, tuple[str, ...]] = {}
        for rank in self.ranks:
            for name, parameter in rank.parameters.items():
                for region in parameter.pattern.computed:
                    result.setdefault(name, region.operations)
        return result

    @property
    def unread(self) -> tuple[str, ...]:
        """The sources that no rank reads."""
        left = set(self.sources)
        for rank in self.ranks:
            left &= set(rank.unread)
        return tuple(name for name in self.sources if name in left)


def _as_source(name: str, source: Any) -> SourceTensor:
    try:
        kind, shape = source
    except (TypeError, ValueError):
        raise LayoutError(
            f"source {name!r} is {source!r}; give its dtype and shape, such as ('bfloat16', (4, 8))"
        ) from None
    return SourceTensor(as_dtype(kind), check_ints(shape, f"shape of {name!r}", LayoutError))


def _check_reach(rank: int, parameter: ParameterLayout, sizes: Mapping[str, int]) -> None:
    """Raise LayoutError if a parameter reads an unknown source, or beyond its end."""
    missing = next((name for name in parameter.sources if name not in sizes), None)
    if missing is not None:
        raise LayoutError(
            f"{parameter.name!r} of rank {rank} is filled from {missing!r}, which is not a source"
        )
    low, high = parameter.pattern.reach
    size = np.array([sizes[name] for name in parameter.sources], dtype=np.int64)
    beyond = np.flatnonzero((high >= size) | (low < 0))
    if len(beyond):
        name = parameter.sources[int(beyond[0])]
        raise LayoutError(
            f"{parameter.name!r} of rank {rank} reads elements {low[beyond[0]]} to "
            f"{high[beyond[0]]} of {name!r}, which has {sizes[name]}"
        )
