"""A model that vLLM serves, filled again: which elements its loader takes, and how they get there.

::

    reloaded = ReloadedModel(model, model_config, sources)
    reloaded.staged.tensors["up.weight"]      # memory of the host, and which box of the whole it is
    reloaded.apply()                          # the model has what is staged

1. vLLM's own `load_weights` is traced on the live model, as it was before its weights were
   processed for kernels (`vllm.model_executor.model_loader.reload` brings back that form, without
   memory). So nobody names a parameter of vLLM's.
2. What the rank takes is staged on the host (`StagedSources`).
3. Layer by layer vLLM makes parameters of it, processes them, and copies them to where the
   parameters are, so that captured graphs see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from reshard.errors import RunError, ShardError
from reshard.recipes.engine_layouts import RankLayout, SourceTensor
from reshard.torch.loaders.tracing import trace_loading
from reshard.torch.vllm.staging import StagedSources

Convert: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
_SHOWN = 5


class _ParameterPlace(NamedTuple):
    """Where vLLM has a parameter that is staged as `staged`, a name of the whole model's."""

    layer: torch.nn.Module
    name: str
    staged: str


class ReloadedModel:
    """A rank's model of vLLM, which can be filled again.

    Args:
        model: vLLM's, of this worker, as it serves.
        model_config: vLLM's `ModelConfig`.
        sources: the whole tensors that it is filled from, by name.
        rank: the one that layouts of `staged` call it.
        convert: what makes tensors that `load_weights` knows of all or some of the sources, where
            it does not know these.
        strict: whether a parameter that none of the sources fills is an error.

    Attributes:
        staged: what the rank takes of the sources.

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
        kinds = {name: (one.dtype.name, one.shape) for name, one in sources.items()}
        names = _name_tensors(model)
        with _restore_form(model):
            traced = trace_loading(load, kinds, model, values=False)
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
        """Give the model what is staged.

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
                    finalize_layerwise_reload(self._model, self._config)
        except Exception as error:
            raise RunError(
                f"vLLM cannot reload its model: {type(error).__name__}: {error}. Some layers may "
                "have new weights already: start this engine again, and see whether vLLM reloads "
                "this model at all"
            ) from error

    def _load_copied(self) -> None:
        """Give every layer that vLLM waits for what is staged of its parameters."""
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
                # vLLM counts what its loader of a parameter writes, and processes a layer when all
                # is there. The one that the parameter has cuts whole tensors, and these are cut.
                tensor.weight_loader = _copy_whole
                tensor.weight_loader = make_online_process_loader(layer, place.name)
                loads.append((place, tensor.weight_loader))
            for place, load in loads:
                load(getattr(layer, place.name), self.staged.fill(place.staged))


@contextmanager
def _restore_form(model: torch.nn.Module) -> Iterator[None]:
    """The model as its loader knows it, without memory; afterwards it is as it was."""
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
    """The bias of a layer in the type in which it is loaded.

    vLLM leaves biases as they are, also where a kernel has made them float32: what is loaded is
    rounded before.
    """
    bias, dtype = layer._parameters.get("bias"), getattr(layer, "params_dtype", None)
    if bias is None or dtype in (None, bias.dtype):
        return
    loaded = torch.empty(bias.shape, dtype=dtype, device="meta")
    loaded.__class__, loaded.__dict__ = bias.__class__, bias.__dict__.copy()
    layer.register_parameter("bias", loaded)


def _hold_released_weights(model: torch.nn.Module) -> None:
    """Give memory to weights that attention has packed and let go of, until it packs them anew.

    vLLM copies what it has loaded to where a weight was, and nothing of such a one is left.
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
    """All names of a layer's tensor in the live model, where some modules and tensors have several.

    A router is also a part of its experts, and a head that is tied is the embedding's tensor; the
    form that the loader knows has the head apart.
    """
    prefixes: dict[torch.nn.Module, list[str]] = {}
    for prefix, layer in model.named_modules(remove_duplicate=False):
        prefixes.setdefault(layer, []).append(f"{prefix}." if prefix else "")
    # As long as the model is as it is, no other tensor has its number.
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
        return [*own, *(one for one in tied if one not in own)]

    return names_of


def _find_places(
    model: torch.nn.Module,
    names_of: Callable[[torch.nn.Module, str], list[str]],
    staged: Mapping[str, Any],
) -> list[_ParameterPlace]:
    """Where the layers of a model, in the form of its loader, have what is staged."""
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    found = []
    for layer in model.modules():
        for name in get_layer_tensors(layer):
            names = names_of(layer, name)
            found += [_ParameterPlace(layer, name, one) for one in names if one in staged][:1]
    return found


def _find_unfilled(
    model: torch.nn.Module,
    names_of: Callable[[torch.nn.Module, str], list[str]],
    traced: RankLayout,
) -> list[str]:
    """Weights into which the loader puts nothing at all, by the first of their names."""
    filled = {
        name
        for name, one in traced.parameters.items()
        if one.sources or one.constants or one.computed
    }
    found = []
    for layer in model.modules():
        for name, tensor in layer._parameters.items():
            # A scale that no checkpoint has is a number, which vLLM knows by itself.
            if tensor is None or tensor.numel() < 2:
                continue
            names = names_of(layer, name)
            if filled.isdisjoint(names):
                found.append(names[0])
    return found


def _list_some(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more if listed else "none"


@contextmanager
def _finish_experts(model: torch.nn.Module) -> Iterator[None]:
    """Have kernels of experts process weights that are loaded again, as they did the first ones.

    vLLM asks a kernel only when it makes it, and copies what is not packed or padded over what is:
    wrong without an error where both are of one size. Where it does ask again, it is not asked
    twice.
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
    """Replace two methods of a layer's parts; where, and by which names."""
    name = "process_weights_after_loading"
    process_layer, process_experts = getattr(method, name), getattr(experts, name)
    asked: list[torch.nn.Module] = []

    def note(layer: torch.nn.Module) -> None:
        asked.append(layer)
        process_experts(layer)

    def process(layer: torch.nn.Module) -> None:
        asked.clear()
        process_layer(layer)
        # A kernel that was made anew has processed its weights.
        if not asked and method.moe_kernel.fused_experts is experts:
            process_experts(layer)

    setattr(method, name, process)
    setattr(experts, name, note)
    return [(method, name), (experts, name)]


def _copy_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight.view(param.shape))
