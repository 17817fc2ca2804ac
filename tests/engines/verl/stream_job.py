"""A job of verl: trainers that have a module by FSDP2, and rollouts that get its weights by a link.

Usage: python stream_job.py RESULT

verl's manager drives both sides: its worker groups on ray, its checkpoint engine workers. RESULT
gets for each step what trainers had and what every rollout worker got, as digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

TRAINERS, WORKERS, STEPS = 2, 2, 2
BACKEND, MODULE = "reshard", "reshard.torch.links.verl_engine"


def digest(tensor: Any) -> str:
    """Type, shape and elements of a tensor."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    content = plain.view(-1).view(torch.uint8).numpy().tobytes()
    return f"{plain.dtype} {list(plain.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def make_trainer() -> Any:
    """The class of trainers, as verl's own has these two methods."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.utils.import_utils import import_external_libs

    class Trainer(Worker):  # type: ignore[misc]
        def __init__(self, bucket_size: int) -> None:
            super().__init__()
            initialize_global_process_group_ray(backend="cpu:gloo")
            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(1200, 600), torch.nn.LayerNorm(600))
            fully_shard(self.model, mesh=init_device_mesh("cpu", (ranks,)))
            import_external_libs(MODULE)
            self.checkpoint_engine = CheckpointEngineRegistry.new(
                BACKEND, is_master=rank == 0, bucket_size=bucket_size, host="127.0.0.1"
            )

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def train(self) -> dict[str, str]:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(2).add_(1)
            whole = {name: one.full_tensor() for name, one in self.model.state_dict().items()}
            return {name: digest(one.bfloat16()) for name, one in whole.items()}

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
            def whole() -> Any:
                for name, one in self.model.state_dict().items():
                    yield name, one.full_tensor().bfloat16()

            sent = await self.checkpoint_engine.send_weights(whole(), global_steps=global_steps)
            return sent or {}

        @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
        def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    return Trainer


def make_rollout() -> Any:
    """The class of an inference engine's part, which notes what it gets."""
    from verl.workers.rollout.base import BaseRollout

    class NotingRollout(BaseRollout):  # type: ignore[misc]
        def __init__(self) -> None:
            self.got: dict[str, str] = {}

        async def resume(self, tags: list[str]) -> None: ...

        async def release(self) -> None: ...

        async def update_weights(self, weights: Any, **options: Any) -> None:
            self.got = {"step": str(options["global_steps"]), "form": options["wire_format"]}
            async for name, tensor in weights:
                self.got[name] = digest(tensor)

    return NotingRollout


class Replica:
    """An inference engine, of which verl's manager needs this."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...


def main(result: Path) -> None:
    import ray
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    ray.init(
        num_cpus=64,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )

    class NotingWorker(CheckpointEngineWorker):  # type: ignore[misc]
        def __init__(self, rollout_config: Any) -> None:
            super().__init__(rollout_config, None, make_rollout()())

        def got(self) -> dict[str, str]:
            return dict(self.server_adapter.got)

    config = CheckpointEngineConfig(
        backend=BACKEND,
        update_weights_bucket_megabytes=1,
        engine_kwargs={BACKEND: {"host": "127.0.0.1"}},
        custom_backend_module=MODULE,
    )
    # One of its tensors does not fit in a bucket.
    made = RayClassWithInitArgs(cls=ray.remote(make_trainer()), bucket_size=1 << 20)
    pool = RayResourcePool(process_on_nodes=[TRAINERS], use_gpu=False)
    trainers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made)
    rollout = RolloutConfig(name="vllm", checkpoint_engine=config)
    worker = RayClassWithInitArgs(cls=ray.remote(NotingWorker), rollout_config=rollout)
    pool = RayResourcePool(process_on_nodes=[WORKERS], use_gpu=False)
    workers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker).workers
    manager = CheckpointEngineManager(config, trainers, [Replica([one]) for one in workers])
    found = []
    for step in range(STEPS):
        trained = trainers.train()
        manager.update_weights(global_steps=step)
        found.append({"trained": trained, "got": ray.get([one.got.remote() for one in workers])})
    result.write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
