"""Programs in MLIR's `shard` dialect: by hand, and parsed, type-checked and run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from collectives.program_checks import contributions, whole
from collectives.sharding_pairs import Pair, pairs
from conformance.checked_movement import same
from conformance.test_same_mesh_reshards import CASES, Case, name, side
from oracle import contents_of_spec, shards_of
from reshard.collectives import Program, find_program
from reshard.collectives.lowering import mlir_module
from reshard.errors import NotationError, PlanError
from reshard.mesh import DeviceMesh
from reshard.testing import parse_shard_module, run_shard_module
from selection import choose, keep_spread

MESH = DeviceMesh.of(x=2, y=4, w=1)


def make_program(
    source: str,
    target: str,
    shape: tuple[int, ...],
    mesh: DeviceMesh = MESH,
    steps: str = "classical",
) -> Program:
    sides = reshard.spec(mesh, source), reshard.spec(mesh, target)
    return find_program(*sides, shape, steps=steps)


def check(program: Program) -> None:
    """The text is read back as it is, and does on arrays what the program does."""
    dtype = "float64" if program.source.reduction == "mean" else "int64"
    text = mlir_module(program, dtype)
    module = parse_shard_module(text)
    assert str(module) == text
    dense = contributions(program.source, program.shape)
    held = shards_of(contents_of_spec(program.source, program.shape), dense)
    before = {rank: array.copy() for rank, array in held.items()}
    found, wanted = run_shard_module(module, held), program.run(held)
    if program.target.partial_axes:
        found, wanted = whole(program, found), whole(program, wanted)
    assert same(found, wanted), text
    assert same(held, before)


def operations(module: str) -> list[str]:
    """The collectives and what is done around them, without values and types."""
    found = re.findall(r"= (\w+\.\w+) ?(?:%\w+ )?(.*) : ", module)
    ends = {"shard.sharding", "shard.shard", "builtin.unrealized_conversion_cast"}
    return [
        f"{word} {re.sub('@mesh |%[0-9]+ ?', '', rest)}".strip()
        for word, rest in found
        if word not in ends
    ]


@pytest.mark.parametrize(
    ("source", "target", "shape", "expected"),
    [
        ("x, -", "x y, -", (16, 16), ["shard.all_slice on grid_axes = [1] slice_axis = 0"]),
        ("x y, -", "-, -", (16, 16), ["shard.all_gather on grid_axes = [0, 1] gather_axis = 0"]),
        (
            "x y, -",
            "x, y",
            (16, 16),
            ["shard.all_to_all on grid_axes = [1] split_axis = 1 concat_axis = 0"],
        ),
        (
            "x, - | sum(y)",
            "x y, -",
            (16, 16),
            ["shard.reduce_scatter on grid_axes = [1] reduction = sum scatter_axis = 0"],
        ),
        (
            "x, - | mean(y)",
            "x, -",
            (16, 16),
            ["shard.all_reduce on grid_axes = [1] reduction = average"],
        ),
        ("w, -", "w, -", (16, 16), []),
        # Ten in four parts are three each: two of twelve are padding.
        (
            "-",
            "y",
            (10,),
            [
                "tensor.empty ()",
                "tensor.insert_slice into [0][10][1]",
                "shard.all_slice on grid_axes = [1] slice_axis = 0",
            ],
        ),
        (
            "y, -",
            "-, y",
            (10, 6),
            [
                "tensor.empty ()",
                "tensor.insert_slice into [0, 0][3, 6][1, 1]",
                "shard.all_to_all on grid_axes = [1] split_axis = 1 concat_axis = 0",
                "tensor.extract_slice [0, 0][10, 2][1, 1]",
            ],
        ),
        # A part of an axis is an axis of the grid: 2x4x1 becomes 2x2x2x1.
        (
            "x y, -",
            "x y:(1)2, -",
            (16, 16),
            ["shard.all_gather on grid_axes = [2] gather_axis = 0"],
        ),
    ],
)
def test_steps_are_lowered_to_the_expected_operations(
    source: str, target: str, shape: tuple[int, ...], expected: list[str]
) -> None:
    program = make_program(source, target, shape)
    assert operations(mlir_module(program)) == expected
    check(program)


def test_a_whole_module_is_written_as_expected() -> None:
    """The seed's all-to-all on a mesh of 3 devices."""
    program = make_program("x, -", "-, x", (6, 6), DeviceMesh.of(x=3))
    assert mlir_module(program, "int8") == (
        "module {\n"
        "  shard.grid @mesh(shape = 3)\n"
        "  func.func @reshard(%0: tensor<6x6xi8>) -> tensor<6x6xi8> {\n"
        "    %1 = shard.sharding @mesh split_axes = [[0], []] : !shard.sharding\n"
        "    %2 = shard.shard %0 to %1 : tensor<6x6xi8>\n"
        "    %3 = builtin.unrealized_conversion_cast %2 : tensor<6x6xi8> to tensor<2x6xi8>\n"
        "    %4 = shard.all_to_all %3 on @mesh grid_axes = [0] split_axis = 1 concat_axis = 0 "
        ": tensor<2x6xi8> -> tensor<6x2xi8>\n"
        "    %5 = builtin.unrealized_conversion_cast %4 : tensor<6x2xi8> to tensor<6x6xi8>\n"
        "    %6 = shard.sharding @mesh split_axes = [[], [0]] : !shard.sharding\n"
        "    %7 = shard.shard %5 to %6 : tensor<6x6xi8>\n"
        "    return %7 : tensor<6x6xi8>\n"
        "  }\n"
        "}"
    )


