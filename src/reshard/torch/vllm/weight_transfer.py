"""vLLM's interface for weight transfer, by links: the backend `reshard`.

vLLM has a class for workers and a class for trainers, each in a registry by the name of its
backend. The plug-in registers these, whose bases are vLLM's and are imported on first use::

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reshard.errors import UsageError
from reshard.torch.links.link import connect
from reshard.torch.vllm.worker import LinkedRank, rank_in_engine

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
    class LinkInit(base.WeightTransferInitInfo):  # type: ignore[misc]
        url: str
        name: str = "engine"
        secret: str | None = None
        timeout_s: float = 1800.0
        sources: Any = "module"
        strict: bool = True
        insecure: bool = False

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
            self.shutdown()
            rank, ranks = rank_in_engine(self.parallel_config)
            with set_current_vllm_config(self.vllm_config):
                self._linked = LinkedRank(
                    self.model,
                    self.model_config,
                    init_info.url,
                    rank=rank,
                    ranks=ranks,
                    name=init_info.name,
                    secret=init_info.secret,
                    timeout_s=init_info.timeout_s,
                    sources=init_info.sources,
                    strict=init_info.strict,
                    insecure=init_info.insecure,
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
    class ReshardTrainerInit(base.TrainerInitInfo):  # type: ignore[misc]
        """A rank of a trainer, its model, and the link.

        `url`, `name`, `secret`, `timeout_s` and `insecure` are those of `reshard.torch.connect`;
        `options` are those of `prepare`, such as `cast` and `names`; `sources`, the engine's
        description of the trainer's tensors, and `strict` are those of `LinkedRank`. A secret is
        not sent: workers have it in the environment.
        """

        backend: ClassVar[str] = BACKEND
        url: str
        model: Any
        ranks: int
        name: str = "engine"
        secret: str | None = None
        timeout_s: float = 1800.0
        sources: Any = "module"
        strict: bool = True
        insecure: bool = False
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
            engine_options = {
                "url": init_info.url,
                "name": init_info.name,
                "timeout_s": init_info.timeout_s,
                "sources": init_info.sources,
                "strict": init_info.strict,
                "insecure": init_info.insecure,
            }

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
