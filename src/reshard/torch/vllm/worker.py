"""What vLLM's workers learn, to be linked with a trainer: three methods, by `collective_rpc`.

::

    llm = LLM(..., worker_extension_cls="reshard.torch.vllm.worker.LinkedWorker")
    llm.collective_rpc("link_weights", args=(url,))     # the trainer calls connect, and prepare
    llm.collective_rpc("receive_weights")               # the trainer calls run
    llm.reset_prefix_cache()
"""

from __future__ import annotations

from typing import Any

from reshard.errors import UsageError
from reshard.torch.vllm.linked_rank import LinkedRank


def rank_in_engine(parallel_config: Any) -> tuple[int, int]:
    """A worker's rank among all of an engine, replicas included, and how many there are."""
    size = int(parallel_config.world_size)
    replica = int(getattr(parallel_config, "data_parallel_index", 0))
    replicas = int(parallel_config.data_parallel_size)
    return replica * size + int(parallel_config.rank), replicas * size


class LinkedWorker:
    """Methods that vLLM adds to its workers. They run on all workers of an engine at once."""

    vllm_config: Any
    model_runner: Any
    _linked: LinkedRank | None = None

    def link_weights(self, url: str, **options: Any) -> int:
        """Connect with a trainer, and say what this worker takes of its model.

        Args:
            url: of the link, see `reshard.torch.connect`.
            options: `name`, `secret`, `timeout_s`, `sources`, `strict`, `insecure` of `LinkedRank`.

        Returns:
            How many bytes this worker receives in a run, and keeps on the host for it.
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
        """Take part in the trainer's next run; the model then has the weights of its version.

        Returns:
            The version. Where the run fails, the model has the weights that it had.
        """
        from vllm.config import set_current_vllm_config

        if self._linked is None:
            raise UsageError("this worker has no link; call link_weights with its url first")
        version = self._linked.receive().version
        with set_current_vllm_config(self.vllm_config):
            self._linked.apply()
        return version

    def unlink_weights(self) -> None:
        """Leave the link; the model keeps its weights."""
        if self._linked is not None:
            self._linked.close()
            self._linked = None
