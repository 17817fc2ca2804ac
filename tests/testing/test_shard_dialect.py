"""Texts of the `shard` dialect: read, refused by line and reason, and run."""

from __future__ import annotations

import re

import numpy as np
import pytest

import reshard
from reshard.collectives import find_program
from reshard.collectives.lowering import mlir_module
from reshard.collectives.lowering.mlir import ShardModule
from reshard.errors import NotationError, ShardError
from reshard.testing import parse_shard_module, run_shard_module

GRID = reshard.DeviceMesh.of(a=2, b=3)


def module_of(body: str, grid: str = "2x2", before: str = "8xi64", after: str = "8xi64") -> str:
    return (
        f"shard.grid @g(shape = {grid})\n"
        f"func.func @f(%in: tensor<{before}>) -> tensor<{after}> {{\n{body}\n}}"
    )


def one(operation: str, before: str, after: str, grid: str = "2x2") -> ShardModule:
    """A module of one operation on each process's own tensor, whose whole is as large."""
    return parse_shard_module(
        module_of(
            "%s = shard.sharding @g split_axes = [[]] : !shard.sharding\n"
            f"%all = shard.shard %in to %s : tensor<{before}>\n"
            f"%x = builtin.unrealized_conversion_cast %all : tensor<{before}> to tensor<{before}>\n"
            f"%y = {operation} : tensor<{before}> -> tensor<{after}>\n"
            f"%back = builtin.unrealized_conversion_cast %y : tensor<{after}> to tensor<{after}>\n"
            f"%out = shard.shard %back to %s : tensor<{after}>\n"
            f"return %out : tensor<{after}>",
            grid,
            before,
            after,
        )
    )


def ran(module: ShardModule, *values: list[object]) -> list[object]:
    found = run_shard_module(module, {n: np.array(value) for n, value in enumerate(values)})
    return [found[process].tolist() for process in range(len(values))]


def test_what_each_collective_does() -> None:
    """On a 2x2 grid, processes 0 1 / 2 3."""
    gather = "shard.all_gather %x on @g grid_axes = [{}] gather_axis = 0"
    row = [[1], [2], [3], [4]]
    assert ran(one(gather.format("1"), "1xi64", "2xi64"), *row) == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert ran(one(gather.format("0"), "1xi64", "2xi64"), *row) == [[1, 3], [2, 4], [1, 3], [2, 4]]
    # The order of a group is that of its axes, outer to inner.
    assert ran(one(gather.format("1, 0"), "1xi64", "4xi64"), *row) == [[1, 3, 2, 4]] * 4
    text = "shard.all_slice %x on @g grid_axes = [0] slice_axis = 0"
    pairs = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert ran(one(text, "2xi64", "1xi64"), *pairs) == [[1], [3], [6], [8]]
    text = "shard.reduce_scatter %x on @g grid_axes = [1] reduction = max scatter_axis = 0"
    assert ran(one(text, "2xi64", "1xi64"), *pairs) == [[3], [4], [7], [8]]
    text = "shard.all_reduce %x on @g grid_axes = [0]"
    assert ran(one(text, "2xi64", "2xi64"), *pairs) == [[6, 8], [10, 12], [6, 8], [10, 12]]
    # The picture of the dialect's own page: rows of three processes, split and put together.
    text = "shard.all_to_all %x on @g grid_axes = [0] split_axis = 0 concat_axis = 0"
    rows = [[[10 * n + 1, 10 * n + 2], [10 * n + 3, 10 * n + 4], [10 * n + 5, 10 * n + 6]]
            for n in (1, 2, 3)]  # fmt: skip
    assert ran(one(text, "3x2xi64", "3x2xi64", "3"), *rows) == [
        [[11, 12], [21, 22], [31, 32]],
        [[13, 14], [23, 24], [33, 34]],
        [[15, 16], [25, 26], [35, 36]],
    ]


