"""Refill a model that vLLM serves, from tensors that are staged on the host.

::

    reloaded = ReloadedModel(model, model_config, sources)
    reloaded.staged.tensors["up.weight"]      # host memory, and its box of the full tensor
    reloaded.apply()                          # the model has the staged values

1. vLLM's own `load_weights` is traced on the live model, in its form before weights were processed
   for kernels (`vllm.model_executor.model_loader.reload` restores that form, without memory).
   Parameters of vLLM therefore need no table of names.
2. The elements that the rank takes are staged on the host (`StagedSources`). Kernels' parameters
   have another form than the sources, so received elements are staged in boxes of the sources::

       source up, 8 x 4        staged, rows 4:8        parameter gate_up, 8 x 4

       . . . .                                         gate gate
       . . . .                 # # # #     ------>     up up
       # # # #                 # # # #
       # # # #

   A parameter that the loader computes is filled by the loader itself, from full sources; so is a
   parameter that shares a source with it, or takes elements across dimensions. Staged tensors have
   the dtype of the parameters that take them, so casts happen on the sender.
3. Layer by layer, vLLM creates parameters of them, processes them, and copies them into the
   existing parameters, so that captured graphs see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from reshard.binding import View
from reshard.errors import RunError, ShardError
from reshard.layout import Box, Layout
from reshard.recipes.engine_layouts import ParameterLayout, RankLayout, SourcePiece, SourceTensor
from reshard.recipes.engine_layouts.source_layouts import find_products, find_steps
from reshard.torch.loaders.tracing import trace_loading

_CAST = "to "
# For each dimension of a piece, the dimension and step in the source.
_Along = list[tuple[int, int] | None]


class StagedSources:
    """The boxes of sources that a rank takes, in host memory.

    Args:
        traced: the layout of the rank.
        sources: the full tensors that it loads, by name.
        rank: its number in the layouts of `tensors`.

    Attributes:
        tensors: `{source: (tensor, Layout)}`, a target of a refit. Each layout contains this rank
            only.
        by_loader: the sources that the loader loads itself, in full.
        parameters: the parameters that `fill` returns.

    Raises:
        ShardError: a loader that reads none of the sources.

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
        read = {
            n: parameter
            for n, parameter in traced.parameters.items()
            if parameter.sources and n not in tied
        }
        if not read:
            raise ShardError(
                f"vLLM takes nothing of the {len(sources)} tensors on this rank (first: "
                f"{next(iter(sources), None)!r}); give the names that its load_weights knows"
            )
        self.by_loader = _find_whole(read.values(), sources)
        self.parameters = {
            name: parameter
            for name, parameter in read.items()
            if self.by_loader.isdisjoint(parameter.sources)
        }
        regions: dict[str, list[Box]] = {name: [] for name in self.by_loader}
        dtypes: dict[str, set[str]] = {name: set() for name in self.by_loader}
        for parameter in self.parameters.values():
            for piece in parameter.pieces:
                regions.setdefault(piece.source, []).extend(_boxes(piece, sources[piece.source]))
                dtypes.setdefault(piece.source, set()).add(parameter.dtype.name)
        self.tensors: dict[str, tuple[torch.Tensor, Layout]] = {}
        self._starts: dict[str, tuple[int, ...]] = {}
        for name, boxes in regions.items():
            source = sources[name]
            whole = Box.of(source.shape)
            box = whole if name in self.by_loader else _enclose(boxes)
            # Parameters of several types share a source: it is sent in its own type, and cast for
            # each.
            dtype = dtypes[name].pop() if len(dtypes[name]) == 1 else source.dtype.name
            tensor = torch.zeros(box.shape, dtype=getattr(torch, dtype))
            self.tensors[name] = tensor, Layout.from_boxes(source.shape, [(rank, box)], rank + 1)
            self._starts[name] = box.start
        self._shapes = {name: sources[name].shape for name in regions}

    @property
    def size_bytes(self) -> int:
        """The size of the staged tensors."""
        return sum(tensor.nbytes for tensor, _ in self.tensors.values())

    def fill(self, name: str) -> torch.Tensor:
        """Return a parameter as its loader fills it; unfilled elements are 0."""
        parameter = self.parameters[name]
        result = torch.zeros(parameter.shape, dtype=getattr(torch, parameter.dtype.name))
        for piece in parameter.pieces:
            where = _steps_of(piece, self._shapes[piece.source])
            # Otherwise the loader fills the parameter.
            if where is not None:
                result[_index(piece.box)] = self._view(piece, *where)
        for constant in parameter.constants:
            result[_index(constant.box)] = constant.value
        return result

    def list_whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the full sources for the loader."""
        return ((name, self.tensors[name][0]) for name in sorted(self.by_loader))

    def _view(self, piece: SourcePiece, first: list[int], along: _Along) -> torch.Tensor:
        """Return the elements of a piece as a view of the staged tensor."""
        staged, _ = self.tensors[piece.source]
        begin = zip(first, self._starts[piece.source], staged.stride(), strict=True)
        offset = sum((at - start) * stride for at, start, stride in begin)
        # A dimension that repeats an element has stride 0.
        strides = [0 if step is None else staged.stride(step[0]) * step[1] for step in along]
        return staged.as_strided(piece.box.shape, strides, offset)


def _find_whole(
    parameters: Iterable[ParameterLayout], sources: Mapping[str, SourceTensor]
) -> set[str]:
    """Return the sources of computed parameters, and of all that share a source with them."""
    # The loader gets whole sources, and fills all parameters that take from them.
    pending = list(parameters)
    names: set[str] = set()
    grows = True
    while grows:
        rest = []
        for parameter in pending:
            if _is_copied(parameter, sources) and names.isdisjoint(parameter.sources):
                rest.append(parameter)
            else:
                names.update(parameter.sources)
        grows, pending = len(rest) < len(pending), rest
    return names


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
    """Return the smallest box that contains all boxes."""
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    return Box(start, tuple(map(max, zip(*(box.stop for box in boxes), strict=True))))


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


Convert: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
_SHOWN = 5


class _ParameterPlace(NamedTuple):
    """A parameter of vLLM's, and its name among the staged parameters."""

    layer: torch.nn.Module
    name: str
    staged: str


