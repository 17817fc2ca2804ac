"""What a rank takes of a model, beside its parameters: boxes of the sources, which fill them.

A rank of vLLM has parameters in the form of its kernels, into which nothing can be copied from
outside. So what arrives waits in boxes of the sources, each as large as what the rank takes::

    source up, 8 x 4        staged, rows 4:8        parameter gate_up, 8 x 4

    . . . .                                         gate gate
    . . . .                 # # # #     ------>     up up
    # # # #                 # # # #
    # # # #

1. Which boxes is what the traced loader says (`RankLayout`). A parameter that it computes is filled
   by the loader itself, from whole sources; so is one that shares a source with such a one, or
   takes elements across dimensions.
2. Staged tensors have the type of the parameters that take them, so what is cast is cast where it
   comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from reshard.binding import View
from reshard.errors import ShardError
from reshard.layout import Box, Layout
from reshard.recipes.engine_layouts import ParameterLayout, RankLayout, SourcePiece, SourceTensor
from reshard.recipes.engine_layouts.source_layouts import find_products, find_steps

_CAST = "to "
# Of each dimension of a piece the one of the source, and the step there.
_Along = list[tuple[int, int] | None]


class StagedSources:
    """The boxes of sources that a rank takes, in memory of the host.

    Args:
        traced: what the rank's loader does.
        sources: the whole tensors that it loads, by name.
        rank: the one that the layouts call it.

    Attributes:
        tensors: what the rank takes, `{source: (tensor, Layout)}`: a target of a refit, in which
            the layout knows this rank only.
        by_loader: the sources that the loader itself has to load, whole.
        parameters: the parameters that `fill` makes.

    Raises:
        ShardError: a loader that takes nothing of the sources.

    >>> from reshard.recipes.engine_layouts import ParameterLayout, SourcePiece
    >>> from reshard.dtypes import dtype
    >>> rows = SourcePiece(Box((0, 0), (2, 3)), "up", View(6, (3, 1)))
    >>> parameter = ParameterLayout.of("up", (2, 3), "float32", [rows])
    >>> sources = {"up": SourceTensor(dtype("bfloat16"), (4, 3))}
    >>> staged = StagedSources(RankLayout(1, {"up": parameter}), sources, 1)
    >>> tensor, layout = staged.tensors["up"]
    >>> tensor.dtype, layout.boxes(1)
    (torch.float32, (Box(start=(2, 0), stop=(4, 3)),))
    """

    def __init__(self, traced: RankLayout, sources: Mapping[str, SourceTensor], rank: int) -> None:
        tied = {name for group in traced.tied for name in sorted(group)[1:]}
        read = {n: one for n, one in traced.parameters.items() if one.sources and n not in tied}
        if not read:
            raise ShardError(
                f"vLLM takes nothing of the {len(sources)} tensors on this rank (first: "
                f"{next(iter(sources), None)!r}); give the names that its load_weights knows"
            )
        self.by_loader = _find_whole(read.values(), sources)
        self.parameters = {
            name: one for name, one in read.items() if self.by_loader.isdisjoint(one.sources)
        }
        regions: dict[str, list[Box]] = {name: [] for name in self.by_loader}
        kinds: dict[str, set[str]] = {name: set() for name in self.by_loader}
        for parameter in self.parameters.values():
            for piece in parameter.pieces:
                regions.setdefault(piece.source, []).extend(_boxes(piece, sources[piece.source]))
                kinds.setdefault(piece.source, set()).add(parameter.dtype.name)
        self.tensors: dict[str, tuple[torch.Tensor, Layout]] = {}
        self._starts: dict[str, tuple[int, ...]] = {}
        for name, boxes in regions.items():
            source = sources[name]
            whole = Box((0,) * len(source.shape), source.shape)
            box = whole if name in self.by_loader else _enclose(boxes)
            kind = kinds[name].pop() if len(kinds[name]) == 1 else source.dtype.name
            tensor = torch.zeros(box.shape, dtype=getattr(torch, kind))
            self.tensors[name] = tensor, Layout.from_boxes(source.shape, [(rank, box)], rank + 1)
            self._starts[name] = box.start
        self._shapes = {name: sources[name].shape for name in regions}

    @property
    def size_bytes(self) -> int:
        """What is staged."""
        return sum(tensor.nbytes for tensor, _ in self.tensors.values())

    def fill(self, name: str) -> torch.Tensor:
        """A parameter as its loader would have it; what it does not fill is 0."""
        parameter = self.parameters[name]
        found = torch.zeros(parameter.shape, dtype=getattr(torch, parameter.dtype.name))
        for piece in parameter.pieces:
            where = _steps_of(piece, self._shapes[piece.source])
            # Else the parameter would be the loader's.
            if where is not None:
                found[_index(piece.box)] = self._view(piece, *where)
        for constant in parameter.constants:
            found[_index(constant.box)] = constant.value
        return found

    def list_whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader has to load itself."""
        return ((name, self.tensors[name][0]) for name in sorted(self.by_loader))

    def _view(self, piece: SourcePiece, first: list[int], along: _Along) -> torch.Tensor:
        """The elements of a piece among those that are staged."""
        staged, _ = self.tensors[piece.source]
        begin = zip(first, self._starts[piece.source], staged.stride(), strict=True)
        offset = sum((at - start) * stride for at, start, stride in begin)
        strides = [0 if one is None else staged.stride(one[0]) * one[1] for one in along]
        return staged.as_strided(piece.box.shape, strides, offset)


def _find_whole(
    parameters: Iterable[ParameterLayout], sources: Mapping[str, SourceTensor]
) -> set[str]:
    """The sources of what the loader computes, and of all that takes a part of these."""
    left = list(parameters)
    found: set[str] = set()
    grows = True
    while grows:
        rest = []
        for one in left:
            if _is_copied(one, sources) and found.isdisjoint(one.sources):
                rest.append(one)
            else:
                found.update(one.sources)
        grows, left = len(rest) < len(left), rest
    return found


def _is_copied(parameter: ParameterLayout, sources: Mapping[str, SourceTensor]) -> bool:
    return not parameter.computed and all(
        all(step.startswith(_CAST) for step in piece.steps)
        and _steps_of(piece, sources[piece.source].shape) is not None
        for piece in parameter.pieces
    )


def _steps_of(piece: SourcePiece, shape: tuple[int, ...]) -> tuple[list[int], _Along] | None:
    return find_steps(shape, piece.box.shape, piece.view.offset, piece.view.strides)


def _boxes(piece: SourcePiece, source: SourceTensor) -> Iterator[Box]:
    view: View = piece.view
    for product in find_products(source.shape, piece.box.shape, view.offset, view.strides):
        start = tuple(stretches[0][0] for stretches in product)
        yield Box(start, tuple(stretches[-1][1] for stretches in product))


def _enclose(boxes: list[Box]) -> Box:
    """The smallest box around others."""
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    return Box(start, tuple(map(max, zip(*(box.stop for box in boxes), strict=True))))


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
