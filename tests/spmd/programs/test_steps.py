"""Orders of steps: what is read is there, movements keep their order, and few are under way."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import UsageError
from reshard.spmd.core.backend import library as library_of
from reshard.spmd.ops.elementwise import _ATEN_NAMES, _TORCH_NAMES, writing
from reshard.spmd.programs.steps import Action, ProgramStep, overlapped_order


def step(
    reads: Sequence[int], makes: Sequence[int], transport: str = "here", grows: bool = False
) -> ProgramStep:
    return ProgramStep(lambda values: None, reads, makes, transport, grows=grows)


def written(order: Sequence[Action]) -> str:
    return " ".join(f"{one.kind}{one.step}" for one in order)


def draw_steps(seed: int) -> tuple[list[ProgramStep], set[int]]:
    """Programs of up to 30 steps on inputs 0 and 1, and the registers that they return."""
    choose = random.Random(seed)
    steps, count = [], 2
    for _ in range(choose.randint(1, 30)):
        travel = choose.choice(["here", "here", "here", "messages", "messages", "together"])
        reads = [choose.randrange(count) for _ in range(1 if travel == "messages" else 2)]
        steps.append(step(reads, [count], travel, choose.random() < 0.5))
        count += 1
    return steps, {choose.randrange(count) for _ in range(2)}


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 9])
def test_orders_of_random_steps_are_valid(ahead: int) -> None:
    for seed in range(300):
        steps, kept = draw_steps(seed)
        order = overlapped_order(steps, kept, ahead)
        there, pending, moved, done = {0, 1}, [], [], []
        for one in order:
            reads, makes = steps[one.step].reads, set(steps[one.step].makes)
            if one.kind == "begin":
                assert steps[one.step].transport == "messages"
                assert there.issuperset(reads)
                pending.append(one.step)
                moved.append(one.step)
            elif one.kind == "wait":
                pending.remove(one.step)
                # Its source is still there.
                assert there.issuperset(reads)
                there |= makes
                done.append(one.step)
            else:
                assert there.issuperset(reads)
                # Nothing else moves meanwhile, and ranks wait for nobody who is behind.
                if steps[one.step].transport != "here":
                    assert not pending
                if steps[one.step].transport == "messages":
                    moved.append(one.step)
                there |= makes
                done.append(one.step)
            for grows in (False, True):
                assert sum(steps[number].grows is grows for number in pending) <= ahead
            assert there.issuperset(one.frees)
            there -= set(one.frees)
        assert not pending
        assert sorted(done) == list(range(len(steps)))
        assert sorted(moved) == [n for n, one in enumerate(steps) if one.transport == "messages"]
        # Nothing passes what ranks do together.
        behind = [
            sum(steps[other].transport == "together" for other in range(number)) for number in moved
        ]
        assert behind == sorted(behind)
        # Only what is returned, or was given and is never read, is left.
        read = {register for one in steps for register in one.reads}
        assert there == kept & there | {0, 1} - read - kept | kept
        if not ahead:
            assert [(one.kind, one.step) for one in order] == [
                ("run", n) for n in range(len(steps))
            ]


def test_weights_are_fetched_before_they_are_read() -> None:
    steps = []
    for layer in range(3):
        steps += [
            step([layer], [10 + layer], "messages", True),
            step([20 + layer, 10 + layer], [21 + layer]),
        ]
    assert (
        written(overlapped_order(steps, {23}, 1)) == "run0 begin2 run1 wait2 begin4 run3 wait4 run5"
    )
    assert (
        written(overlapped_order(steps, {23}, 2))
        == "begin0 begin2 wait0 begin4 run1 wait2 run3 wait4 run5"
    )


def test_gradients_are_reduced_while_others_are_computed() -> None:
    # All of them are moved at the end.
    steps = [step([0], [10]), step([10], [11]), step([11], [12])]
    steps += [step([10 + layer], [20 + layer], "messages") for layer in range(3)]
    found = written(overlapped_order(steps, {20, 21, 22}, 2))
    assert found == "run0 begin3 run1 begin4 run2 wait3 begin5 wait4 wait5"
    frees = {one.step: one.frees for one in overlapped_order(steps, {20, 21, 22}, 2)}
    assert frees[3] == (10,)


def test_no_reshard_starts_before_a_step_of_all_ranks() -> None:
    steps = [
        step([0], [1], "messages"),
        step([0], [2], "together"),
        step([0], [3], "messages"),
        step([2], [4]),
        step([1, 3, 4], [5]),
    ]
    assert written(overlapped_order(steps, {5}, 4)) == "run0 run1 begin2 run3 wait2 run4"


MESH = DeviceMesh.of(x=2)
ROWS, WIDTH = 256, 128
SHARD_BYTES = ROWS * WIDTH * 8 // 2


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    with sp.running(sp.in_process(request.param)):
        yield request.param


class AddressesSeen(TorchDispatchMode):
    """Where results of PyTorch's functions lie, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self._kept.append(made)
            self.found.add(made.untyped_storage().data_ptr())
        return made


def array(seed: int = 0, text: str = "x, -") -> Any:
    data = np.random.default_rng(seed).normal(size=(ROWS, WIDTH))
    return sp.array(data, spec(MESH, text))


def chain(x: Any, y: Any) -> Any:
    for _ in range(4):
        x = sp.tanh(x * 0.5 + y)
    return x