class ReloadedModel:
    """A rank's vLLM model that can be refilled.

    Args:
        model: the served model of this worker.
        model_config: vLLM's `ModelConfig`.
        sources: the full tensors that fill it, by name.
        rank: its number in the layouts of `staged`.
        convert: converts sources to tensors that `load_weights` accepts, if it rejects the sources.
        strict: whether a parameter that no source fills is an error.

    Attributes:
        staged: the elements of the sources that the rank takes.

    Raises:
        ShardError: sources that do not fill all parameters, or none, by name.
        RunError: `load_weights` refuses the sources.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        sources: Mapping[str, SourceTensor],
        rank: int = 0,
        *,
        convert: Convert | None = None,
        strict: bool = True,
    ) -> None:
        self._model, self._config = model, model_config
        try:
            self._prepare(sources, rank, None, strict)
        except (RunError, ShardError):
            if convert is None:
                raise
            self._prepare(sources, rank, convert, strict)

    def _prepare(
        self,
        sources: Mapping[str, SourceTensor],
        rank: int,
        convert: Convert | None,
        strict: bool,
    ) -> None:
        model = self._model
        load_weights: Any = model.load_weights

        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            load_weights(weights if convert is None else iter(convert(dict(weights)).items()))

        self._load = load
        specs = {name: (source.dtype.name, source.shape) for name, source in sources.items()}
        names = _name_tensors(model)
        with _restore_form(model):
            traced = trace_loading(load, specs, model, values=False)
            self.staged = StagedSources(traced, sources, rank)
            self._places = _find_places(model, names, self.staged.parameters)
            lacking = _find_unfilled(model, names, traced) if strict else []
        missed = sorted(set(self.staged.parameters) - {place.staged for place in self._places})
        if missed:
            raise ShardError(
                f"{_list_some(missed)} of vLLM's parameters are filled by load_weights, but no "
                "layer has them by these names; start the engine from a checkpoint of the weights"
            )
        if lacking:
            raise ShardError(
                f"none of the {len(sources)} tensors fills {_list_some(lacking)} of vLLM's (first "
                f"tensor: {next(iter(sources))!r}; not read: {_list_some(traced.unread)}). Give "
                "sources, or names on the trainer, that load_weights knows; or say strict=False, "
                "and these keep their values"
            )

    def apply(self) -> None:
        """Load the staged values into the model.

        Raises:
            RunError: vLLM cannot reload this model.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        try:
            initialize_layerwise_reload(self._model)
            _hold_released_weights(self._model)
            with _finish_experts(self._model):
                try:
                    with torch.no_grad():
                        self._load_copied()
                        if self.staged.by_loader:
                            self._load(self.staged.list_whole())
                finally:
                    # Also after an error, since the model is without memory until then.
                    finalize_layerwise_reload(self._model, self._config)
        except Exception as error:
            raise RunError(
                f"vLLM cannot reload its model: {type(error).__name__}: {error}. Some layers may "
                "have new weights already: start this engine again, and see whether vLLM reloads "
                "this model at all"
            ) from error

    def _load_copied(self) -> None:
        """Load the staged parameters of every layer that vLLM waits for."""
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        of_layer: dict[torch.nn.Module, list[_ParameterPlace]] = {}
        for place in self._places:
            of_layer.setdefault(place.layer, []).append(place)
        for layer, places in of_layer.items():
            loads: list[tuple[_ParameterPlace, Callable[..., None]]] = []
            for place in places:
                tensor = getattr(layer, place.name)
                if place.name in SKIP_LOAD_TENSORS:
                    loads.append((place, _copy_whole))
                    continue
                # vLLM counts the elements that a parameter's loader writes, and processes a layer
                # when all are there. The original loader shards full tensors; these are shards
                # already.
                tensor.weight_loader = _copy_whole
                tensor.weight_loader = make_online_process_loader(layer, place.name)
                loads.append((place, tensor.weight_loader))
            for place, load in loads:
                load(getattr(layer, place.name), self.staged.fill(place.staged))


