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

The same by vLLM's own interface for weight transfer is its backend `reshard`. vLLM has a class for
workers and a class for trainers, each in a registry by the name of its backend. The plug-in
registers these, whose bases are vLLM's and are imported on first use::

    LLM(..., weight_transfer_config={"backend": "reshard"})        # or vllm serve
    ReshardTrainerInit(url, model, ranks, rank=rank)  -->  WeightTransferTrainerFactory.trainer_init
    trainer.send_weights()                                         # on every rank of the trainer

=================================  ==========================================================
vLLM calls on a worker             effect
`init_weight_transfer_engine`      connect, and prepare the tensors to receive (`LinkedRank`)
`start_weight_update`              none; the model serves on
`update_weights`                   a run of the link, into host memory
`finish_weight_update`             layer by layer, the model gets the received values
=================================  ==========================================================

A trainer passes its model to the link instead of a stream of full tensors: nothing is gathered.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from reshard.errors import CheckpointError, LinkError, RunError, UsageError
from reshard.recipes.engine_layouts import SourceTensor
from reshard.torch.links.link import connect
from reshard.torch.links.sync import SyncReport
from reshard.torch.vllm.layouts import parse_sources
from reshard.torch.vllm.reloading import ReloadedModel

# Sources of the trainer's names if no table is given.
SOURCES = ("module", "saved", "checkpoint")


@dataclass(kw_only=True)
class LinkOptions:
    """The options of an engine's link with a trainer.

    Args:
        name, secret, timeout_s, insecure: arguments of `reshard.torch.connect`.
        sources: the trainer's full tensors, `{name: (dtype, shape)}`; `"module"` for those of
            transformers' module of the model's config; `"saved"` for those that the module saves,
            whose names recipes give to Megatron's; `"checkpoint"` for those in the checkpoint
            that the model was started from.
        strict: whether a parameter that no source fills is an error.
    """

    name: str = "engine"
    secret: str | None = None
    timeout_s: float = 1800.0
    sources: Mapping[str, Any] | str = "module"
    strict: bool = True
    insecure: bool = False


class LinkedRank:
    """A rank of vLLM, linked with a trainer.

    Args:
        model: the vLLM model of this worker.
        model_config: vLLM's `ModelConfig`.
        url: of the link.
        options: see `LinkOptions`.
        rank, ranks: this worker's rank in the engine, and the number of ranks.

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
        options: LinkOptions,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        kinds = find_sources(model_config, options.sources)
        # Connect before anything that may fail, so that others need not wait for this rank.
        self.link = connect(
            url,
            "engine",
            rank=rank,
            ranks=ranks,
            name=options.name,
            secret=options.secret,
            timeout_s=options.timeout_s,
            insecure=options.insecure,
        )
        try:
            convert = find_conversion(model_config, options.sources)
            self.reloaded = ReloadedModel(
                model, model_config, kinds, rank, convert=convert, strict=options.strict
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
        # Checked before vLLM reloads, which empties the parameters first.
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
    """Return the full tensors of a trainer of this model, see `LinkOptions`.

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
            options: the fields of `LinkOptions`.

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
                LinkOptions(**options),
                rank=rank,
                ranks=ranks,
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


BACKEND = "reshard"
ENGINE, TRAINER, TRAINER_INIT = (
    "ReshardWeightTransferEngine",
    "ReshardTrainerEngine",
    "ReshardTrainerInit",
)


def register_backend() -> None:
    """Register the backend with vLLM if it has such registries; may be called again.

    vLLM imports this module; classes are created on first use.
    """
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        # Older versions have no such interface.
        return
    for registry, name in (
        (factory.WeightTransferEngineFactory, ENGINE),
        (getattr(factory, "WeightTransferTrainerFactory", None), TRAINER),
    ):
        if registry is not None and BACKEND not in registry._registry:
            registry.register_engine(BACKEND, __name__, name)


def __getattr__(name: str) -> Any:
    factories = {
        ENGINE: make_engine_class,
        TRAINER: make_trainer_class,
        TRAINER_INIT: make_init_class,
    }
    if name in factories:
        return factories[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def make_engine_class() -> Any:
    """Return the class of a worker's end, whose base is vLLM's."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer import base

    @dataclass
    class LinkInit(LinkOptions, base.WeightTransferInitInfo):  # type: ignore[misc]
        url: str

    @dataclass
    class LinkUpdate(base.WeightTransferUpdateInfo):  # type: ignore[misc]
        pass

    class ReshardWeightTransferEngine(base.WeightTransferEngine):  # type: ignore[misc]
        """A worker as an end of a link."""

        init_info_cls = LinkInit
        update_info_cls = LinkUpdate
        supports_draft_weight_update = False
        _linked: LinkedRank | None = None

        def init_transfer_engine(self, init_info: LinkInit) -> None:
            """Connect with the trainer, and prepare."""
            # A worker may be linked again, for example with a restarted trainer.
            self.shutdown()
            rank, ranks = rank_in_engine(self.parallel_config)
            with set_current_vllm_config(self.vllm_config):
                self._linked = LinkedRank(
                    self.model,
                    self.model_config,
                    init_info.url,
                    init_info,
                    rank=rank,
                    ranks=ranks,
                )

        def start_weight_update(self) -> None:
            """Check the link; the model keeps its weights until all are received."""
            self._expect_link()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Take part in the trainer's run."""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: LinkUpdate) -> None:
            """Take part in the trainer's run."""
            self._expect_link().receive()

        def finish_weight_update(self) -> None:
            """Load the received values into the model."""
            self._expect_link().apply()

        def shutdown(self) -> None:
            """Leave the link; the model keeps its weights."""
            if self._linked is not None:
                self._linked.close()
                self._linked = None

        def _expect_link(self) -> LinkedRank:
            if self._linked is None:
                raise UsageError(
                    "this worker is not linked; call init_weight_transfer_engine with a url"
                )
            return self._linked

    return ReshardWeightTransferEngine