def test_other_spellings_are_read() -> None:
    """Without `module`, by other names, over several lines, with comments and `<max>`."""
    text = one("shard.all_reduce %x on @g grid_axes = [1] reduction = <max>", "2xi64", "2xi64")
    assert "reduction = max " in str(text)
    assert parse_shard_module(str(text)) == text
    wrapped = str(text).replace(" grid_axes", "\n      // groups of two\n      grid_axes")
    assert parse_shard_module(wrapped) == text
    assert parse_shard_module(wrapped.replace(" : tensor", "\n : tensor")) == text


OWN = """%s = shard.sharding @g split_axes = [[0]] : !shard.sharding
%all = shard.shard %in to %s : tensor<8xi64>
%x = builtin.unrealized_conversion_cast %all : tensor<8xi64> to tensor<4xi64>
"""
TYPES = ": tensor<4xi64> -> tensor<{}xi64>"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"%y = shard.all_gather %x on @g grid_axes = [1] gather_axis = 0 {TYPES.format(4)}",
         "its result is a tensor<8xi64>, not a tensor<4xi64>"),
        (f"%y = shard.all_slice %x on @g grid_axes = [1] slice_axis = 0 {TYPES.format(4)}",
         "its result is a tensor<2xi64>, not a tensor<4xi64>"),
        (f"%y = shard.all_gather %x on @g grid_axes = [2] gather_axis = 0 {TYPES.format(8)}",
         "axis 2 of @g, whose axes are 0 to 1"),
        (f"%y = shard.all_gather %x on @g grid_axes = [1, 1] gather_axis = 0 {TYPES.format(16)}",
         r"an axis occurs twice in grid_axes \[1, 1\]"),
        (f"%y = shard.all_gather %x on @h grid_axes = [1] gather_axis = 0 {TYPES.format(8)}",
         "there is no grid @h; the module has @g"),
        (f"%y = shard.all_gather %x on @g grid_axes = [1] gather_axis = 1 {TYPES.format(8)}",
         r"gather_axis = 1 of a tensor<4xi64>; its axes are 0 to 0"),
        (f"%y = shard.all_gather %z on @g grid_axes = [1] gather_axis = 0 {TYPES.format(8)}",
         "%z is no value here"),
        (f"%y = shard.all_gather %s on @g grid_axes = [1] gather_axis = 0 {TYPES.format(8)}",
         "%s is of type sharding; a tensor was expected"),
        (f"%y = shard.all_gather %all on @g grid_axes = [1] gather_axis = 0 {TYPES.format(8)}",
         "%all is a tensor<8xi64>, not a tensor<4xi64>"),
        ("%y = shard.all_slice %all on @g grid_axes = [1] slice_axis = 0 "
         ": tensor<8xi64> -> tensor<4xi64>", "%all is a global tensor"),
        ("%y = shard.all_gather %x on @g grid_axes = [1] gather_axis = 0 "
         ": tensor<4xi64> -> tensor<8xi32>", "its result is a tensor<8xi64>, not a tensor<8xi32>"),
        (f"%y = shard.all_reduce %x on @g grid_axes = [1] reduction = median {TYPES.format(4)}",
         "the reduction 'median'; it is one of sum, max"),
        (f"%x = shard.all_reduce %x on @g grid_axes = [1] {TYPES.format(4)}",
         "%x is a value already"),
        (f"%y = shard.shift %x on @g grid_axes = [1] shift_axis = 1 offset = 1 {TYPES.format(4)}",
         "no operation 'shard.shift' in programs; they have shard.all_gather"),
        (f"%y = shard.all_gather %x at @g grid_axes = [1] gather_axis = 0 {TYPES.format(8)}",
         "expected `on`"),
        ("%y = shard.all_gather %x on @g grid_axes = [1] gather_axis = 0 "
         ": tensor<4xi64> -> tensor<?xi64>", "with every size known"),
        ("%y = builtin.unrealized_conversion_cast %in : tensor<8xi64> to tensor<4xi64>",
         "%in has no sharding"),
        ("%y = builtin.unrealized_conversion_cast %all : tensor<8xi64> to tensor<2xi64>",
         r"a process has a tensor<4xi64> of a tensor<8xi64> that is sharded \[\[0\]\]"),
        ("%y = shard.shard %x to %s : tensor<4xi64>", "%x is a process's own tensor"),
        ("%y = shard.shard %all to %s : tensor<8xi64>", "%all has a sharding already"),
        ("%y = shard.sharding @g split_axes = [[0], [0]] : !shard.sharding", "axis0"),
        ("%y = shard.sharding @g split_axes = [[2]] : !shard.sharding", "axis 2 of @g"),
        ("%y = tensor.extract_slice %x[2][4][1] : tensor<4xi64> to tensor<4xi64>",
         r"the box at \[2\] of sizes \[4\] is not inside a tensor<4xi64>"),
        ("%y = tensor.extract_slice %x[0][2][1] : tensor<4xi64> to tensor<3xi64>",
         r"a box of sizes \[2\] of a tensor<4xi64> is not a tensor<3xi64>"),
        ("%y = tensor.extract_slice %x[0][2][2] : tensor<4xi64> to tensor<2xi64>",
         r"steps \[2\] of a slice; they are 1 each"),
        ("%y = tensor.extract_slice %x[0, 0][2][1] : tensor<4xi64> to tensor<2xi64>",
         "2 offsets and 1 sizes"),
        ("%y = tensor.insert_slice %x into %all[0][4][1] : tensor<4xi64> into tensor<8xi64>",
         "%all is a global tensor"),
        ("%y = arith.constant dense<[0, 1]> : tensor<3xindex>", "2 numbers in a table of 3"),
        ("%y = arith.constant dense<[0, 1]> : tensor<2xi64>", "a table of tensor<2xi64>"),
        ("%y = tensor.extract %x[%x] : tensor<4xindex>", "%x is of type tensor; a index"),
        ("%p = shard.process_linear_index on @g : index\n%y = shard.send %x on @g "
         "grid_axes = [0, 1] destination = [%p] : (tensor<4xi64>, index) -> tensor<4xi64>",
         r"1 numbers for a process among the axes \[0, 1\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_line_and_reason(line: str, said: str) -> None:
    end = "\nreturn %all : tensor<8xi64>"
    parse_shard_module(module_of(OWN + end.strip()))
    number = 6 + line.count("\n")
    with pytest.raises(NotationError, match=f"^line {number}: .*{said}"):
        parse_shard_module(module_of(OWN + line + end))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (module_of(OWN + "return %x : tensor<4xi64>"), "line 6: a tensor<4xi64> is returned by"),
        (
            module_of(
                OWN
                + "%b = builtin.unrealized_conversion_cast %x : tensor<4xi64> to tensor<8xi64>\n"
                "%t = shard.sharding @g split_axes = [[0, 1]] : !shard.sharding\n"
                "%out = shard.shard %b to %t : tensor<8xi64>\nreturn %out : tensor<8xi64>"
            ),
            r"line 8: a process has a tensor<2xi64> of a tensor<8xi64> that is sharded \[\[0, 1",
        ),
        (module_of(OWN + "return %in : tensor<8xi64>"), "line 6: %in is returned without a shardi"),
        (module_of(OWN + "return %all : tensor<8xi64>") + "\nend", "expected nothing more"),
        (module_of(OWN + "return %all : tensor<8xi64>", "?"), "line 1: .* each of them known"),
        ("shard.grid @g(shape = 2)\n" + module_of(OWN), "line 2: two grids are called @g"),
        ("shard.grid @h(shape = 2)\n" + module_of(OWN), r"grids of \[2, 4\] processes"),
        ("func.func @f(%a: tensor<2xf32>) -> tensor<2xf32> {}", r"grids of \[\] processes"),
        ("", "line 1: .*expected `func.func`"),
    ],
)
def test_wrong_ends_and_grids(text: str, said: str) -> None:
    with pytest.raises(NotationError, match=said):
        parse_shard_module(text)


