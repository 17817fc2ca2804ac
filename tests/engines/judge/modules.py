"""The module of a rank, and what its layers exchange.

What a layer does follows from the recipe's sharding of its weight:

============================  ====================================================================
embedding, rows cut           rows of other ranks count as zeros, the output is summed
linear layer, rows cut        its output is the rank's own; put side by side where the next layer
                              wants all of it (the output layer, and what a family names)
linear layer, columns cut     outputs are summed; the bias is added once, after the sum
anything else, cut            the rank's own (heads' vectors, depthwise filters); a family names
                              modules whose outputs are parts of a sum (experts)
============================  ====================================================================
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from .family import Family
from .ranks import Meeting
from .shards import Coordinate, CutModel, JudgeError

LINEAR = (nn.Linear, Conv1D)


class InDouble(TorchFunctionMode):
    """Computes in float64 what a model asks for in float32, so that equal is nearly exact."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {
            key: torch.float64 if one is torch.float32 else one
            for key, one in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def matches_any(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def get_key(config: Any, key: str) -> Any:
    """The value of a dotted key of a config."""
    for word in key.split("."):
        # Configs with other values for some layers guard their attributes.
        config = vars(config)[word] if word in vars(config) else getattr(config, word)
    return config


def set_key(config: Any, key: str, value: Any) -> None:
    *outer, last = key.split(".")
    config = get_key(config, ".".join(outer)) if outer else config
    if isinstance(getattr(type(config), last, None), property):
        setattr(config, last, value)
    else:
        # Not through the checks of whole configs: a rank's sizes need not go with each other.
        vars(config)[last] = value


def make_model(family: Family, config: Any) -> nn.Module:
    """A model of a config, in float64 and ready to run."""
    import transformers

    auto = getattr(transformers, family.auto)
    make = auto.from_config if family.auto.startswith("Auto") else auto._from_config
    with InDouble():
        model: nn.Module = make(
            config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
        )
    return model.double().eval()


def local_config(family: Family, whole: Any, cut: CutModel, coordinate: Coordinate) -> Any:
    """The config of a rank's module: the whole one with the rank's share of its local keys."""
    config = copy.deepcopy(whole)
    shapes = {
        name: next(p.array.shape for (at, _), p in pieces.items() if at == coordinate)
        for name, pieces in cut.pieces.items()
        if any(at == coordinate for at, _ in pieces)
    }
    for key, share in family.local.items():
        if callable(share):
            set_key(config, key, share(shapes, whole))
            continue
        pattern, dimension = share
        found = [name for name in shapes if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            continue
        length = cut.assignment.layouts[found[0]].shape[dimension]
        here = shapes[found[0]][dimension]
        value = get_key(whole, key)
        if value * here % length:
            raise JudgeError(
                f"{here} of {length} of {found[0]} is no whole number of the {value} of {key}"
            )
        set_key(config, key, value * here // length)
    return config


class RankModule:
    """The module of one computing coordinate: built from a local config, with the shards in it.

    Args:
        family: of the model.
        whole: the whole model's config.
        cut: its shards.
        rank: number of the coordinate.
        meeting: of all of them.
    """

    def __init__(
        self, family: Family, whole: Any, cut: CutModel, rank: int, meeting: Meeting
    ) -> None:
        self.family, self.whole, self.cut, self.rank, self.meeting = (
            *(family, whole, cut, rank, meeting),
        )
        self.coordinate = cut.coordinates[rank]
        self.config = local_config(family, whole, cut, self.coordinate)
        self.model = make_model(family, self.config)
        for key, globs in family.whole.items():
            self._take_whole(key, globs)
        # Layers may be run from the first to the last stage only.
        self.stage = 0
        self.stage_of = cut.stage_of_layers()
        # A tied parameter has several names, of which the checkpoint has one.
        held = self.model.named_parameters(remove_duplicate=False)
        self.names = {id(p): name for name, p in sorted(held, key=lambda one: one[0] in cut.pieces)}
        self.filled: dict[str, int] = {}
        self._fill_buffers()
        self._follow_stages()
        for name, module in [*self.model.named_modules()]:
            self._arrange(name, module)
        family.prepare(self)

    # What families use.

    def modules(self, pattern: str) -> list[tuple[str, Any]]:
        """The modules whose names match a glob."""
        return [
            (name, module)
            for name, module in self.model.named_modules()
            if fnmatch.fnmatchcase(name, pattern)
        ]

    def axes(self, name: str, dimension: int) -> tuple[str, ...]:
        """The computing axes that cut a dimension of a parameter."""
        return self.cut.cut_axes(name, dimension)

    def indices(self, name: str, dimension: int) -> torch.Tensor:
        """The indices of the whole parameter that the rank holds along a dimension."""
        piece = next(p for (at, _), p in self.cut.pieces[name].items() if at == self.coordinate)
        return torch.from_numpy(np.asarray(piece.indices[dimension]))

    def exchange(self, label: str, value: Any, axes: Sequence[str]) -> list[Any]:
        """The values of the ranks that differ from this one in `axes` only, in their order."""
        return self.meeting.exchange(self.rank, label, copy.deepcopy(value), axes)

    def add_up(self, label: str, value: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The sum of the values of such ranks."""
        return torch.stack(self.exchange(label, value, axes)).sum(0) if axes else value

    def put_side_by_side(
        self, label: str, value: torch.Tensor, name: str, dimension: int, dim: int = -1
    ) -> torch.Tensor:
        """All of a feature, of which ranks have what they hold of a parameter's dimension."""
        axes = self.axes(name, dimension)
        if not axes:
            return value
        parts = self.exchange(label, (value, self.indices(name, dimension)), axes)
        length = self.cut.assignment.layouts[name].shape[dimension]
        shape = list(value.shape)
        shape[dim] = length
        found = value.new_full(shape, float("nan"))
        for part, indices in parts:
            found.index_copy_(dim, indices, part)
        return found

    # The parameters.

    def _take_whole(self, key: str, globs: Sequence[str]) -> None:
        """Modules in place of the rank's, made with the whole model's number of a key."""
        config = copy.deepcopy(self.config)
        set_key(config, key, get_key(self.whole, key))
        for name, module in make_model(self.family, config).named_modules():
            if matches_any(name, globs):
                self.model.set_submodule(name, module)

    def parameter(self, name: str, stage: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.cut.piece(name, self.coordinate, stage).array))

    def _fill(self, module: nn.Module, prefix: str) -> None:
        """Give a module's own parameters the shards of the stage that runs it."""
        for key, parameter in module.named_parameters(recurse=False):
            name = self.names[id(parameter)]
            if name not in self.cut.pieces:
                raise JudgeError(f"the model needs {name}, which is not in the checkpoint")
            shard = self.parameter(name, self.stage)
            if self._expected_shape(name, parameter) != tuple(shard.shape):
                raise JudgeError(
                    f"{name} is {list(shard.shape)} on rank {self.rank}; its module, made for the "
                    f"rank's heads and widths, wants {list(parameter.shape)} ({prefix}.{key})"
                )
            if self.filled.setdefault(name, self.stage) != self.stage and not torch.equal(
                parameter.data, shard
            ):
                raise JudgeError(f"{name} differs between stages")
            parameter.data = shard
        if isinstance(module, Conv1D):
            module.nf = module.weight.shape[1]

    def _expected_shape(self, name: str, parameter: torch.Tensor) -> tuple[int, ...]:
        """The shape of a parameter in the rank's module."""
        shape = list(parameter.shape)
        if matches_any(name, self.family.sized_by_shard):
            for dimension in range(len(shape)):
                if self.axes(name, dimension):
                    shape[dimension] = len(self.indices(name, dimension))
        return tuple(shape)

    def _fill_buffers(self) -> None:
        for name, buffer in self.model.named_buffers():
            if name in self.cut.pieces:
                stage = self.cut.stages_of(name, self.coordinate)[0]
                shard = self.parameter(name, stage)
                is_sized = matches_any(name, self.family.sized_by_shard)
                if buffer.shape != shard.shape and not is_sized:
                    raise JudgeError(f"{name} is {list(shard.shape)}, not {list(buffer.shape)}")
                buffer.data = shard.to(buffer.dtype)
                self.filled[name] = stage

    def _follow_stages(self) -> None:
        """Parameters are filled when their module runs, from the stage that is running then."""
        # None until its module runs: what no stage filled is no number.
        for parameter in self.model.parameters():
            parameter.data = torch.full_like(parameter.data, float("nan"))

        def enter(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if matches_any(name, self.family.stacks):
                    self.stage = 0
                if name in self.stage_of:
                    self._enter_stage(name, self.stage_of[name])
                # The parameters of plain containers and lists are used by their owner.
                for prefix, inner in module.named_modules():
                    if not prefix or not _has_forward(inner):
                        self._fill(inner, f"{name}.{prefix}")
                for key, inner in module.named_children():
                    if matches_any(f"{name}.{key}", self.family.read):
                        self._fill(inner, f"{name}.{key}")

            return hook

        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(enter(name), with_kwargs=True)

    def _enter_stage(self, name: str, stage: int) -> None:
        if stage < self.stage and not self._begins(name):
            raise JudgeError(f"{name} is on stage {stage}, after one on stage {self.stage}")
        self.stage = stage

    def _begins(self, name: str) -> bool:
        """Whether a layer is the first of its list, as a decoder's is behind an encoder."""
        return name.rsplit(".", 1)[-1] == "0"

    # The layers.

    def _arrange(self, name: str, module: nn.Module) -> None:
        own = {key: f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)}
        names = {key: self.names[id(getattr(module, key))] for key in own}
        if not any(one in self.cut.pieces and self.cut.is_cut(one) for one in names.values()):
            return
        if matches_any(name, self.family.own):
            return
        if isinstance(module, nn.Embedding):
            self._arrange_embedding(name, module, names["weight"])
        elif isinstance(module, LINEAR):
            self._arrange_linear(name, module, names["weight"])
        elif matches_any(name, self.family.wide_norms):
            self._arrange_norm(name, module, names["weight"])
        for pattern, axes in self.family.summed.items():
            if fnmatch.fnmatchcase(name, pattern):
                self._arrange_sum(name, module, axes)

    def _arrange_embedding(self, name: str, module: nn.Embedding, weight: str) -> None:
        axes = self.axes(weight, 0)
        if self.axes(weight, 1):
            raise JudgeError(f"the width of embedding {weight} is cut")
        place = torch.full((self.cut.assignment.layouts[weight].shape[0],), -1)
        held = self.indices(weight, 0)
        place[held] = torch.arange(len(held))
        look_up = module.forward

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            local = place[tokens]
            if len(held):
                # Scaled embeddings have a forward of their own, which must see tokens of this rank.
                found = look_up(local.clamp(min=0))
            else:
                found = module.weight.new_zeros((*tokens.shape, module.weight.shape[1]))
            found = torch.where((local >= 0)[..., None], found, torch.zeros(()).to(found))
            return self.add_up(name, found, axes)

        module.forward = forward  # type: ignore[method-assign]
        module.padding_idx = None

    def _arrange_linear(self, name: str, module: Any, weight: str) -> None:
        rows, columns = (1, 0) if isinstance(module, Conv1D) else (0, 1)
        out_axes, in_axes = self.axes(weight, rows), self.axes(weight, columns)
        if out_axes and in_axes:
            raise JudgeError(f"rows and columns of {weight} are cut")
        multiply = module.forward
        is_output = module is self.model.get_output_embeddings()
        if in_axes:

            def sum_parts(x: torch.Tensor) -> torch.Tensor:
                bias = getattr(module, "bias", None)
                part = x @ (module.weight if columns == 0 else module.weight.T)
                found = self.add_up(name, part, in_axes)
                return found if bias is None else found + bias

            module.forward = sum_parts
        elif is_output or matches_any(name, self.family.gathered):
            module.forward = lambda x: self.put_side_by_side(name, multiply(x), weight, rows)

    def _arrange_norm(self, name: str, module: Any, weight: str) -> None:
        axes = self.axes(weight, 0)
        eps = next(
            getattr(module, key) for key in ("variance_epsilon", "eps") if hasattr(module, key)
        )

        def forward(x: torch.Tensor) -> torch.Tensor:
            width = torch.tensor(float(x.shape[-1]), dtype=x.dtype)
            squares = self.add_up(f"{name} squares", x.pow(2).sum(-1, keepdim=True), axes)
            mean = squares / self.add_up(f"{name} width", width, axes)
            return module.weight * x * torch.rsqrt(mean + eps)

        module.forward = forward

    def _arrange_sum(self, name: str, module: nn.Module, axes: Sequence[str]) -> None:
        known = tuple(axis for axis in axes if axis in self.cut.compute_axes)

        def hook(module: nn.Module, args: Any, found: Any) -> Any:
            if isinstance(found, tuple):
                return (self.add_up(name, found[0], known), *found[1:])
            return self.add_up(name, found, known)

        module.register_forward_hook(hook)

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """What the family compares, from a forward pass."""
        with InDouble():
            found = self.family.outputs(self.model(**inputs, use_cache=False))
        unused = {name for name in self.cut.pieces if name not in self.filled}
        self.unused = unused
        return found


def _has_forward(module: nn.Module) -> bool:
    """Whether a module is called itself, and no list of modules or parameters."""
    return not isinstance(
        module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    )


def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Weights of which each matters: outputs of each layer are of the order of its inputs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.ndim >= 2:
                fan_in = parameter.shape[-1]
                parameter.copy_(noise * (2.0 / fan_in**0.5))
            elif "norm" in name.lower() or name.endswith(("ln_1.weight", "ln_2.weight")):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.5 * noise)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and name in model.state_dict():
                noise = torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)
                buffer.copy_(0.2 * noise)
