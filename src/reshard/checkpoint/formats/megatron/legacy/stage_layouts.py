"""Where model-parallel ranks of Megatron have the tensors of a model.

    mesh         tp, pp, ep; dp and cp have copies, which have no folder
    stage        decoder layers in equal stretches; embeddings on the first, what is behind the
                 layers on the last, with the embedding once more where it is tied
    vp           a stage has so many stretches, its chunks: the first of all stages, then the second
                 ones. A chunk counts as a rank here; those of a stage are in one folder
    ep           experts in equal stretches; everything else on every rank
    tp           by the cut of the parameter (`parameter_cuts`)

Optimizer state is where its parameter is.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reshard.checkpoint.formats.megatron.common_state import is_expert
from reshard.checkpoint.formats.megatron.legacy.rank_folders import Parallelism, RankPlace
from reshard.checkpoint.formats.megatron.parameters import engine_name, find_cut
from reshard.checkpoint.formats.megatron.rank_blocks import BlockPlace
from reshard.checkpoint.formats.torch_files.optimizer_states import split_state_name
from reshard.errors import RecipeError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh

AXES = ("tp", "pp", "ep", "vp", "dp", "cp")
_PLACED = RankPlace._fields
_LAYER = re.compile(r"^((?:.*?\.)?layers\.)(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True)
class RankGrid:
    """The model-parallel places of the ranks of a mesh; None of one rank."""

    mesh: DeviceMesh | None

    def __post_init__(self) -> None:
        for axis in self.mesh.axis_names if self.mesh is not None else ():
            if axis not in AXES:
                raise UsageError(
                    f"the axis {axis!r}; Megatron's ranks have {', '.join(AXES)}, so give a mesh "
                    "such as tp=2,pp=4"
                )
        if self.sizes.vp > 1 and self.sizes.pp == 1:
            raise UsageError(
                f"vp={self.sizes.vp} with one stage; virtual stages are chunks of several, so give "
                f"a mesh such as pp=2,vp={self.sizes.vp}"
            )

    @cached_property
    def sizes(self) -> Parallelism:
        """The sizes of model parallelism."""
        names = self.mesh.axis_names if self.mesh is not None else ()
        found = dict(zip(names, self.mesh.shape if self.mesh is not None else (), strict=True))
        tp = found.get("tp", 1)
        return Parallelism(tp, found.get("pp", 1), found.get("ep", 1), tp, found.get("vp", 1))

    @cached_property
    def places(self) -> dict[int, RankPlace]:
        """The place of each rank."""
        if self.mesh is None:
            return {0: RankPlace()}
        own = [axis for axis in _PLACED if axis in self.mesh.axis_names]
        columns = {axis: self.mesh.coordinates([axis]) for axis in own}
        return {
            rank: RankPlace(**{axis: int(columns[axis][n]) for axis in own})
            for n, rank in enumerate(self.mesh.devices)
        }

    @cached_property
    def folders(self) -> dict[RankPlace, tuple[int, ...]]:
        """The places that have a folder, with the first rank of each chunk, which saves it."""
        found: dict[RankPlace, int] = {}
        for rank, place in sorted(self.places.items()):
            found.setdefault(place, rank)
        chunks = range(self.sizes.vp)
        return {
            place: tuple(found[place._replace(vp=chunk)] for chunk in chunks)
            for place in self.sizes.places()
        }


@dataclass
class StageLayouts:
    """The layouts of a model's tensors over a grid.

    Args:
        grid: the ranks.
        shapes: of all tensors, by name.
        arguments: Megatron's, where they are known.

    Raises:
        RecipeError: a model that the grid does not divide, or whose cut is not known.
    """

    grid: RankGrid
    shapes: Mapping[str, tuple[int, ...]]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = [name for name in self.shapes if split_state_name(name) is None]
        self.names = set(weights)
        self.engine = {name: engine_name(name, self.names) for name in weights}
        self.weights: dict[str, tuple[int, ...]] = {
            self.engine[name]: self.shapes[name] for name in weights
        }
        self.layers = self._count_layers()
        self.experts = self._count_experts()
        self.is_tied = OUTPUT not in self.weights and EMBEDDING in self.weights
        self._made: dict[Any, Layout] = {}

    def _count_layers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in self.weights:
            match = _LAYER.match(name)
            if match is not None:
                found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
        pp, vp = self.grid.sizes.pp, self.grid.sizes.vp
        count = found.get("decoder.layers.", 0)
        if count % (pp * vp):
            stages, choice = f"{pp} stages", "pp"
            if vp > 1:
                stages, choice = f"{pp} stages of {vp} chunks each", "pp times vp"
            raise RecipeError(f"{count} layers on {stages}; choose a {choice} that divides {count}")
        return found

    def _count_experts(self) -> int:
        numbers = [int(match[1]) for name in self.weights if (match := _LOCAL_EXPERT.search(name))]
        count = max(numbers, default=-1) + 1
        if count % self.grid.sizes.ep:
            raise RecipeError(
                f"{count} experts on {self.grid.sizes.ep} expert-parallel ranks; choose an ep that "
                f"divides {count}"
            )
        return count

    def layouts(self) -> dict[str, Layout]:
        """The layout of every tensor."""
        return {name: self._layout(name) for name in self.shapes}

    def parameter_of(self, name: str) -> str:
        """The parameter of a tensor, by the name that it has in Transformer Engine's layers."""
        state = split_state_name(name)
        parameter = name if state is None else state[0]
        return self.engine.get(parameter) or engine_name(parameter, self.names)

    def _layout(self, name: str) -> Layout:
        shape, parameter = self.shapes[name], self.parameter_of(name)
        own = shape if shape else ()
        slots = len(self.grid.places)
        holders = tuple(self.holders(parameter))
        cut = self.cut(parameter, own)
        key = (own, cut, holders)
        found = self._made.get(key)
        if found is None:
            pairs = [
                (rank, box)
                for rank in holders
                for box in self.block(parameter, own, self.grid.places[rank]).boxes()
            ]
            found = self._made[key] = Layout.from_boxes(own, pairs, slots)
        return found

    def holders(self, parameter: str) -> Iterable[int]:
        """The ranks that have a part of a parameter."""
        return [rank for rank, place in self.grid.places.items() if self.is_held(parameter, place)]

    def is_held(self, parameter: str, place: RankPlace) -> bool:
        """Whether the rank at a place has a part of a parameter."""
        expert = _LOCAL_EXPERT.search(parameter)
        if expert is not None:
            each = self.experts // self.grid.sizes.ep
            if int(expert[1]) // each != place.ep:
                return False
        return (place.pp, place.vp) in self.stages(parameter)

    def held(self, ordered: Iterable[str], place: RankPlace) -> list[str]:
        """Those of the parameters, in the order of modules, that the rank at a place has."""
        found = [name for name in ordered if self.is_held(name, place)]
        # The second place of a tied embedding is behind everything else.
        return sorted(found, key=lambda name: self.rank_name(name, place).startswith(OUTPUT))

    def stages(self, parameter: str) -> tuple[tuple[int, int], ...]:
        """The stages that have a parameter, each with the number of its chunk."""
        sizes = self.grid.sizes
        first, last = (0, 0), (sizes.pp - 1, sizes.vp - 1)
        match = _LAYER.match(parameter)
        if match is not None and match[1] == "decoder.layers.":
            stretch = int(match[2]) // (self.layers[match[1]] // (sizes.pp * sizes.vp))
            return ((stretch % sizes.pp, stretch // sizes.pp),)
        if parameter.startswith("embedding."):
            is_twice = self.is_tied and parameter == EMBEDDING and last != first
            return (first, last) if is_twice else (first,)
        return (last,)

    def first_layer(self, row: str, place: RankPlace) -> int:
        """The first layer of a chunk of a stage, in the whole model."""
        if row != "decoder.layers.":
            return 0
        sizes = self.grid.sizes
        return (place.vp * sizes.pp + place.pp) * (self.layers[row] // (sizes.pp * sizes.vp))

    def cut(self, parameter: str, shape: tuple[int, ...]) -> tuple[int | None, int]:
        """The dimension that tensor parallelism cuts, and the stretches of each part."""
        tp = self.grid.sizes.tp
        if tp == 1 or not shape:
            return None, 1
        known = ChainMap({parameter: shape}, self.weights)
        cut = find_cut(parameter, known, self.arguments.get("q_lora_rank"))
        if cut is None:
            raise RecipeError(
                f"how Megatron cuts {parameter!r} over tensor-parallel ranks is not known; convert "
                "to tp=1, or to torch-dist"
            )
        if cut.dimension is not None and (
            cut.dimension >= len(shape) or shape[cut.dimension] % (tp * cut.stride)
        ):
            raise RecipeError(
                f"{parameter!r} of {list(shape)} on {tp} tensor-parallel ranks; dimension "
                f"{cut.dimension} does not divide by {tp * cut.stride}"
            )
        return cut.dimension, cut.stride

    def block(self, parameter: str, shape: tuple[int, ...], place: RankPlace) -> BlockPlace:
        """The part of a parameter that the rank at a place has."""
        dimension, stride = self.cut(parameter, shape)
        if dimension is None:
            return BlockPlace(shape)
        parts = self.grid.sizes.tp
        own = list(shape)
        own[dimension] //= parts
        return BlockPlace.cut(own, dimension, place.tp, parts, stride)

    def rank_name(self, parameter: str, place: RankPlace) -> str:
        """The name that a parameter has on the rank at a place, in Transformer Engine's layers."""
        if self.is_tied and parameter == EMBEDDING and place.pp > 0:
            return OUTPUT
        match = _LAYER.match(parameter)
        if match is not None:
            number = int(match[2]) - self.first_layer(match[1], place)
            parameter = f"{match[1]}{number}.{parameter[match.end() :]}"
        expert = _LOCAL_EXPERT.search(parameter)
        if expert is not None:
            number = int(expert[1]) - place.ep * (self.experts // self.grid.sizes.ep)
            parameter = (
                f"{parameter[: expert.start()]}.experts.local_experts.{number}."
                f"{parameter[expert.end() :]}"
            )
        return parameter

    @property
    def has_expert_optimizer(self) -> bool:
        """Whether experts have an optimizer of their own."""
        return self.grid.sizes.ep > 1 and any(map(is_expert, self.weights))