@contextmanager
def _restore_form(model: torch.nn.Module) -> Iterator[None]:
    """Give the model the form that its loader expects, without memory; restore it on exit."""
    from vllm.model_executor.model_loader.reload import layerwise, meta, utils

    before = []
    try:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            info.kernel_tensors = utils.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            before.append((layer, info))
            meta.restore_layer_on_meta(layer, info)
            _restore_bias(layer)
        yield
    finally:
        for layer, info in before:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _restore_bias(layer: torch.nn.Module) -> None:
    """Give the bias of a layer the dtype in which it is loaded.

    vLLM does not restore biases, even if a kernel has converted them to float32. Loaded values are
    rounded before that conversion.
    """
    bias, dtype = layer._parameters.get("bias"), getattr(layer, "params_dtype", None)
    if bias is None or dtype in (None, bias.dtype):
        return
    loaded = torch.empty(bias.shape, dtype=dtype, device="meta")
    loaded.__class__, loaded.__dict__ = bias.__class__, bias.__dict__.copy()
    layer.register_parameter("bias", loaded)


def _hold_released_weights(model: torch.nn.Module) -> None:
    """Allocate weights that attention has packed and released, until it packs them again.

    vLLM copies loaded values into the previous weight, which no longer exists.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        loaded = layer._parameters.get("weight")
        if loaded is None or not getattr(layer, "_cpu_skip_gemm_dispatch", False):
            continue
        kernel = get_layerwise_info(layer).kernel_tensors
        if kernel is not None and kernel[0]["weight"].numel() < loaded.numel():
            memory = torch.empty(loaded.shape, dtype=loaded.dtype)
            kernel[0]["weight"] = torch.nn.Parameter(memory, requires_grad=False)


def _name_tensors(model: torch.nn.Module) -> Callable[[torch.nn.Module, str], list[str]]:
    """Return a function that lists all names of a layer's tensor in the live model.

    A router is also a part of its experts, and a tied head is the embedding's tensor, but the form
    that the loader expects has a separate head.
    """
    prefixes: dict[torch.nn.Module, list[str]] = {}
    for prefix, layer in model.named_modules(remove_duplicate=False):
        prefixes.setdefault(layer, []).append(f"{prefix}." if prefix else "")
    # The model keeps its tensors alive, so their ids are unique.
    of_tensor: dict[int, list[str]] = {}
    number_of: dict[tuple[torch.nn.Module, str], int] = {}
    for layer, starts in prefixes.items():
        for name, tensor in {**layer._parameters, **layer._buffers}.items():
            if tensor is not None:
                number_of[layer, name] = id(tensor)
                of_tensor.setdefault(id(tensor), []).extend(start + name for start in starts)

    def names_of(layer: torch.nn.Module, name: str) -> list[str]:
        own = [start + name for start in prefixes[layer]]
        number = number_of.get((layer, name))
        tied = [] if number is None else of_tensor[number]
        return [*own, *(name for name in tied if name not in own)]

    return names_of


def _find_places(
    model: torch.nn.Module,
    names_of: Callable[[torch.nn.Module, str], list[str]],
    staged: Mapping[str, Any],
) -> list[_ParameterPlace]:
    """Return the layers of a model, in the loader's form, with staged parameters."""
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    places = []
    for layer in model.modules():
        for name in get_layer_tensors(layer):
            names = names_of(layer, name)
            places += [
                _ParameterPlace(layer, name, staged_name)
                for staged_name in names
                if staged_name in staged
            ][:1]
    return places


