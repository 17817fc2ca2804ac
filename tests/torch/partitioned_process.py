"""One rank of a job: tensors of partitions, converted every way, against the dense tensor."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import reshard
from rank_cases import report_each
from rank_endings import end_last
from reshard.errors import PlanError, RunError, ShardError, UsageError
from reshard.notation import sharding_of
from reshard.notation.partitioned import PartitionedShard
from reshard.torch import partitioned_tensor
from reshard.torch.endpoint import sharding_of_placements
from reshard.torch.partitioned_tensor import PartitionedTensor

Matrix = tuple[tuple[int, ...], ...]

EXAMPLE: Matrix = ((4, 6, 4, 2), (2, 4, 8, 2))
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.bool,
    torch.float64,
    torch.uint16,
    torch.complex32,
]


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def expect_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found, expected)
    assert bits(found) == bits(expected), (found, expected)


def random_dense(random: np.random.Generator, shape: Sequence[int], dtype: torch.dtype) -> Any:
    most = 2 if dtype == torch.bool else 256
    size_bytes = math.prod(shape) * dtype.itemsize
    numbers = random.integers(0, most, size_bytes, dtype=np.uint8)
    return torch.tensor(numbers.tolist(), dtype=torch.uint8).view(dtype).reshape(tuple(shape))


@contextlib.contextmanager
def splits_exchanged(times: int) -> Iterator[None]:
    """Expect a first all-to-all as often as this."""
    real = partitioned_tensor.exchange_splits
    with mock.patch.object(partitioned_tensor, "exchange_splits", side_effect=real) as called:
        yield
    assert called.call_count == times, f"splits were exchanged {called.call_count} times"


class Oracle:
    """A dense tensor of partitions, and what each rank has of it."""

    def __init__(self, dense: torch.Tensor, dim: int, matrix: Matrix) -> None:
        self.dense = dense
        self.matrix = matrix
        self.dim = dim
        self.ranks = len(matrix)
        self.count = len(matrix[0])
        # By partition, then by rank.
        sizes = [matrix[q][b] for b in range(self.count) for q in range(self.ranks)]
        cut = list(dense.split(sizes, dim)) if sizes else []
        self.pieces = [cut[b * self.ranks : (b + 1) * self.ranks] for b in range(self.count)]

    def _joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*pieces, self.dense.narrow(self.dim, 0, 0)], self.dim)

    def owner(self, partition: int) -> int:
        return partition // -(-self.count // self.ranks)

    def unaligned(self, of: int) -> torch.Tensor:
        return self._joined([pieces[of] for pieces in self.pieces])

    def aligned(self, of: int) -> torch.Tensor:
        own = [self.pieces[b] for b in range(self.count) if self.owner(b) == of]
        return self._joined(list(itertools.chain(*own)))

    def lacking_bytes(self, of: int, aligned: bool) -> int:
        """What a rank lacks of one side, where it has its part of the other."""
        return sum(
            piece.numel() * piece.element_size()
            for b, pieces in enumerate(self.pieces)
            for q, piece in enumerate(pieces)
            if (self.owner(b) == of) != (q == of) and of == (self.owner(b) if aligned else q)
        )


def the_example_of_the_proposal_runs() -> None:
    """The proposal's example, step by step, as DESIGN corrects it."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(32)
    # Partitions of 6, 10, 12 and 4, of which the ranks have 4 and 2, 6 and 4, 4 and 8, 2 and 2.
    unaligned = [
        [*range(4), *range(6, 12), *range(16, 20), *range(28, 30)],
        [*range(4, 6), *range(12, 16), *range(20, 28), *range(30, 32)],
    ][rank()]
    aligned = list(range(16 * rank(), 16 * rank() + 16))
    tensor = PartitionedTensor.of_splits(torch.tensor(unaligned), EXAMPLE[rank()], mesh)
    assert tensor.placement is None

    # Unaligned to aligned.
    with splits_exchanged(1):
        found = tensor.to_aligned()
    assert found.local.tolist() == aligned
    assert found.splits == ((4, 2, 6, 4), (4, 8, 2, 2))[rank()]
    assert {b: len(part) for b, part in found.partitions.items()} == ({0: 6, 1: 10}, {2: 12, 3: 4})[
        rank()
    ]
    # Of the 32 elements 12 change hands: 6 of rank 0's, 6 of rank 1's.
    assert found.received_bytes == 6 * 8

    # And back. What was told on the way there need not be told again.
    with splits_exchanged(0):
        back = found.to_unaligned()
    assert back.local.tolist() == unaligned and back.splits == EXAMPLE[rank()]
    assert back.received_bytes == 6 * 8 and not back.aligned

    # The same from splits that each rank knows alone.
    alone = PartitionedTensor.of_splits(
        torch.tensor(aligned), found.splits, mesh, aligned=True, num_partitions=4
    )
    with splits_exchanged(1):
        back = alone.to_unaligned()
    assert back.local.tolist() == unaligned and back.splits == EXAMPLE[rank()]
    assert back.received_bytes == 6 * 8

    # Unaligned and aligned to replicated and to plain shards.
    for one in (tensor, found, alone):
        assert one.to_replicated().to_local().tolist() == whole.tolist()
        assert one.to_shard().to_local().tolist() == aligned
    # Replicated to unaligned and to aligned, and from plain shards.
    for placements in ([Replicate()], [Shard(0)]):
        dense = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        by_rank = PartitionedShard(0, 4, EXAMPLE)
        assert PartitionedTensor.distribute(dense, by_rank).local.tolist() == unaligned
        sizes = PartitionedShard(0, 4, (6, 10, 12, 4), aligned=True)
        assert PartitionedTensor.distribute(dense, sizes).local.tolist() == aligned
        # One size a partition: each rank's piece is by ceil.
        cut = PartitionedTensor.distribute(dense, PartitionedShard(0, 4, (6, 10, 12, 4)))
        assert cut.splits == (3, 5, 6, 2)
        assert (
            cut.local.tolist()
            == (
                [*range(3), *range(6, 11), *range(16, 22), *range(28, 30)],
                [*range(3, 6), *range(11, 16), *range(22, 28), *range(30, 32)],
            )[rank()]
        )


