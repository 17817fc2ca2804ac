"""One rank of a job that redistributes tensors, and compares them with what they must be.

Argument: `all`, for thousands of pairs one by one, of which there is a sample otherwise.
"""

from __future__ import annotations

import datetime
import functools
import sys
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import reshard
from oracle import Contents, contents_of_spec, reduced, shards_of
from rank_cases import report_each, reported
from redistribution_cases import Case, order_pairs, placement_pairs, plain_cases, strided_cases
from reshard.layout import Box, Layout
from reshard.plans.plan import Plan
from reshard.sharding import ShardingSpec
from reshard.torch import Redistribution, redistribute, refit
from reshard.torch.endpoint import sharding_of_placements
from selection import choose

MESHES: dict[tuple[int, ...], TorchMesh] = {}


def torch_mesh(shape: tuple[int, ...]) -> TorchMesh:
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape)
    return MESHES[shape]


def placements(words: str) -> list[Placement]:
    found: list[Placement] = []
    for word in words.split():
        if word.startswith("SS"):
            dim, factor = word[2:].split(":")
            found.append(_StridedShard(int(dim), split_factor=int(factor)))
        elif word.startswith("S"):
            found.append(Shard(int(word[1:])))
        else:
            found.append(Replicate() if word == "R" else Partial("sum"))
    return found


@functools.cache
def contents_of(spec: ShardingSpec, shape: tuple[int, ...]) -> Contents:
    return contents_of_spec(spec, shape)


def contributions(shape: tuple[int, ...], count: int, dtype: str) -> list[np.ndarray[Any, Any]]:
    """Whole numbers, the same on every rank: sums of them are exact in any order."""
    numbers = np.random.default_rng(0)
    return [numbers.integers(-999, 999, shape).astype(dtype) for _ in range(count)]


def wanted(spec: ShardingSpec, shape: tuple[int, ...], value: np.ndarray[Any, Any]) -> Any:
    """This rank's part of a tensor, as the oracle cuts it."""
    contents = contents_of(spec, shape)
    first = [value] + [np.zeros_like(value)] * (contents.contributions - 1)
    return torch.from_numpy(shards_of(contents, first)[dist.get_rank()])


def given(contents: Contents, dense: list[np.ndarray[Any, Any]]) -> torch.Tensor:
    return torch.from_numpy(shards_of(contents, dense)[dist.get_rank()].copy())


def source_of(case: Case) -> tuple[DTensor, np.ndarray[Any, Any]]:
    """A DTensor, and the tensor that it means."""
    mesh = torch_mesh(case.mesh)
    spec = sharding_of_placements(mesh, placements(case.before), len(case.shape))
    contents = contents_of(spec, case.shape)
    dense = contributions(case.shape, contents.contributions, case.dtype)
    strides = torch.empty(case.shape, device="meta").stride()
    tensor = DTensor.from_local(
        given(contents, dense),
        mesh,
        placements(case.before),
        shape=torch.Size(case.shape),
        stride=strides,
    )
    return tensor, reduced(contents.reduction, dense)


