"""Processes of a link in tests: which job each is of, its end of the link, and its weights.

Of five processes two are a trainer, two engine a, and the last engine b; of seven two are engine b,
and the last is engine c. Each job counts its ranks from 0.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from refit_models import CUTS, distributed, expect_same, values
from reshard.torch import connect
from reshard.torch.links import sealed_store
from reshard.torch.links.link import WeightLink

# A key for the real cost takes each process 50 ms; `test_sealed_store.py` has it.
sealed_store._SCRYPT_COST = 1 << 4

NUMBER = int(os.environ.get("RANK", 0))
LAYOUT = ("trainer", "trainer", "a", "a", "b", "b", "c")
NAME = LAYOUT[NUMBER]
SIDE = "trainer" if NAME == "trainer" else "engine"
IS_ALONE = (os.environ.get("WORLD_SIZE"), NUMBER) in (("5", 4), ("7", 6))
RANK, RANKS = (0, 1) if IS_ALONE else (NUMBER % 2, 2)
PORTS: dict[str, int] = {}
TIMEOUT_S = 60.0
ROWS = {name: [Shard(0)] for name in CUTS}
COLUMNS = {name: [Replicate()] if "," not in CUTS[name] else [Shard(1)] for name in CUTS}


def begin_job() -> None:
    """The job of this process, in which it is rank 0 or 1; none where it is alone."""
    if NAME not in PORTS:
        return
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", PORTS[NAME], RANKS, RANK == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS, timeout=timeout)


def link(engines: int = 2, **options: Any) -> WeightLink:
    """This process's end."""
    given: dict[str, Any] = {"timeout_s": TIMEOUT_S, **options}
    url = f"tcp://127.0.0.1:{PORTS['link']}"
    if SIDE == "trainer":
        return connect(url, "trainer", rank=RANK, ranks=RANKS, engines=engines, **given)
    return connect(url, "engine", rank=RANK, ranks=RANKS, name=NAME, **given)


def cut(given: Any) -> Any:
    """As DTensors of this job."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    return distributed(given, mesh, ROWS if SIDE == "trainer" else COLUMNS)


def set_values(model: Any, seed: int) -> None:
    """The trainer's weights after a step."""
    for name, tensor in cut(values(seed)).items():
        model[name].to_local().copy_(tensor.to_local())


def expect_values(model: Any, seed: int) -> None:
    """An engine's are the trainer's."""
    whole = values(seed)
    expected = {name: whole[name] for name in model}
    expect_same(model, expected if IS_ALONE else cut(expected), f"weights {seed} of {NAME}")