def test_any_other_size_is_found_out() -> None:
    """Every size of every type of a module that has all operations, one more than it is."""
    program = find_program(reshard.spec(GRID, "a b, -"), reshard.spec(GRID, "b, a"), (7, 5),
                           steps="mlir")  # fmt: skip
    text = mlir_module(program, "int64")
    words = set(re.findall(r"= (\w+\.\w+)", text))
    assert {"shard.recv", "shard.all_gather", "shard.all_slice", "tensor.insert_slice"} <= words
    parse_shard_module(text)
    for found in re.finditer(r"(?<=[<x])\d+(?=x\w)", text):
        changed = f"{text[: found.start()]}{int(found[0]) + 1}{text[found.end() :]}"
        with pytest.raises(NotationError, match=r"^line \d+: "):
            parse_shard_module(changed)


def test_arrays_that_do_not_fit() -> None:
    program = find_program(reshard.spec(GRID, "a, b"), reshard.spec(GRID, "-, b"), (4, 6))
    module = parse_shard_module(mlir_module(program, "int64"))
    held = {process: np.zeros((2, 2), np.int64) for process in range(6)}
    assert run_shard_module(module, held)[0].shape == (4, 2)
    with pytest.raises(ShardError, match="no array for process 5; the grid has 6"):
        run_shard_module(module, {n: held[n] for n in range(5)})
    with pytest.raises(ShardError, match=r"process 1 has shape \[3, 2\]; .* is \[2, 2\]"):
        run_shard_module(module, {**held, 1: np.zeros((3, 2), np.int64)})
    with pytest.raises(ShardError, match="process 2 is of float32; the module is for i64"):
        run_shard_module(module, {**held, 2: np.zeros((2, 2), np.float32)})