def viewed(x: Any, y: Any) -> Any:
    """A view of what is last read by a function that works element by element."""
    z = x + y
    turned = z.mT
    last = z * 2.0
    return turned + 0.0, last, turned


def read_later(x: Any, y: Any) -> Any:
    z = x + y
    w = z * 2.0
    return z + w, sp.exp(w) * w, w


def in_parts(x: Any, y: Any) -> Any:
    z = x + y
    there = z.shard(spec(MESH, "-, x"))
    return z * 3.0, there * there, sp.sum(z * z) + 1.0, sp.concat([z, z], axis=1)


def of_products(x: Any, y: Any) -> Any:
    """What is made by products, and what only looks like one."""
    z = sp.einsum("ab,cb->ac", x, y)
    turned = sp.einsum("ab->ba", x + y)
    return sp.silu(z) * 2.0, turned + turned, sp.silu(sp.softmax(x) * y), sp.sigmoid(x @ y.mT)


def branched(x: Any, y: Any) -> Any:
    z = x * y
    small = sp.identity(z)
    inner = sp.cond(sp.sum(z) > 1e9, lambda one: one + 1.0, lambda one: one, z)
    return z * 2.0, small, inner, sp.where(z > 0, z, 0.0)


def alone(x: Any, y: Any) -> Any:
    return x * 1.0, sp.sum(x) * 2.0, x > 0, sp.astype(x + y, "float32") * 2


@pytest.mark.parametrize(
    "function", [chain, viewed, read_later, in_parts, of_products, branched, alone]
)
@pytest.mark.parametrize("text", ["x, -", "-, -", "-, x"])
def test_later_runs_keep_arguments_and_earlier_results(
    function: Any, text: str, library: str
) -> None:
    x, y = array(0, text), array(1, text)
    before = [dense(one) for one in (x, y)]
    expected = [dense(one) for one in listed(function(x, y))]
    program = sp.jit(function)
    kept = []
    for _ in range(3):
        found = listed(program(x, y))
        kept += [(one, right) for one, right in zip(found, expected, strict=True)]
        np.testing.assert_array_equal(x.to_dense(), before[0])
        np.testing.assert_array_equal(y.to_dense(), before[1])
    # What another run does is not seen in results of the runs before.
    for one, right in kept:
        np.testing.assert_array_equal(one.to_dense(), right)


def dense(array: Any) -> Any:
    """A copy of its elements."""
    return np.asarray(array.to_dense()).copy()


def listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def test_a_chain_of_operators_reuses_memory() -> None:
    x, y = array(0), array(1)
    program = sp.jit(chain)
    program(x, y)
    tracemalloc.start()
    try:
        found = program(x, y)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.shape == (ROWS, WIDTH)
    # Of both shards; without it there are two at a time.
    assert most < 1.2 * 2 * SHARD_BYTES


def test_a_chain_of_operators_reuses_memory_of_tensors() -> None:
    with sp.running(sp.in_process("torch")):
        x, y = array(0), array(1)
        program = sp.jit(chain)
        right = program(x, y)
        with AddressesSeen() as seen:
            found = program(x, y)
    np.testing.assert_array_equal(found.to_dense(), right.to_dense())
    # Of both shards.
    assert len(seen.found) == 2


@pytest.mark.parametrize("name", [*_TORCH_NAMES.split(), *_ATEN_NAMES.split()])
def test_torch_functions_write_results_to_out(name: str) -> None:
    place = torch.nn.functional if name in _ATEN_NAMES.split() else library_of("torch").namespace
    function = getattr(place, name)
    write = writing(function)
    assert write is not None
    data = torch.arange(-3, 9).reshape(4, 3)
    written = 0
    for kind in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x, y = data.to(kind), (data.flip(0) + 1).to(kind)
        # The second argument of PyTorch's own `relu` is another.
        for operands in ((x,), (x, y), (x, 2), (2, x))[: 1 if name in _ATEN_NAMES else 4]:
            try:
                right = function(*operands)
            except (TypeError, RuntimeError):
                continue
            for number, one in enumerate(operands):
                copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in operands]
                out = copies[number]
                # Programs write only where this holds.
                if isinstance(one, int) or (one.dtype, one.shape) != (right.dtype, right.shape):
                    continue
                made = write(*copies, out=out)
                torch.testing.assert_close(made, right, rtol=0, atol=0, equal_nan=True)
                assert made is out or isinstance(operands[0], int)
                written += made is out
    assert written


def test_gradients_of_torch_go_through_programs() -> None:
    with sp.running(sp.in_process("torch")):
        data = torch.rand(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        x, y = sp.array(data, spec(MESH, "x, -")), array(1)
        program = sp.jit(chain)
        program(array(0), y)
        slopes = []
        for function in (chain, program):
            total = sp.sum(function(x, y)).to_dense()
            (slope,) = torch.autograd.grad(torch.as_tensor(total), data)
            slopes.append(slope)
    torch.testing.assert_close(slopes[0], slopes[1], rtol=0, atol=0)


def test_errors_name_the_operator() -> None:
    def function(x: Any) -> Any:
        return sp.log(x * 2.0 + 1.0)

    program = sp.jit(function)
    x = array()
    program(x * x)
    with np.errstate(all="raise"), pytest.raises(UsageError, match="log"):
        program(-(x * x))