@functools.cache
def make_init_class() -> Any:
    """Return the class of a trainer's options, whose base is vLLM's."""
    from vllm.distributed.weight_transfer import base

    # vLLM loads plug-ins in engines only, not in trainers.
    register_backend()

    @dataclass
    class ReshardTrainerInit(LinkOptions, base.TrainerInitInfo):  # type: ignore[misc]
        """A rank of a trainer, its model, and the link.

        `options` are those of `prepare`, such as `cast` and `names`; the others are those of the
        engine's link, see `LinkOptions`. A secret is not sent: workers have it in the environment.
        """

        backend: ClassVar[str] = BACKEND
        url: str
        model: Any
        ranks: int
        options: dict[str, Any] = field(default_factory=dict)

    return ReshardTrainerInit


@functools.cache
def make_trainer_class() -> Any:
    """Return the class of a trainer's end, whose base is vLLM's."""
    from vllm.distributed.weight_transfer import base

    class ReshardTrainerEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc]
        """A trainer's rank as an end of a link; the first rank also calls vLLM."""

        init_info_cls = make_init_class()

        def __init__(self, *, client: Any, is_sender: bool, link: Any, sync: Any) -> None:
            super().__init__(client=client, source=None, is_sender=is_sender)
            self.link, self.sync = link, sync

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            """Connect with the workers and prepare, on every rank of the trainer.

            Raises:
                UsageError: a `source`: the model itself is in `init_info`.
            """
            if source is not None:
                raise UsageError(
                    f"source={type(source).__name__}: whole tensors are not gathered here; give "
                    "the model itself, as ReshardTrainerInit(model=...)"
                )
            names = {"url", *(option.name for option in fields(LinkOptions))} - {"secret"}
            engine_options = {name: getattr(init_info, name) for name in names}

            def join() -> Any:
                link = connect(
                    init_info.url,
                    "trainer",
                    rank=init_info.rank,
                    ranks=init_info.ranks,
                    secret=init_info.secret,
                    timeout_s=init_info.timeout_s,
                    insecure=init_info.insecure,
                )
                try:
                    return link, link.prepare(init_info.model, **init_info.options)
                except BaseException:
                    link.close()
                    raise

            if init_info.is_sender:
                call_engine = functools.partial(client.init_weight_transfer_engine, engine_options)
                # Both at once: workers connect within the call, and wait there for this rank.
                link, sync = run_beside(call_engine, join)
            else:
                link, sync = join()
            return cls(client=client, is_sender=init_info.is_sender, link=link, sync=sync)

        def send_weights(self, version: int | None = None) -> Any:
            """Send the model's weights to the engine, on every rank.

            Returns:
                The `SyncReport` of the run.
            """
            run = functools.partial(self.sync.run, version)
            if not self.is_sender:
                return run()
            self.client.start_weight_update()
            # Both at once: the call returns only when the run that it waits for has ended.
            report = run_beside(functools.partial(self.client.update_weights, {}), run)
            self.client.finish_weight_update(str(report.version))
            return report

        def shutdown(self) -> None:
            """Leave the link."""
            self.link.close()

    return ReshardTrainerEngine


def run_beside(call: Callable[[], object], own: Callable[[], Any]) -> Any:
    """Return the result of `own`, run concurrently with a `call` to the other side.

    The first error of either is raised at once, since the other would wait for it.
    """
    both: list[concurrent.futures.Future[Any]] = []
    for function in (call, own):
        end: concurrent.futures.Future[Any] = concurrent.futures.Future()
        both.append(end)
        # A thread that is left waiting must not keep the process from ending.
        threading.Thread(target=_settle, args=(end, function), daemon=True).start()
    # Without an exception, it returns when both have ended.
    concurrent.futures.wait(both, return_when=concurrent.futures.FIRST_EXCEPTION)
    for end in both:
        if end.done():
            end.result()
    return both[1].result()


def _settle(end: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
    try:
        end.set_result(function())
    except BaseException as error:
        end.set_exception(error)
