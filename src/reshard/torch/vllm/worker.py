"""A vLLM worker as an end of a link: its model is refilled by a trainer while it serves.

::

    llm = LLM(..., worker_extension_cls="reshard.torch.vllm.worker.LinkedWorker")
    llm.collective_rpc("link_weights", args=(url,))     # the trainer calls connect, and prepare
    llm.collective_rpc("receive_weights")               # the trainer calls run
    llm.reset_prefix_cache()

1. The trainer's names and shapes are given as a table, or are those of transformers' module of this
   model's config, or those of the checkpoint in the model's folder.
2. The elements that the rank takes are found, and staged on the host (`ReloadedModel`).
3. `sync.run()` receives them, and vLLM creates its parameters of them.

vLLM keeps values that it computed with the old weights: reset its prefix cache after an update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from reshard.errors import CheckpointError, LinkError, RunError, UsageError
from reshard.recipes.engine_layouts import SourceTensor
from reshard.torch.links.link import connect
from reshard.torch.links.sync import SyncReport
from reshard.torch.vllm.layouts import parse_sources
from reshard.torch.vllm.reloading import ReloadedModel

# Sources of the trainer's names if no table is given.
SOURCES = ("module", "saved", "checkpoint")


class LinkedRank:
    """A rank of vLLM, linked with a trainer.

    Args:
        model: the vLLM model of this worker.
        model_config: vLLM's `ModelConfig`.
        url: of the link.
        rank, ranks: this worker's rank in the engine, and the number of ranks.
        name, secret, timeout_s, insecure: arguments of `reshard.torch.connect`.
        sources: the trainer's full tensors, `{name: (dtype, shape)}`; `"module"` for those of
            transformers' module of the model's config; `"saved"` for those that the module saves,
            whose names recipes give to Megatron's; `"checkpoint"` for those in the checkpoint
            that the model was started from.
        strict: whether a parameter that no source fills is an error.

    Attributes:
        reloaded: the vLLM model with its staged tensors.

    Raises:
        LinkError: the trainer did not connect in time.
        ShardError: the trainer lacks elements that vLLM needs.
        RunError: `load_weights` refuses the names.
        UsageError: invalid sources.
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
        strict: bool = True,
        insecure: bool = False,
    ) -> None:
        kinds = find_sources(model_config, sources)
        # Connect before anything that may fail, so that others need not wait for this rank.
        self.link = connect(
            url,
            "engine",
            rank=rank,
            ranks=ranks,
            name=name,
            secret=secret,
            timeout_s=timeout_s,
            insecure=insecure,
        )
        try:
            convert = find_conversion(model_config, sources)
            self.reloaded = ReloadedModel(
                model, model_config, kinds, rank, convert=convert, strict=strict
            )
            self.sync = self.link.prepare(self.reloaded.staged.tensors)
        except BaseException:
            self.link.close()
            raise

    def receive(self) -> SyncReport:
        """Take part in a run of the trainer; the model has its old weights until `apply`."""
        report = self.sync.run()
        if report is None:
            raise LinkError("the run gave no report; the link was closed meanwhile")
        return report

    def apply(self) -> None:
        """Load the received weights into the model.

        Raises:
            RunError: an incomplete version of the weights, in which case the model keeps its
                weights; or vLLM cannot reload this model.
        """
        if self.sync.version is None or not self.sync.is_usable:
            raise RunError(
                "this rank has not received a complete version of the trainer's weights; the model "
                "keeps its weights. Receive again"
            )
        self.reloaded.apply()

    def close(self) -> None:
        """Leave the link; the model keeps its weights."""
        self.link.close()


def find_conversion(
    model_config: Any, sources: Mapping[str, Any] | str
) -> Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None:
    """Return a function from a trainer's tensors to a checkpoint's, or None if they are equal."""
    if sources != "module":
        return None
    from reshard.torch.transformers import save_form

    return functools.partial(save_form, model_config.hf_config)


def find_sources(model_config: Any, sources: Mapping[str, Any] | str) -> dict[str, SourceTensor]:
    """Return the full tensors of a trainer of this model, see `LinkedRank`.

    Raises:
        UsageError: sources that are neither a table nor of `SOURCES`, or a folder without a
            checkpoint.
    """
    if isinstance(sources, Mapping):
        return parse_sources(sources)
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
        return {name: SourceTensor(source.dtype, source.shape) for name, source in tensors.items()}
    if sources in ("module", "saved"):
        from reshard.torch.transformers import module_tensors

        # In vLLM's dtype, since the trainer casts before it sends.
        return module_tensors(
            model_config.hf_config, model_config.dtype, as_saved=sources == "saved"
        )
    raise UsageError(
        f"sources={sources!r}; give one of {', '.join(SOURCES)}, or a table of names with dtypes "
        "and shapes"
    )


def rank_in_engine(parallel_config: Any) -> tuple[int, int]:
    """Return a worker's rank in an engine, replicas included, and the number of ranks."""
    size = int(parallel_config.world_size)
    replica = int(getattr(parallel_config, "data_parallel_index", 0))
    replicas = int(parallel_config.data_parallel_size)
    return replica * size + int(parallel_config.rank), replicas * size


class LinkedWorker:
    """Methods that vLLM adds to its workers; they run on all workers of an engine at once."""

    vllm_config: Any
    model_runner: Any
    _linked: LinkedRank | None = None

    def link_weights(self, url: str, **options: Any) -> int:
        """Connect with a trainer, and prepare the tensors that this worker receives.

        Args:
            url: of the link, see `reshard.torch.connect`.
            options: `name`, `secret`, `timeout_s`, `sources`, `strict`, `insecure` of `LinkedRank`.

        Returns:
            The number of bytes that this worker receives in a run, and stages on the host.
        """
        from vllm.config import set_current_vllm_config

        self.unlink_weights()
        config = self.vllm_config
        rank, ranks = rank_in_engine(config.parallel_config)
        with set_current_vllm_config(config):
            self._linked = LinkedRank(
                self.model_runner.get_model(),
                config.model_config,
                url,
                rank=rank,
                ranks=ranks,
                **options,
            )
        return self._linked.reloaded.staged.size_bytes

    def receive_weights(self) -> int:
        """Take part in the trainer's next run, and load its weights.

        Returns:
            The version. If the run fails, the model keeps its weights.
        """
        from vllm.config import set_current_vllm_config

        if self._linked is None:
            raise UsageError("this worker is not linked; call link_weights with a url first")
        version = self._linked.receive().version
        with set_current_vllm_config(self.vllm_config):
            self._linked.apply()
        return version

    def unlink_weights(self) -> None:
        """Leave the link; the model keeps its weights."""
        if self._linked is not None:
            self._linked.close()
            self._linked = None