@pytest.mark.parametrize(
    ("table", "number", "said"),
    [
        (0, "[0, 1, 0, 0, 0, 1]", "both send to"),
        (0, "[0, 1, 0, 9, 0, 1]", "process 3 names process 9 along axis 0 of 2"),
        (2, "[0, 0, 0, 1, 1, 1]", "waits for process"),
    ],
)
def test_messages_that_do_not_meet(table: int, number: str, said: str) -> None:
    program = find_program(reshard.spec(GRID, "a b"), reshard.spec(GRID, "b a"), (6,))
    text = mlir_module(program, "int64")
    found = list(re.finditer(r"(?<=dense<)\[.*?\]", text))[table]
    module = parse_shard_module(text[: found.start()] + number + text[found.end() :])
    with pytest.raises(ShardError, match=said):
        run_shard_module(module, {n: np.array([n]) for n in range(6)})


def test_padding_taken_for_elements_gives_itself_away() -> None:
    text = module_of(
        "%s = shard.sharding @g split_axes = [[0]] : !shard.sharding\n"
        "%all = shard.shard %in to %s : tensor<3xi64>\n"
        "%x = builtin.unrealized_conversion_cast %all : tensor<3xi64> to tensor<2xi64>\n"
        "%y = shard.all_gather %x on @g grid_axes = [0] gather_axis = 0 "
        ": tensor<2xi64> -> tensor<4xi64>\n"
        "%z = tensor.extract_slice %y[1][3][1] : tensor<4xi64> to tensor<3xi64>\n"
        "%b = builtin.unrealized_conversion_cast %z : tensor<3xi64> to tensor<3xi64>\n"
        "%t = shard.sharding @g split_axes = [] : !shard.sharding\n"
        "%out = shard.shard %b to %t : tensor<3xi64>\nreturn %out : tensor<3xi64>",
        "2",
        "3xi64",
        "3xi64",
    )
    wrong = parse_shard_module(text)
    right = parse_shard_module(text.replace("%y[1]", "%y[0]"))
    held = {0: np.array([1, 2]), 1: np.array([3])}
    assert run_shard_module(right, held)[1].tolist() == [1, 2, 3]
    assert run_shard_module(wrong, held)[1].tolist() == [2, 3, np.iinfo(np.int64).max]