def check_equal(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise SystemExit(f"rank {dist.get_rank()}: {what}\nfound {found}\nexpected {expected}")


COUNTS: list[tuple[object, int, int, int]] = []


def count_bytes(begun: Redistribution, what: object) -> None:
    """Remember what was moved, until `ranks_receive_and_send_the_fewest_bytes`."""
    COUNTS.append((what, begun.plan.lower_bound_bytes, begun.received_bytes, begun.sent_bytes))


def ranks_receive_and_send_the_fewest_bytes() -> None:
    """In each case all ranks together received, and sent, the fewest bytes there can be."""
    moved = torch.tensor([counts[2:] for counts in COUNTS])
    dist.all_reduce(moved)
    for (what, least, *_), both in zip(COUNTS, moved.tolist(), strict=True):
        if both != [least, least]:
            raise SystemExit(f"{what}: received and sent {both} bytes, the least is {least}")


def check_case(case: Case, is_dtensors: bool) -> None:
    """A case against the oracle and, where it can, against DTensor itself."""
    mesh, after = torch_mesh(case.mesh), placements(case.after)
    tensor, value = source_of(case)
    begun = redistribute(tensor, (mesh, after), async_op=True)
    found = begun.wait()
    if not isinstance(found, DTensor) or found.shape != case.shape:
        raise SystemExit(f"{case}: a {type(found)} of shape {list(found.shape)}")
    if list(found.placements) != after or found.stride() != tensor.stride():
        raise SystemExit(f"{case}: {found.placements} of strides {found.stride()}")
    spec = sharding_of_placements(mesh, after, len(case.shape))
    if "P" in case.after:
        total = torch.from_numpy(value)
        check_equal(found.full_tensor(), total, case)
    else:
        check_equal(found.to_local(), wanted(spec, case.shape, value), case)
    count_bytes(begun, case)
    if is_dtensors and "P" not in case.after:
        theirs = tensor.redistribute(mesh, after)
        check_equal(found.to_local(), theirs.to_local(), f"{case} as DTensor")


def check_gradient(case: Case) -> None:
    """The gradient of a weighted sum of the result, against DTensor's own."""
    mesh, after = torch_mesh(case.mesh), placements(case.after)
    gradients = []
    for way in (lambda x: redistribute(x, (mesh, after)), lambda x: x.redistribute(mesh, after)):
        tensor, _ = source_of(case)
        tensor.requires_grad_()
        result = way(tensor).to_local()
        weights = torch.arange(result.numel()).reshape(result.shape) + 1
        (result * weights).real.sum().backward()
        gradients.append(tensor.grad)
    ours, theirs = gradients
    if ours.placements != theirs.placements:
        raise SystemExit(f"{case}: gradient {ours.placements}, DTensor's {theirs.placements}")
    check_equal(ours.to_local(), theirs.to_local(), f"the gradient of {case}")


def axes_in_any_order_shard_tensors(ranks: int, is_all: bool) -> None:
    """Axes that cut in any order: more than placements can say."""
    for mesh_shape, before, after in order_pairs(ranks, is_all):
        mesh = reshard.DeviceMesh("m", mesh_shape, ("x", "y", "z")[: len(mesh_shape)])
        specs = [reshard.spec(mesh, text) for text in (before, after)]
        (value,) = contributions((17, 5), 1, "float32")
        own = given(contents_of(specs[0], (17, 5)), [value])
        begun = redistribute(own, specs[1], source=specs[0], shape=(17, 5), async_op=True)
        check_equal(begun.wait(), wanted(specs[1], (17, 5), value), (before, after))
        count_bytes(begun, (before, after))


def tensors_move_between_meshes_of_other_ranks(ranks: int) -> None:
    """Devices in another order, fewer ranks than the job has, and overlapping ones."""
    everyone = list(range(ranks))
    half = ranks // 2
    orders = {
        "reversed": everyone[::-1],
        "first": everyone[: max(half, 1)],
        "last": everyone[half:],
        "middle": everyone[ranks // 3 : ranks - ranks // 4],
        "all": everyone,
    }
    meshes = {name: TorchMesh("cpu", order) for name, order in orders.items()}
    shape = (9, 7)
    (value,) = contributions(shape, 1, "float64")
    for one, first in meshes.items():
        spec = sharding_of_placements(first, [Shard(0)], 2)
        local = shards_of(contents_of(spec, shape), [value]).get(dist.get_rank())
        for other, second in meshes.items():
            kinds = (Shard(0), Shard(1), Replicate())
            number = (2 * list(meshes).index(one) + list(meshes).index(other)) % 3
            for after in choose(kinds[number : number + 1], kinds):
                own = None if local is None else torch.from_numpy(local.copy())
                what = (one, other, after)
                # Ranks without a part leave it to the others to say what the source is.
                source = None if own is None else (first, [Shard(0)])
                begun = redistribute(
                    own, (second, [after]), source=source, shape=shape, async_op=True
                )
                found = begun.wait()
                count_bytes(begun, what)
                expected = shards_of(
                    contents_of(sharding_of_placements(second, [after], 2), shape), [value]
                ).get(dist.get_rank())
                if not isinstance(found, DTensor):
                    raise SystemExit(f"{what}: a {type(found)}")
                if found.dtype != torch.float64:
                    raise SystemExit(f"{what}: a DTensor of {found.dtype}")
                if expected is not None:
                    check_equal(found.to_local(), torch.from_numpy(expected), what)
                elif found.to_local().numel():
                    raise SystemExit(f"{what}: something on a rank without a part")


def tensors_move_between_layouts_of_ranges_boxes_and_owners(ranks: int) -> None:
    """Ragged ranges of the flattened tensor, boxes, and a tensor that one rank owns."""
    shape = (7, 6)
    value = torch.arange(42.0).reshape(shape)
    edges = [42 * (r * r) // (ranks * ranks) for r in range(ranks + 1)]
    ragged = Layout.flat_ranges(shape, {r: (edges[r], edges[r + 1]) for r in range(ranks)})
    owned = Layout.whole(shape, [ranks - 1], ranks)
    quarters = [((0, 0), (3, 4)), ((3, 0), (7, 4)), ((0, 4), (3, 6)), ((3, 4), (7, 6))]
    boxes = Layout.from_boxes(
        shape, [(i % ranks, Box(a, b)) for i, (a, b) in enumerate(quarters)], ranks
    )
    layouts = {"ragged": ragged, "owned": owned, "boxes": boxes}
    whole = Layout.whole(shape, [0], 1)
    for (one, source), (other, target) in (
        (a, b) for a in layouts.items() for b in layouts.items()
    ):
        own = reshard.plan(whole, source).run({0: value}).get(dist.get_rank())
        expected = reshard.plan(whole, target).run({0: value}).get(dist.get_rank())
        begun = redistribute(
            own, target, source=source, dtype=torch.float32, async_op=True, extra_bytes=64
        )
        found = begun.wait()
        count_bytes(begun, (one, other))
        if expected is None:
            if found is not None:
                raise SystemExit(f"{one} to {other}: {found} on a rank without a part")
        else:
            check_equal(found, expected, (one, other))


def sums_have_the_bits_of_one_process_in_any_number_of_messages(ranks: int) -> None:
    """Sums of rounded numbers have the bits of one process, however many messages they take."""
    mesh = reshard.DeviceMesh.of(x=ranks)
    source = reshard.spec(mesh, "-, - | sum(x)").layout((8, 9))
    random = np.random.default_rng(3)
    parts = {r: torch.from_numpy(random.normal(size=(8, 9))) for r in range(ranks)}
    for target in (Layout.replicated((8, 9), ranks), reshard.spec(mesh, "-, x").layout((8, 9))):
        expected = reshard.plan(source, target).run(parts)[dist.get_rank()]
        for limit in (64, 4096):
            own = parts[dist.get_rank()]
            found = redistribute(own, target, source=source, extra_bytes=limit)
            check_equal(found, expected, f"a sum with a limit of {limit} bytes")


def out_keeps_its_address_and_the_elements_between(ranks: int) -> None:
    """`out=` keeps its address, and what lies between its elements."""
    mesh = torch_mesh((ranks,))
    value = torch.arange(8.0 * 12).reshape(8, 12)
    case = Case((ranks,), (8, 12), "S0", "S1")
    tensor, dense = source_of(case)
    value = torch.from_numpy(dense)
    columns = sharding_of_placements(mesh, [Shard(1)], 2).layout((8, 12))
    expected = reshard.plan(Layout.whole((8, 12), [0], 1), columns).run({0: value})[dist.get_rank()]
    dense_out = torch.zeros(expected.shape)
    beside = torch.full((*expected.shape, 2), -1.0)
    transposed = torch.zeros(expected.shape[::-1])
    for out in (dense_out, beside[..., 0], transposed.T):
        address, version = out.data_ptr(), out._version
        found = redistribute(tensor, (mesh, [Shard(1)]), out=out)
        if found is not out or out.data_ptr() != address or out._version == version:
            raise SystemExit("out is not what came back, or nobody was told that it changed")
        check_equal(out, expected, "out")
    if not (beside[..., 1] == -1).all():
        raise SystemExit("elements beside out changed")
    with torch.inference_mode():
        inferred = torch.zeros(expected.shape)
    for method in ("exchange", "program"):
        inferred.data.zero_()
        redistribute(tensor, (mesh, [Shard(1)]), out=inferred, method=method)
        check_equal(inferred, expected, f"out of inference mode, by {method}")
    whole = DTensor.from_local(torch.zeros(8, 12), mesh, [Replicate()])
    address = whole.to_local().data_ptr()
    found = redistribute(tensor, (mesh, [Replicate()]), out=whole)
    if found is not whole or whole.to_local().data_ptr() != address:
        raise SystemExit("a DTensor given as out is not what came back")
    check_equal(whole.to_local(), value, "a DTensor as out")


def gradients_return_to_ranks_that_only_sent(ranks: int) -> None:
    """The first half sends to the second, which calls for gradients; both take part."""
    half = ranks // 2
    before = Layout.flat_ranges(
        (12,), {r: (12 * r // half, 12 * (r + 1) // half) for r in range(half)}
    )
    receivers = list(range(half, ranks))
    edges = [12 * i // len(receivers) for i in range(len(receivers) + 1)]
    after = Layout.flat_ranges(
        (12,), {r: (edges[i], edges[i + 1]) for i, r in enumerate(receivers)}
    )
    rank = dist.get_rank()
    weights = torch.arange(12.0) + 1
    tensor = None
    if rank < half:
        (box,) = before.boxes(rank)
        tensor = torch.zeros(box.shape, requires_grad=True)
    result = redistribute(tensor, after, source=before, dtype=torch.float32)
    if rank in receivers:
        (box,) = after.boxes(rank)
        (result * weights[box.start[0] : box.stop[0]]).sum().backward()
    else:
        if result.shape != (0,):
            raise SystemExit(f"a rank that receives nothing has {result}")
        result.sum().backward()
    if tensor is not None:
        (box,) = before.boxes(rank)
        check_equal(tensor.grad, weights[box.start[0] : box.stop[0]], "a gradient across ranks")


def all_pairs_are_moved_in_one_exchange() -> None:
    """All pairs of placements of (16, 24), and of orders of (17, 5), on 2x2x2 in one exchange."""
    sizes = (2, 2, 2)
    mesh = reshard.DeviceMesh("m", sizes, ("x", "y", "z"))
    cuts = {
        words: sharding_of_placements(torch_mesh(sizes), placements(words), 2)
        for words in dict.fromkeys(words for pair in placement_pairs(3) for words in pair)
    }
    texts = {text: reshard.spec(mesh, text) for _, text, _ in order_pairs(8, is_all=True)}
    movements = [
        *(
            (shape, specs[before], specs[after], (before, after))
            for shape, specs, pairs in (
                ((16, 24), cuts, placement_pairs(3)),
                ((17, 5), texts, [pair for _, *pair in order_pairs(8, is_all=True)]),
            )
            for before, after in pairs
        )
    ]
    source, target, expected = {}, {}, {}
    for number, (shape, before, after, _) in enumerate(movements):
        contents, name = contents_of(before, shape), str(number)
        dense = contributions(shape, contents.contributions, "float32")
        source[name] = given(contents, dense), before.layout(shape)
        expected[name] = wanted(after, shape, reduced(contents.reduction, dense))
        target[name] = torch.zeros_like(expected[name]), after.layout(shape)
    done = refit(source, target, planning="centralized")
    for name, value in expected.items():
        check_equal(target[name][0], value, movements[int(name)][-1])
    # A count of geometry, which all ranks would find alike.
    least = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        least += sum(4 * Plan(source[name][1], target[name][1]).moved_elements for name in expected)
    dist.all_reduce(least)
    COUNTS.append(("all pairs at once", least.item(), done.received_bytes, done.sent_bytes))


def main(is_all: bool) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    ranks = dist.get_world_size()
    warnings.filterwarnings("ignore", message="ComplexHalf")
    torch._logging.set_logs(all=40)
    plain = plain_cases(ranks, is_all)
    with reported("tensors_are_those_of_the_oracle_and_of_dtensor"):
        for case in plain:
            check_case(case, is_dtensors=True)
    with reported("strided_shards_are_those_of_the_oracle"):
        for case in strided_cases(ranks):
            check_case(case, is_dtensors=False)
    with reported("gradients_are_those_of_dtensor"):
        for case in [case for case in plain if "P" not in case.after][::5]:
            check_gradient(case)
    report_each([axes_in_any_order_shard_tensors], ranks, is_all)
    if ranks == 8:
        report_each([all_pairs_are_moved_in_one_exchange])
    report_each(
        [
            tensors_move_between_meshes_of_other_ranks,
            tensors_move_between_layouts_of_ranges_boxes_and_owners,
            sums_have_the_bits_of_one_process_in_any_number_of_messages,
            out_keeps_its_address_and_the_elements_between,
            gradients_return_to_ranks_that_only_sent,
        ],
        ranks,
    )
    report_each([ranks_receive_and_send_the_fewest_bytes])
    dist.barrier()


if __name__ == "__main__":
    main(is_all="all" in sys.argv)
