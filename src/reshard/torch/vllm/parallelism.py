"""Parallelism of vLLM: tensor, pipeline, expert and data parallelism, and its ranks.

Ranks are numbered with tensor parallelism fastest, then stages, then replicas::

    dp=2, pp=2, tp=2       replica 0         replica 1
                          stage 0  0 1       stage 0  4 5
                          stage 1  2 3       stage 1  6 7

Expert parallelism adds no ranks: the experts of a stage are distributed over all its ranks of all
replicas, so its size is the product of tensor and data parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reshard._validation import check_int
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class VllmParallelism:
    """Sizes of vLLM's parallelism.

    Args:
        tp: ranks that a layer is sharded over.
        pp: stages.
        ep: ranks that experts are distributed over: 1, or `tp * dp`.
        dp: replicas, which share the experts if `ep` is above 1.

    Raises:
        UsageError: sizes below 1, or an `ep` that vLLM does not support.

    >>> VllmParallelism(tp=2, pp=2).mesh.text
    'pp=2,tp=2'
    >>> VllmParallelism(tp=4, ep=2)
    Traceback (most recent call last):
    ...
    reshard.errors.UsageError: ep=2 with tp=4 and dp=1: vLLM deals experts to all ranks of a stage;
    give ep=4, or ep=1 for experts that are cut
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "dp"):
            size = check_int(getattr(self, axis), f"size of {axis}", UsageError, minimum=1)
            object.__setattr__(self, axis, size)
        if self.ep not in (1, self.tp * self.dp):
            raise UsageError(
                f"ep={self.ep} with tp={self.tp} and dp={self.dp}: vLLM deals experts to all ranks "
                f"of a stage; give ep={self.tp * self.dp}, or ep=1 for experts that are cut"
            )

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return math.prod((self.tp, self.pp, self.dp))

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks, with an axis for each size above 1, or `tp` if all are 1."""
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp}
        kept = [(axis, size) for axis, size in sizes.items() if size > 1] or [("tp", 1)]
        return DeviceMesh.parse(",".join(f"{axis}={size}" for axis, size in kept))

    @property
    def text(self) -> str:
        """The sizes, as in `tp=16,ep=32,dp=2`."""
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": self.dp}
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis == "tp")
