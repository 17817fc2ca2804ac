"""A worker of vLLM as an end of a link: its model, filled by a trainer while it serves.

1. Which names the trainer has is said by a table; or it is what transformers calls them, in a
   module of this model's config, or in the checkpoint of the model's folder.
2. vLLM's own `load_weights` is traced on the live model, as it was before its weights were
   processed for kernels (`vllm.model_executor.model_loader.reload` brings back that form, without
   memory). So nobody names a parameter of vLLM's.
3. What the rank takes is staged on the host (`StagedSources`), where `sync.run()` brings it.
4. Layer by layer vLLM makes parameters of it, processes them, and copies them to where the
   parameters are, so that captured graphs see them.

vLLM keeps what it computed by the old weights: reset its prefix cache after an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, LinkError, RunError, UsageError
from reshard.integers import as_integers
from reshard.recipes.engine_layouts import RankLayout, SourceTensor
from reshard.torch.links.link import connect
from reshard.torch.links.sync import SyncReport
from reshard.torch.loaders.tracing import trace_loading
from reshard.torch.vllm.staging import StagedSources

# Whose names the trainer has, where no table says it.
SOURCES = ("module", "saved", "checkpoint")


class LinkedRank:
    """A rank of vLLM, linked with a trainer.

    Args:
        model: vLLM's, of this worker.
        model_config: vLLM's `ModelConfig`.
        url: of the link.
        rank, ranks: this worker among all of the engine.
        name, secret, timeout_s: as of `reshard.torch.connect`.
        sources: the trainer's tensors, `{name: (dtype, shape)}` of the whole ones; `"module"` for
            those of transformers' module of the model's config, `"saved"` for those that it saves
            of it, as Megatron's are called by a recipe; `"checkpoint"` for those in the
            checkpoint that the model was started from.

    Raises:
        LinkError: the trainer does not come.
        ShardError: what vLLM needs is not what the trainer has; on every process of both.
        RunError: `load_weights` refuses the names.
        UsageError: sources that cannot be.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        url: str,
        *,
        rank: int,
        ranks: int,
        name: str = "engine",
        secret: str | None = None,
        timeout_s: float = 1800.0,
        sources: Mapping[str, Any] | str = "module",
    ) -> None:
        self._model, self._config = model, model_config
        kinds = find_sources(model_config, sources)
        with _restore_form(model):
            traced = _trace(model, kinds)
        self.staged = StagedSources(traced, kinds, rank)
        self.link = connect(
            url, "engine", rank=rank, ranks=ranks, name=name, secret=secret, timeout_s=timeout_s
        )
        try:
            self.sync = self.link.prepare(self.staged.tensors)
        except BaseException:
            self.link.close()
            raise

    def receive(self) -> SyncReport:
        """Take part in a run of the trainer's; the model has its old weights until `apply`."""
        report = self.sync.run()
        if report is None:
            raise LinkError("the run gave no report; the link was closed meanwhile")
        return report

    def apply(self) -> None:
        """Make the model's weights those that were received last.

        Raises:
            RunError: weights that did not come whole, where the model keeps what it has; or vLLM
                cannot reload this model.
        """
        if self.sync.version is None or not self.sync.is_usable:
            raise RunError(
                "what this rank received is no whole version of the trainer's weights; the model "
                "keeps those that it has. Receive again"
            )
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        try:
            initialize_layerwise_reload(self._model)
            with _finish_experts(self._model):
                try:
                    with torch.no_grad():
                        _load_copied(self._model, self.staged)
                        if self.staged.by_loader:
                            load_weights: Any = self._model.load_weights
                            load_weights(self.staged.list_whole())
                finally:
                    finalize_layerwise_reload(self._model, self._config)
        except Exception as error:
            raise RunError(
                f"vLLM cannot reload its model: {type(error).__name__}: {error}. Some layers may "
                "have new weights already: start this engine again, and see whether vLLM reloads "
                "this model at all"
            ) from error

    def close(self) -> None:
        """Leave the link. The model keeps its weights."""
        self.link.close()


def find_sources(model_config: Any, sources: Mapping[str, Any] | str) -> dict[str, SourceTensor]:
    """The whole tensors that a trainer of this model has, see `LinkedRank`.

    Raises:
        UsageError: sources that are neither a table nor of `SOURCES`, or a folder without a
            checkpoint.
    """
    if isinstance(sources, Mapping):
        found = {}
        for name, source in sources.items():
            try:
                kind, shape = source
            except (TypeError, ValueError):
                raise UsageError(
                    f"source {name!r} is {source!r}; give its dtype and shape"
                ) from None
            whole = as_integers(shape, f"shape of {name!r}", UsageError)
            found[name] = SourceTensor(as_dtype(kind), whole)
        return found
    if sources == "checkpoint":
        from reshard.checkpoint.formats.opening import open_checkpoint

        folder = Path(model_config.model)
        try:
            tensors = open_checkpoint(folder).tensors
        except CheckpointError as error:
            raise UsageError(
                f"sources='checkpoint', and {folder} has none: {error}; give sources='module', or "
                "a table of names with dtypes and shapes"
            ) from error
        return {name: SourceTensor(one.dtype, one.shape) for name, one in tensors.items()}
    if sources in ("module", "saved"):
        from reshard.torch.transformers import module_tensors

        # In the type that vLLM has: what a trainer has is cast where it is sent.
        return module_tensors(
            model_config.hf_config, model_config.dtype, as_saved=sources == "saved"
        )
    raise UsageError(
        f"sources={sources!r}; give one of {', '.join(SOURCES)}, or a table of names with dtypes "
        "and shapes"
    )


def _trace(model: torch.nn.Module, sources: Mapping[str, SourceTensor]) -> RankLayout:
    load_weights: Any = model.load_weights
    kinds = {name: (one.dtype.name, one.shape) for name, one in sources.items()}
    return trace_loading(load_weights, kinds, model, values=False)


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
        yield
    finally:
        for layer, info in before:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _load_copied(model: torch.nn.Module, staged: StagedSources) -> None:
    """Give every layer that vLLM waits for what is staged of its parameters."""
    from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    for layer, prefixes in _list_layers(model):
        loads: list[tuple[str, Callable[..., None] | None, str]] = []
        for name, tensor in get_layer_tensors(layer).items():
            wholes = (f"{prefix}.{name}" if prefix else name for prefix in prefixes)
            whole = next((one for one in wholes if one in staged.parameters), None)
            if whole is None:
                continue
            if name in SKIP_LOAD_TENSORS:
                loads.append((name, None, whole))
                continue
            # vLLM counts what its loader of a parameter writes, and processes a layer when all is
            # there. The one that the parameter has cuts whole tensors, and these are cut.
            tensor.weight_loader = _copy_whole
            tensor.weight_loader = make_online_process_loader(layer, name)
            loads.append((name, tensor.weight_loader, whole))
        for name, load, whole in loads:
            tensor = getattr(layer, name)
            (load or _copy_whole)(tensor, staged.fill(whole))


def _list_layers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[str]]]:
    """Every module once, with all names that it has: a router is also its experts' part."""
    names: dict[torch.nn.Module, list[str]] = {}
    for prefix, layer in model.named_modules(remove_duplicate=False):
        names.setdefault(layer, []).append(prefix)
    return list(names.items())


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