def random_splits_move_only_missing_bytes() -> None:
    """Any splits along any dimension of any dtype; the bytes are those that are lacking."""
    # Halves of complex numbers are new to torch, and it says so.
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    random = np.random.default_rng(size())
    order = random.permutation(size()).tolist()
    meshes = [init_device_mesh("cpu", (size(),)), DeviceMesh("cpu", order)]
    for case in range(24):
        mesh = meshes[case % 2]
        at = mesh.mesh.tolist().index(rank())
        count = int(random.integers(0, 8))
        table = random.integers(0, 4, (size(), count)) * random.integers(0, 2, (size(), count))
        matrix = tuple(tuple(row) for row in table.tolist())
        ndim = int(random.integers(1, 4))
        dim = int(random.integers(0, ndim))
        shape = random.integers(0, 4, ndim).tolist()
        shape[dim] = int(table.sum())
        dense = random_dense(random, shape, DTYPES[case % len(DTYPES)])
        oracle = Oracle(dense, dim, matrix)
        unaligned, aligned = oracle.unaligned(at), oracle.aligned(at)
        if case % 3 == 0:
            # Not dense in memory.
            unaligned = unaligned.transpose(0, -1).contiguous().transpose(0, -1)
        tensor = PartitionedTensor.of_splits(
            unaligned, torch.tensor(matrix[at], dtype=torch.int64), mesh, dim=dim - ndim
        )
        known = PartitionedTensor.of_placement(
            unaligned, PartitionedShard(dim, count, matrix), mesh
        )
        kept = unaligned.clone()
        for one, exchanges in ((tensor, 1), (known, 0), (tensor.gather_splits(), 0)):
            with splits_exchanged(exchanges):
                found = one.to_aligned(extra_bytes=256 if case % 2 else 1 << 20)
            expect_equal(found.local, aligned)
            assert found.received_bytes == oracle.lacking_bytes(at, aligned=True)
            again = found.with_local(found.local.clone())
            if exchanges:
                again = PartitionedTensor.of_splits(
                    found.local, found.splits, mesh, dim=dim, aligned=True, num_partitions=count
                )
            with splits_exchanged(exchanges):
                back = again.to_unaligned()
            expect_equal(back.local, unaligned)
            assert back.splits == matrix[at] and back.matrix == one.matrix
            assert back.received_bytes == oracle.lacking_bytes(at, aligned=False)
        expect_equal(unaligned, kept)
        assert sharding_of(known) is sharding_of_placements(mesh, [known.placement], ndim)
        moved = torch.tensor([found.received_bytes])
        dist.all_reduce(moved)
        # No plan moves less.
        sharding = [
            sharding_of_placements(mesh, [one], ndim).layout(shape)
            for one in (known.placement, found.gather_splits().placement)
        ]
        assert moved.item() == reshard.plan(*sharding, dtype=dense.dtype).lower_bound_bytes
        whole = [again, tensor, found, known][case % 4]
        expect_equal(whole.to_replicated().to_local(), dense)
        expect_equal(
            whole.to_shard().to_local(),
            torch.cat(list(dense.tensor_split([*cuts(shape[dim])], dim))[at : at + 1], dim),
        )
        assert whole.gather_splits().matrix == matrix