def test_a_permute_is_messages_by_tables() -> None:
    """`[[0, 1]] -> [[1, 0]]` over 2x3: whole shards change places."""
    program = make_program("a b", "b a", (6,), DeviceMesh.of(a=2, b=3))
    text = mlir_module(program)
    tables = [[int(n) for n in found.split(",")] for found in re.findall(r"dense<\[(.*?)\]", text)]
    # Row i of 6 is on process i before, and on (i % 2) * 3 + i // 2 after.
    goes_to = [(row % 2) * 3 + row // 2 for row in range(6)]
    sent = [3 * a + b for a, b in zip(tables[0], tables[1], strict=True)]
    received = [3 * a + b for a, b in zip(tables[2], tables[3], strict=True)]
    assert sent == goes_to
    assert [received[process] for process in goes_to] == list(range(6))
    check(program)
    # Along axes where nothing changes no process is named.
    mesh = DeviceMesh.of(a=2, b=2, c=2)
    text = mlir_module(make_program("a, b c", "a, c b", (4, 4), mesh))
    assert re.findall(r"grid_axes = (\[.*?\])", text) == ["[1, 2]", "[1, 2]"]


@pytest.mark.parametrize(
    ("mesh", "shape", "source", "target"),
    [
        ((2, 3), (6,), "a b", "b a"),
        ((2, 3), (6,), "a b", "b"),
        ((2, 3), (2, 6), "-, a b", "-, a"),
        ((2, 2, 2), (4, 8), "a, b c", "a, c"),
        ((2, 3), (6, 6), "a, b", "b, a"),
        ((2, 6), (6, 6), "a, b", "b, a"),
        ((3, 4), (16, 23), "a, b", "b, a"),
        ((5, 2), (27, 14), "a, b", "b, a"),
        ((3,), (6, 6), "a, -", "-, a"),
        ((2, 2, 2), (4, 4), "a, b c", "a b, c"),
        ((2, 2, 2, 2), (4, 4, 4), "d c, -, a b", "a, b c, -"),
        ((2, 3), (6,), "-", "b"),
    ],
)
def test_the_decompositions_of_the_notes(
    mesh: tuple[int, ...], shape: tuple[int, ...], source: str, target: str
) -> None:
    devices = DeviceMesh.of(**dict(zip("abcd", mesh, strict=False)))
    check(make_program(source, target, shape, devices, steps="mlir"))


@pytest.mark.parametrize("case", keep_spread(15, CASES, "another of the measured cases"), ids=name)
def test_the_measured_cases(case: Case) -> None:
    source, target = side(case["source"]), side(case["target"])
    said = 0
    for steps in ("joint", "classical", "mlir"):
        try:
            program = find_program(source, target, tuple(case["shape"]), steps=steps)
            mlir_module(program)
        except PlanError:
            continue
        except NotationError as error:
            refusal = str(error)
        else:
            refusal = None
            check(program)
            said += 1
        assert refusal is None or re.search(r"--steps|changes the order|in row-major", refusal)
    # One of the three can be said wherever the devices are in their order.
    assert said or case["source"]["device_ids"] or case["target"]["device_ids"]


@settings(max_examples=choose(36, 120), deadline=None)
@given(pairs(max_devices=16), st.sampled_from(["joint", "classical", "mlir"]))
def test_any_program_runs_or_is_refused(pair: Pair, steps: str) -> None:
    source, target, shape = pair
    try:
        program = find_program(source, target, shape, steps=steps)
        mlir_module(program)
    except PlanError:
        return
    except NotationError as error:
        refusal = str(error)
    else:
        refusal = None
        check(program)
    assert refusal is None or re.search(
        r"--steps|changes the order|numbered in row-major|does not shard|do not divide one another"
        r"|without axes|do not continue",
        refusal,
    )


@pytest.mark.parametrize("shape", [(), (1,), (7,)])
@pytest.mark.parametrize("reduction", ["sum", "max", "min", "product", "mean"])
def test_every_reduction_is_lowered(shape: tuple[int, ...], reduction: str) -> None:
    dims = ", ".join("-" for _ in shape)
    for target in [dims, f"{dims} | {reduction}(y)", "x y" if shape else ""]:
        check(make_program(f"{dims} | {reduction}(x y)", target, shape, steps="joint"))


def test_two_meshes_of_the_same_devices_are_two_grids() -> None:
    source = reshard.spec(DeviceMesh.of(x=2, y=3), "y, x")
    target = reshard.spec(DeviceMesh.of(x=3, y=2), "x, y")
    program = find_program(source, target, (6, 4))
    assert "shard.grid @mesh_target(shape = 3x2)" in mlir_module(program)
    check(program)


def test_steps_without_an_mlir_operation_raise() -> None:
    joint = make_program("x, y", "y, x", (8, 8), steps="joint")
    with pytest.raises(NotationError, match=r"step 1, joint all-to-all\(x y\), .* --steps class"):
        mlir_module(joint)
    nested = make_program("x / y", "x", (10,))
    with pytest.raises(NotationError, match="the source cannot be expressed in MLIR: `x / y` does"):
        mlir_module(nested)
    check(make_program("x / y", "x", (16,)))
    strided = make_program("x@stride2", "x@stride2", (8,), steps="joint")
    with pytest.raises(NotationError, match="`x@stride2` does not shard"):
        mlir_module(strided)
    turned = DeviceMesh.of(x=2, y=4, w=1, devices=range(7, -1, -1))
    with pytest.raises(NotationError, match="numbered in row-major order"):
        mlir_module(make_program("x", "-", (8,), turned))
    with pytest.raises(NotationError, match="has no elements to move"):
        mlir_module(make_program("x", "-", (0,)))
    with pytest.raises(NotationError, match="no element type for 'complex32'"):
        mlir_module(make_program("x", "-", (4,)), "complex32")
    lone = DeviceMesh.of()
    with pytest.raises(NotationError, match="without axes"):
        mlir_module(make_program("-", "-", (4,), lone))
    thirds = DeviceMesh.of(x=8)
    with pytest.raises(NotationError, match="changes the order"):
        mlir_module(make_program("x:(1)2 x:(2)4, -", "x:(1)2, x:(4)2 x:(2)2", (16, 16), thirds))
