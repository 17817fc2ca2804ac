"""Movements that run again and again: what a program does for tensors of one kind, found once.

A redistribution learns what its ranks mean, agrees on it, moves and confirms. Where an array moves
as others did before, all of that is known but the elements. A `PreparedMovement` has the program,
the digest of what it means, and where messages begin and end; a run makes the new tensor and moves.
Those of a `sequence` are agreed on together.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from reshard.collectives.program import Program
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ShardError
from reshard.torch.exchange.agreement import Intent, agree, device_of
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES
from reshard.torch.exchange.groups import CPU, RankGroup, rank_group
from reshard.torch.exchange.packing.copies import empty_result
from reshard.torch.exchange.usability import is_usable
from reshard.torch.programs.methods import method_digest
from reshard.torch.programs.run import ProgramRun, least_extra_bytes


class PreparedMovement:
    """A program on one rank, for tensors of one dtype. All ranks of the group run it.

    Args:
        program: from the layout of the tensors to that of the results.
        dtype: of their elements.
        group: of all ranks of the program; of all ranks when None.
    """

    def __init__(
        self, program: Program, dtype: DType, group: dist.ProcessGroup | None = None
    ) -> None:
        self.program = program
        self.dtype = dtype
        self._group = group
        ranks = dist.get_world_size(group)
        least_bytes = least_extra_bytes(program, dtype.itemsize_bytes, ranks)
        self.extra_bytes = max(DEFAULT_EXTRA_BYTES, least_bytes)
        self._source = program.source.layout(program.shape)
        self._target = program.target.layout(program.shape)
        self._intent = Intent(
            {
                "dtype": dtype.name.encode(),
                "source": self._source.fingerprint,
                "target": self._target.fingerprint,
                "method": method_digest(program),
            }
        )

    def run(
        self, tensor: torch.Tensor | None, agreed: RankGroup | None = None
    ) -> torch.Tensor | None:
        """This rank's part of the result, from its part of the source; None where it has none.

        Args:
            tensor: dense, of the dtype, and of the shape that the program's source has here.
            agreed: the group, where it is in the middle of a sequence of which this is a part: all
                ranks know already that they mean the same.

        Raises:
            RunError: on every rank, a rank that cannot take part; on those that wait for it, one
                that fails on the way.
            PlanError: on every rank, ranks that mean different things.
            ShardError: an agreed run of a tensor that a run has left partly new.
        """
        group = rank_group(self._group) if agreed is None else agreed
        # A sequence has the turn, whichever of its threads this is.
        with group.turn() if agreed is None else nullcontext():
            if agreed is not None:
                made = self._make_result(tensor, group.rank)
            else:
                made = self._agree_on_result(tensor, group)
            device = next((x.device for x in (tensor, made) if x is not None), CPU)
            dtype = getattr(torch, self.dtype.name)
            run = ProgramRun(self.program, tensor, made, dtype, group, device, self.extra_bytes)
            try:
                run.finish()
            except BaseException as error:
                group.break_off(error)
                raise
            return made

    def _agree_on_result(
        self, tensor: torch.Tensor | None, group: RankGroup
    ) -> torch.Tensor | None:
        try:
            made = self._make_result(tensor, group.rank)
        except Exception as error:
            # Also memory that is not there: the others wait.
            agree(replace(self._intent, problem=f"{type(error).__name__}: {error}"), group)
            raise
        agree(self._intent, group)
        return made

    def _make_result(self, tensor: torch.Tensor | None, rank: int) -> torch.Tensor | None:
        before, after = (
            layout.local_shape(rank) if rank < layout.slots else None
            for layout in (self._source, self._target)
        )
        given = None if tensor is None else tuple(tensor.shape)
        if given != before or (tensor is not None and as_dtype(tensor.dtype) != self.dtype):
            said = "none" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise ShardError(
                f"a shard, {said}, where {self.dtype.name} of shape {before} moves to shape "
                f"{after}; give shards as the arrays have them"
            )
        if tensor is not None and not is_usable(tensor):
            raise ShardError(
                f"a shard, {tensor.dtype} of shape {list(tensor.shape)}, is partly new and partly "
                "old after a run into it that failed; fill it again"
            )
        if after is None:
            return None
        device = device_of(self._group) if tensor is None else tensor.device
        made = empty_result(after, getattr(torch, self.dtype.name), device)
        # No message has padding.
        return made.zero_() if self._target.is_padded else made