def _find_unfilled(
    model: torch.nn.Module,
    names_of: Callable[[torch.nn.Module, str], list[str]],
    traced: RankLayout,
) -> list[str]:
    """Return weights without any loaded elements, by their first name."""
    filled = {
        name
        for name, parameter in traced.parameters.items()
        if parameter.sources or parameter.constants or parameter.computed
    }
    unfilled = []
    for layer in model.modules():
        for name, tensor in layer._parameters.items():
            # vLLM initializes scalar scales that are missing in checkpoints.
            if tensor is None or tensor.numel() < 2:
                continue
            names = names_of(layer, name)
            if filled.isdisjoint(names):
                unfilled.append(names[0])
    return unfilled


def _list_some(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more if listed else "none"


@contextmanager
def _finish_experts(model: torch.nn.Module) -> Iterator[None]:
    """Make expert kernels process reloaded weights as they did the first ones.

    vLLM calls a kernel's processing only when it creates the kernel, and copies unpacked weights
    over packed ones: a silent error if both have the same size. If vLLM calls it again itself, it
    is not called twice.
    """
    changed = []
    try:
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            experts = getattr(kernel, "fused_experts", None)
            if hasattr(experts, "process_weights_after_loading"):
                changed += _finish_layer(method, experts)
        yield
    finally:
        for owner, name in changed:
            delattr(owner, name)


def _finish_layer(method: Any, experts: Any) -> list[tuple[Any, str]]:
    """Replace two methods of a layer's parts; return the owners and names."""
    name = "process_weights_after_loading"
    process_layer, process_experts = getattr(method, name), getattr(experts, name)
    asked: list[torch.nn.Module] = []

    def note(layer: torch.nn.Module) -> None:
        asked.append(layer)
        process_experts(layer)

    def process(layer: torch.nn.Module) -> None:
        asked.clear()
        process_layer(layer)
        # A new kernel has processed its weights.
        if not asked and method.moe_kernel.fused_experts is experts:
            process_experts(layer)

    setattr(method, name, process)
    setattr(experts, name, note)
    return [(method, name), (experts, name)]


def _copy_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight.view(param.shape))
