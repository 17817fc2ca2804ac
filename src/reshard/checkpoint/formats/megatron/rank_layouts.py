"""The ranks of Megatron's model parallelism, and the parts of a model that each holds.

Tensors are distributed over model-parallel ranks as follows; optimizer state follows its parameter:

    mesh         tp, pp, ep; dp and cp have copies, which have no folder
    stage        decoder layers in equal stretches; embeddings on the first, tensors after the
                 layers on the last, with a copy of a tied embedding
    vp           a stage has this many stretches, its chunks: the first of all stages, then the
                 second. A chunk counts as a rank here; the chunks of a stage share a folder
    ep           experts in equal stretches; all other tensors on every rank
    tp           by the sharded dimension of the parameter (`find_cut`)
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from reshard.checkpoint.formats.chunks import BlockPlace
from reshard.checkpoint.formats.megatron import modules
from reshard.checkpoint.formats.megatron.common_state import PARALLELISM
from reshard.checkpoint.formats.megatron.rank_blocks import RankParameter
from reshard.checkpoint.formats.optimizer_states import split_state_name
from reshard.dtypes import DType
from reshard.errors import FormatError, RecipeError, UsageError
from reshard.layout import Layout
from reshard.megatron.names import EMBEDDING, OUTPUT
from reshard.mesh import DeviceMesh


class RankPlace(NamedTuple):
    """The place of a rank in tensor, pipeline and expert parallelism; `vp` is a chunk of it."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    vp: int = 0


# More model-parallel ranks than any cluster has.
_MAX_RANKS = 1 << 20


