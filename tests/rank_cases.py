"""Run cases as one rank of a gloo job, and end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch.distributed as dist


def run_cases(cases: Iterable[Callable[[], object]]) -> NoReturn:
    """Run every case in turn on all ranks, and leave the job and the process together."""
    dist.init_process_group("gloo")
    for case in cases:
        case()
    dist.barrier()
    dist.destroy_process_group()
    # Now and then torch 2.13 aborts while the interpreter takes its threads down.
    os._exit(0)
