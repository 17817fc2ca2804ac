"""A worker of vLLM as an end of a link: its model, filled by a trainer while it serves.

1. Which names the trainer has is said by a table; or it is what transformers calls them, in a
   module of this model's config, or in the checkpoint of the model's folder.
2. What the rank takes of them is found, and staged on the host (`ReloadedModel`).
3. `sync.run()` brings it there, and vLLM makes its parameters of it.

vLLM keeps what it computed by the old weights: reset its prefix cache after an update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from reshard._validation import check_ints
from reshard.dtypes import dtype as as_dtype
from reshard.errors import CheckpointError, LinkError, RunError, UsageError
from reshard.recipes.engine_layouts import SourceTensor
from reshard.torch.links.connecting import connect
from reshard.torch.links.sync import SyncReport
from reshard.torch.vllm.reloading import ReloadedModel

# Whose names the trainer has, where no table says it.
SOURCES = ("module", "saved", "checkpoint")


class LinkedRank:
    """A rank of vLLM, linked with a trainer.

    Args:
        model: vLLM's, of this worker.
        model_config: vLLM's `ModelConfig`.
        url: of the link.
        rank, ranks: this worker among all of the engine.
        name, secret, timeout_s, insecure: as of `reshard.torch.connect`.
        sources: the trainer's tensors, `{name: (dtype, shape)}` of the whole ones; `"module"` for
            those of transformers' module of the model's config, `"saved"` for those that it saves
            of it, as Megatron's are called by a recipe; `"checkpoint"` for those in the
            checkpoint that the model was started from.
        strict: whether a parameter of vLLM's that none of the sources fills is an error.

    Attributes:
        reloaded: vLLM's model, and what is staged for it.

    Raises:
        LinkError: the trainer does not come.
        ShardError: what vLLM needs is not what the trainer has.
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
        strict: bool = True,
        insecure: bool = False,
    ) -> None:
        kinds = find_sources(model_config, sources)
        # Before anything that may fail, so that others need not wait for this rank.
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
        self.reloaded.apply()

    def close(self) -> None:
        """Leave the link. The model keeps its weights."""
        self.link.close()


def find_conversion(
    model_config: Any, sources: Mapping[str, Any] | str
) -> Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None:
    """What makes tensors of a checkpoint of a trainer's; None where they may be the same."""
    if sources != "module":
        return None
    from reshard.torch.transformers import save_form

    return functools.partial(save_form, model_config.hf_config)


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
            whole = check_ints(shape, f"shape of {name!r}", UsageError)
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