def cuts(length: int) -> list[int]:
    """Where `length` is cut by ceil."""
    chunk = -(-length // size())
    return [min(chunk * part, length) for part in range(1, size())]


def gradients_return_the_way_of_their_values() -> None:
    """A gradient goes back the way its value came."""
    mesh = init_device_mesh("cpu", (size(),))
    random = np.random.default_rng(7)
    matrix = tuple(tuple(row) for row in random.integers(0, 4, (size(), 5)).tolist())
    shape = (3, sum(map(sum, matrix)))
    dense = torch.from_numpy(random.standard_normal(shape))
    weight = torch.from_numpy(random.standard_normal(shape))
    values, weights = Oracle(dense, 1, matrix), Oracle(weight, 1, matrix)
    leaf = values.unaligned(rank()).requires_grad_()
    tensor = PartitionedTensor.of_splits(leaf, matrix[rank()], mesh, dim=1)
    # Experts square their tokens, whose gradients are computed on the way back and forth.
    aligned = tensor.to_aligned()
    expect_equal(aligned.local.detach(), values.aligned(rank()))
    back = aligned.with_local(aligned.local**2 * weights.aligned(rank())).to_unaligned()
    back.local.sum().backward()
    expect_equal(leaf.grad, 2 * leaf.detach() * weights.unaligned(rank()))

    for make in (PartitionedTensor.to_replicated, PartitionedTensor.to_shard):
        leaf.grad = None
        found = make(tensor)
        expected = distribute_tensor(weight, mesh, found.placements, src_data_rank=None)
        (found.to_local() * expected.to_local()).sum().backward()
        expect_equal(leaf.grad, weights.unaligned(rank()))

    whole = distribute_tensor(dense.clone(), mesh, [Replicate()], src_data_rank=None)
    whole = DTensor.from_local(whole.to_local(), mesh, [Replicate()]).requires_grad_()
    cut = PartitionedTensor.distribute(whole, PartitionedShard(1, 5, matrix))
    (cut.local * weights.unaligned(rank())).sum().backward()
    expect_equal(whole.grad.full_tensor(), weight)

    with torch.no_grad():
        assert not tensor.to_aligned().local.requires_grad


def partitions_are_redistributed_to_placements() -> None:
    """`redistribute` takes it beside DTensor's own placements, and gives local tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    dense = torch.arange(6 * 10).reshape(6, 10)
    rows = PartitionedShard(0, 2, (2, 1))
    both = [Shard(1), PartitionedShard(0, 3, ((1, 0, 2), (0, 3, 0)))]
    nested = [Shard(0), rows]
    summed = [Partial(), PartitionedShard(1, 2, (4, 6), aligned=True)]
    dp, ep = mesh.get_coordinate()
    expected = {
        "both": dense[[[0, 4, 5], [1, 2, 3]][ep], 5 * dp : 5 * dp + 5],
        # dp has rows 0:3 and 3:6. Of a partition of 2 and one of 1, ep has the first of each.
        "nested": dense[[[3 * dp, 3 * dp + 2], [3 * dp + 1]][ep]],
    }
    for start in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]):
        tensor = distribute_tensor(dense, mesh, start, src_data_rank=None)
        for name, placements in (("both", both), ("nested", nested)):
            found = reshard.torch.redistribute(tensor, (mesh, placements))
            assert not isinstance(found, DTensor)
            expect_equal(found, expected[name])
            out = torch.empty_like(found)
            given = reshard.torch.redistribute(tensor, (mesh, placements), out=out)
            assert given is out and torch.equal(out, found)
            back = reshard.torch.redistribute(
                found, (mesh, start), source=(mesh, placements), shape=dense.shape
            )
            assert isinstance(back, DTensor)
            expect_equal(back.to_local(), tensor.to_local())
            # From one to another.
            other = reshard.torch.redistribute(
                found, (mesh, both), source=(mesh, placements), shape=dense.shape
            )
            expect_equal(other, expected["both"])
    # Contributions of two ranks, summed.
    local = dense[:, 4 * ep : 4 + 6 * ep] * (dp + 1)
    found = reshard.torch.redistribute(
        local, (mesh, [Replicate(), Shard(0)]), source=(mesh, summed), shape=dense.shape
    )
    expect_equal(found.to_local(), 3 * dense[3 * ep : 3 * ep + 3])

    # Along one axis of a mesh, each axis by itself.
    axis = mesh["ep"]
    mine = torch.arange(3 + dp) + 100 * rank()
    tensor = PartitionedTensor.of_splits(mine, (2, 1 + dp) if ep else (1, 2 + dp), axis)
    aligned = tensor.to_aligned()
    first, second = 100 * (2 * dp), 100 * (2 * dp + 1)
    expected_local = (
        [first, second, second + 1]
        if ep == 0
        else [*range(first + 1, first + 3 + dp), *range(second + 2, second + 3 + dp)]
    )
    assert aligned.local.tolist() == expected_local
    assert aligned.to_unaligned().local.tolist() == mine.tolist()
    assert aligned.to_shard().device_mesh == axis
    expect_all_raise(
        UsageError,
        "give that axis, such as mesh['ep']",
        lambda: PartitionedTensor.of_splits(mine, (3 + dp,), mesh),
    )


def sizes_may_be_symbolic() -> None:
    """Sizes may be torch's symbolic ones, and conversions may be called from compiled code."""
    mesh = init_device_mesh("cpu", (size(),))
    environment = ShapeEnv()
    backed = torch.zeros(3)
    with torch._subclasses.FakeTensorMode(shape_env=environment) as fake:
        symbols = fake.from_tensor(backed, static_shapes=False)
    count = symbols.shape[0]
    assert isinstance(count, torch.SymInt)
    matrix = ((count, 1),) * size()
    placement = PartitionedShard(0, 2, matrix)
    assert placement.partition_sizes == (3 * size(), size())
    tensor = PartitionedTensor.of_placement(torch.arange(4), placement, mesh)
    assert sum(tensor.to_aligned().splits) == len(tensor.to_aligned().local)

    def step(local: torch.Tensor, splits: tuple[int, ...]) -> torch.Tensor:
        tensor = PartitionedTensor.of_splits(local * 2, splits, mesh).to_aligned()
        return tensor.with_local(tensor.local + 1).to_unaligned().local * 3

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(step, backend="eager", dynamic=True)
        for length in (5, 8):
            local = torch.arange(length)
            expect_equal(compiled(local, (2, length - 2)), (local * 2 + 1) * 3)


def expect_all_raise(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


def ranks_that_differ_are_refused_before_elements_move() -> None:
    """All raise before an element moves, and can go on after it."""
    mesh = init_device_mesh("cpu", (size(),))
    last = rank() == size() - 1
    local = torch.zeros(4, 6)

    def of(splits: Sequence[int], tensor: torch.Tensor = local, dim: int = 0) -> PartitionedTensor:
        return PartitionedTensor.of_splits(tensor, splits, mesh, dim=dim)

    wrong = {
        "partitions": of((4,)),
        "shape": of((2, 4), dim=1),
        "dtype": of((2, 2), local.double()),
        "splits": PartitionedTensor.of_placement(
            local, PartitionedShard(0, 2, ((2, 2),) * size()), mesh
        ),
        "requires_grad": of((2, 2), torch.zeros(4, 6, requires_grad=True)),
    }
    for name, tensor in wrong.items():
        given = tensor if last else of((2, 2))
        expect_all_raise(PlanError, f"by '{name}'", given.to_aligned)
        if name != "requires_grad":
            expect_all_raise(PlanError, f"by '{name}'", given.gather_splits)
    aligned = of((2, 2)).to_aligned()
    for call in (aligned.to_unaligned, aligned.to_aligned):
        expect_all_raise(PlanError, "by 'conversion'", call if last else of((2, 2)).to_aligned)
    expect_all_raise(
        RunError,
        "UsageError: extra_bytes=3",
        lambda: of((2, 2)).to_aligned(extra_bytes=3 if last else 1 << 20),
    )
    for splits, dim, words in (
        ((2, 1), 0, "add up to 3, but the local tensor has length 4"),
        ((-1, 5), 0, "give 2 sizes of 0 or more"),
        ((4,), 2, "along dimension 2 of a tensor that has 2"),
    ):
        expect_all_raise(ShardError, words, lambda s=splits, d=dim: of(s, dim=d))
    expect_all_raise(
        UsageError,
        "num_partitions=",
        lambda: PartitionedTensor.of_splits(local, (4,), mesh, aligned=True),
    )
    expect_all_raise(
        ShardError,
        f"gives sizes for {size() + 1} ranks",
        lambda: PartitionedTensor.of_placement(
            local, PartitionedShard(0, 1, ((4,),) * (size() + 1)), mesh
        ),
    )
    expect_all_raise(
        ShardError,
        "PartitionedTensor.distribute",
        lambda: of((4,), DTensor.from_local(local, mesh, [Replicate()])),
    )
    assert of((2, 2)).to_aligned().to_unaligned().splits == (2, 2)


def killed(when: str) -> None:
    """Rank 1 is killed before it tells its splits, or before it sends its pieces."""
    mesh = init_device_mesh("cpu", (size(),))
    tensor = PartitionedTensor.of_splits(torch.arange(600_000), (200_000,) * 3, mesh)
    kept = tensor.local.clone()
    stop = contextlib.nullcontext()
    if rank() == 1:
        kill = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        name = {"splits": "exchange_splits", "pieces": "convert_pieces"}[when]
        stop = mock.patch.object(partitioned_tensor, name, kill)
    words = {"splits": "nothing was moved: rank 1 (host ", "pieces": "rank 1 (host "}[when]
    with stop:
        expect_all_raise(RunError, words, tensor.to_aligned)
    assert torch.equal(tensor.local, kept)
    end_last([2])


def main(*fault: str) -> None:
    timeout = datetime.timedelta(seconds=20 if fault else 120)
    dist.init_process_group("gloo", timeout=timeout)
    if fault:
        killed(*fault)
        return
    by_size = {
        2: [the_example_of_the_proposal_runs, sizes_may_be_symbolic],
        4: [partitions_are_redistributed_to_placements],
    }
    report_each(
        [
            *by_size.get(size(), []),
            random_splits_move_only_missing_bytes,
            gradients_return_the_way_of_their_values,
            ranks_that_differ_are_refused_before_elements_move,
        ]
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