class Parallelism(NamedTuple):
    """The sizes of model parallelism; `vp` is how many chunks of the model a stage has."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, ep {self.ep}, etp {self.etp}, vp {self.vp}"

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any], label: str) -> Parallelism:
        """Return the sizes in Megatron's arguments; `label` names their file.

        Raises FormatError for a value that is not a size.
        """

        sizes: dict[str, int] = {}
        for axis in cls._fields:
            name = PARALLELISM[axis]
            size = arguments.get(name)
            # Experts are sharded as the rest, unless they have a size of their own.
            size = (sizes["tp"] if axis == "etp" else 1) if size is None else size
            if type(size) is not int or not 1 <= size <= 1 << 16:
                raise FormatError(f"{label}: args.{name} is {size!r}, expected a number from 1 on")
            sizes[axis] = size
        result = cls(**sizes)
        # Folders are looked up rank by rank, and a damaged file may have any numbers.
        if result.tp * result.pp * result.ep > _MAX_RANKS:
            raise FormatError(f"{label}: {result} are more than {_MAX_RANKS:,} ranks")
        return result

    def folder_name(self, place: RankPlace) -> str:
        """Return the name of a rank's folder.

        >>> Parallelism(tp=2, pp=4).folder_name(RankPlace(1, 3))
        'mp_rank_01_003'
        """
        name = f"mp_rank_{place.tp:02d}"
        if self.pp > 1:
            name += f"_{place.pp:03d}"
        return f"{name}_{place.ep:03d}" if self.ep > 1 else name

    def places(self) -> list[RankPlace]:
        """Return the places that have a folder, in the order of ranks: tp first, pp last."""
        # A place is there if a rank `n` has both indices: `tp` is `n % self.tp`, and `ep` is
        # `n // self.etp % self.ep`. By the Chinese remainder theorem, both can be chosen freely
        # but for the remainder of `n` by the common divisor of the two periods.
        common = math.gcd(self.tp, self.etp * self.ep)
        return [
            RankPlace(tp, pp, ep)
            for pp in range(self.pp)
            for ep in range(self.ep)
            for tp in range(self.tp)
            if (tp - ep * self.etp) % common < self.etp
        ]


AXES = ("tp", "pp", "ep", "vp", "dp", "cp")
_PLACED = RankPlace._fields


class StageLayouts:
    """The layouts of a model's tensors over the ranks of a mesh.

    Args:
        mesh: of the ranks; a single rank if it is None.
        shapes: of all tensors, by name.
        arguments: Megatron's, if known.

    Raises:
        RecipeError: a model that the ranks do not divide, whose sharding is not known, or that has
            optimizer state of a parameter without a weight.
        UsageError: a mesh that Megatron's ranks cannot form.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        shapes: Mapping[str, tuple[int, ...]],
        arguments: Mapping[str, Any],
    ) -> None:
        self.mesh, self.shapes, self.arguments = mesh, shapes, arguments
        axes = {} if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True))
        for axis in axes:
            if axis not in AXES:
                raise UsageError(
                    f"the axis {axis!r}; Megatron's ranks have {', '.join(AXES)}, so give a mesh "
                    "such as tp=2,pp=4"
                )
        pp, ep, vp, tp = (axes.get(axis, 1) for axis in ("pp", "ep", "vp", "tp"))
        self.sizes = sizes = Parallelism(tp, pp, ep, etp=tp, vp=vp)
        if sizes.vp > 1 and sizes.pp == 1:
            raise UsageError(
                f"vp={sizes.vp} with one stage; virtual stages are chunks of several, so give "
                f"a mesh such as pp=2,vp={sizes.vp}"
            )
        weights = [name for name in shapes if split_state_name(name) is None]
        self.names = set(weights)
        self.engine = {name: modules.engine_name(name, self.names) for name in weights}
        self.weights: dict[str, tuple[int, ...]] = {
            self.engine[name]: shapes[name] for name in weights
        }
        without = next((p for p in map(self.parameter_of, shapes) if p not in self.weights), None)
        if without is not None:
            raise RecipeError(
                f"{without!r} has optimizer state and no weight, whose type and place determine "
                "where its state is; convert to torch-dist"
            )
        self.layers = self._count_layers()
        self.experts = self._count_experts()
        self.is_tied = OUTPUT not in self.weights and EMBEDDING in self.weights
        self._made: dict[Any, Layout] = {}

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
        first: dict[RankPlace, int] = {}
        for rank, place in sorted(self.places.items()):
            first.setdefault(place, rank)
        chunks = range(self.sizes.vp)
        return {
            place: tuple(first[place._replace(vp=chunk)] for chunk in chunks)
            for place in self.sizes.places()
        }

    def _count_layers(self) -> dict[str, int]:
        counts = modules.count_layers(self.weights)
        pp, vp = self.sizes.pp, self.sizes.vp
        count = counts.get(modules.DECODER, 0)
        if count % (pp * vp):
            stages, choice = f"{pp} stages", "pp"
            if vp > 1:
                stages, choice = f"{pp} stages of {vp} chunks each", "pp times vp"
            raise RecipeError(f"{count} layers on {stages}; choose a {choice} that divides {count}")
        return counts

    def _count_experts(self) -> int:
        numbers = [expert[1] for name in self.weights if (expert := modules.split_expert(name))]
        count = max(numbers, default=-1) + 1
        if count % self.sizes.ep:
            raise RecipeError(
                f"{count} experts on {self.sizes.ep} expert-parallel ranks; choose an ep that "
                f"divides {count}"
            )
        return count

    def layouts(self) -> dict[str, Layout]:
        """Return the layout of every tensor."""
        return {name: self._layout(name) for name in self.shapes}

    def parameter_of(self, name: str) -> str:
        """Return the parameter of a tensor, by its name in Transformer Engine's layers."""
        state = split_state_name(name)
        parameter = name if state is None else state[0]
        return self.engine.get(parameter) or modules.engine_name(parameter, self.names)

    def _layout(self, name: str) -> Layout:
        shape, parameter = self.shapes[name], self.parameter_of(name)
        slots = len(self.places)
        # Layers are alike: most parameters share a few layouts.
        holders = tuple(self.holders(parameter))
        cut = self.cut(parameter, shape)
        key = (shape, cut, holders)
        layout = self._made.get(key)
        if layout is None:
            pairs = [
                (rank, box)
                for rank in holders
                for box in self.block(parameter, shape, self.places[rank]).boxes()
            ]
            layout = self._made[key] = Layout.from_boxes(shape, pairs, slots)
        return layout

    def holders(self, parameter: str) -> Iterable[int]:
        """Return the ranks that have a part of a parameter."""
        return [rank for rank, place in self.places.items() if self.is_held(parameter, place)]

    def is_held(self, parameter: str, place: RankPlace) -> bool:
        """Return whether the rank at a place has a part of a parameter."""
        expert = modules.split_expert(parameter)
        if expert is not None and expert[1] // (self.experts // self.sizes.ep) != place.ep:
            return False
        return (place.pp, place.vp) in self.stages(parameter)

    def held(self, ordered: Iterable[str], place: RankPlace) -> list[str]:
        """Return the parameters that the rank at a place has, in the order of modules."""
        names = [name for name in ordered if self.is_held(name, place)]
        # The copy of a tied embedding comes last.
        return sorted(names, key=lambda name: self.rank_name(name, place).startswith(OUTPUT))

    def parameters(
        self, ordered: Iterable[str], place: RankPlace, dtypes: Mapping[str, DType]
    ) -> list[RankParameter]:
        """Return the parameters of all chunks of the rank at a place, in the order of modules.

        `ordered` and `dtypes` have the names of the whole model.
        """
        chunks = [place._replace(vp=chunk) for chunk in range(self.sizes.vp)]
        return [
            RankParameter(
                chunk.vp,
                name,
                dtypes[name],
                self.block(name, self.weights[name], chunk).block_shape,
            )
            for chunk in chunks
            for name in self.held(ordered, chunk)
        ]

    def stages(self, parameter: str) -> tuple[tuple[int, int], ...]:
        """Return the stages that have a parameter, each with the number of its chunk."""
        sizes = self.sizes
        first, last = (0, 0), (sizes.pp - 1, sizes.vp - 1)
        layer = modules.split_layer(parameter)
        if layer is not None and layer[0] == modules.DECODER:
            stretch = layer[1] // (self.layers[modules.DECODER] // (sizes.pp * sizes.vp))
            return ((stretch % sizes.pp, stretch // sizes.pp),)
        if parameter.startswith("embedding."):
            is_twice = self.is_tied and parameter == EMBEDDING and last != first
            return (first, last) if is_twice else (first,)
        return (last,)

    def first_layer(self, row: str, place: RankPlace) -> int:
        """Return the first layer of a chunk of a stage, in the whole model."""
        if row != modules.DECODER:
            return 0
        sizes = self.sizes
        return (place.vp * sizes.pp + place.pp) * (self.layers[row] // (sizes.pp * sizes.vp))

    def cut(self, parameter: str, shape: tuple[int, ...]) -> modules.ParameterCut:
        """Return the dimension that tensor parallelism cuts, and the stretches of each part."""
        tp = self.sizes.tp
        if tp == 1 or not shape:
            return None, 1
        shapes = ChainMap({parameter: shape}, self.weights)
        cut = modules.find_cut(parameter, shapes, self.arguments.get("q_lora_rank"))
        if cut is None:
            raise RecipeError(
                f"how Megatron cuts {parameter!r} over tensor-parallel ranks is not known; convert "
                "to tp=1, or to torch-dist"
            )
        dimension, stride = cut
        if dimension is not None and (dimension >= len(shape) or shape[dimension] % (tp * stride)):
            raise RecipeError(
                f"{parameter!r} of {list(shape)} on {tp} tensor-parallel ranks; dimension "
                f"{dimension} does not divide by {tp * stride}"
            )
        return cut

    def block(self, parameter: str, shape: tuple[int, ...], place: RankPlace) -> BlockPlace:
        """Return the part of a parameter that the rank at a place has."""
        # Without tensor parallelism the block is the whole.
        dimension, stride = self.cut(parameter, shape)
        if dimension is None:
            return BlockPlace.split(shape, None, 0, 1)
        parts = self.sizes.tp
        own = list(shape)
        own[dimension] //= parts
        return BlockPlace.split(own, dimension, place.tp, parts, stride)

    def rank_name(self, parameter: str, place: RankPlace) -> str:
        """Return a parameter's name on the rank at a place, in Transformer Engine's layers."""
        if self.is_tied and parameter == EMBEDDING and place.pp > 0:
            return OUTPUT
        first_expert = place.ep * (self.experts // self.sizes.ep)
        return modules.renumber(parameter, lambda row: -self.first_layer(row, place), -first_expert)

    @property
    def has_expert_optimizer(self) -> bool:
        """Whether experts have an optimizer of their own."""
        return self.sizes.ep > 1 and any(map(modules.is_expert, self.weights))
