"""Programs as operations of Shardy: by hand, and through its parser and verifier."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings

import reshard
from collectives.sharding_pairs import Pair, pairs
from conformance.test_same_mesh_reshards import CASES, Case, name, side
from reshard.collectives import JointAllToAll, Program, find_program
from reshard.collectives.lowering import shardy_module
from reshard.errors import NotationError, PlanError
from reshard.mesh import DeviceMesh
from reshard.notation.shardy import parse_shardy
from selection import choose, keep_spread

MESH = DeviceMesh.of(x=2, y=4, w=1)


@pytest.fixture(scope="module")
def shardy_prints() -> Callable[[str], str]:
    """A module through Shardy's own parser, verifier and printer."""
    pytest.importorskip("jaxlib.mlir.dialects.sdy")
    mlir = pytest.importorskip("jax._src.interpreters.mlir")
    from jaxlib.mlir import ir

    def prints(module: str) -> str:
        with mlir.make_ir_context(), ir.Location.unknown():
            parsed = ir.Module.parse(module)
            assert parsed.operation.verify()
            return str(parsed)

    return prints


def make_program(source: str, target: str, shape: tuple[int, ...], mesh: DeviceMesh) -> Program:
    sides = reshard.spec(mesh, source), reshard.spec(mesh, target)
    return find_program(*sides, shape, steps="classical")


def operations(module: str) -> list[str]:
    """The operations, without the sharding each leads to."""
    return re.findall(r"sdy\.(\w+(?: .+?)?) %\w+ out_sharding", module)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("x, -", "x y, -", ['all_slice [{"y"}, {}]']),
        ("-, -", "x y:(1)2, y:(2)2", ['all_slice [{"x", "y":(1)2}, {"y":(2)2}]']),
        ("x y, -", "x, -", ['all_gather [{"y"}, {}]']),
        ("x y, -", "x y:(1)2, -", ['all_gather [{"y":(2)2}, {}]']),
        ("x y, -", "x, y", ['all_to_all [{"y"}: 0->1]']),
        ("x, y:(1)2", "y:(1)2, x", ["collective_permute"]),
        ("x, - | sum(y)", "x y, -", ['reduce_scatter [{"y"}, {}]']),
        ("x, - | sum(y)", "x, -", ['all_reduce {"y"}']),
        ("x, -", "x, -", []),
        ("w, -", "x, w", ['all_slice [{"x"}, {}]']),
    ],
)
def test_steps_are_lowered_to_operations_that_shardy_prints(
    shardy_prints: Callable[[str], str], source: str, target: str, expected: list[str]
) -> None:
    sides = reshard.spec(MESH, source), reshard.spec(MESH, target)
    module = shardy_module(find_program(*sides, (16, 16)))
    assert operations(module) == expected
    printed = shardy_prints(module)
    assert all(operation in printed for operation in expected)


def test_a_whole_module_by_hand() -> None:
    program = make_program("x, -", "-, x", (8, 6), DeviceMesh.of(x=2))
    assert shardy_module(program, "bfloat16", "rows_to_columns") == (
        "module {\n"
        '  sdy.mesh @mesh = <["x"=2]>\n'
        "  func.func @rows_to_columns("
        '%0: tensor<8x6xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})\n'
        '      -> (tensor<8x6xbf16> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"x"}]>}) {\n'
        '    %1 = sdy.all_to_all [{"x"}: 0->1] %0 '
        'out_sharding=<@mesh, [{}, {"x"}]> : tensor<8x6xbf16>\n'
        "    return %1 : tensor<8x6xbf16>\n"
        "  }\n"
        "}"
    )


@pytest.mark.parametrize("element", ["bool", "uint8", "int64", "float8_e4m3fn", "float8_e5m2fnuz"])
def test_elements_of_several_dtypes(shardy_prints: Callable[[str], str], element: str) -> None:
    program = make_program("x", "-", (4,), MESH)
    assert "sdy.all_gather" in shardy_prints(shardy_module(program, element))


def test_steps_without_a_shardy_operation_raise() -> None:
    joint = find_program(reshard.spec(MESH, "x, y"), reshard.spec(MESH, "y, x"), (8, 8))
    assert any(isinstance(step, JointAllToAll) for step in joint.steps)
    with pytest.raises(NotationError, match=r"step 1, joint all-to-all\(x y\), .* classical"):
        shardy_module(joint)
    with pytest.raises(NotationError, match=r"cannot express `max\(x\)` of .* only sum"):
        shardy_module(make_program("- | max(x)", "-", (8,), MESH))
    with pytest.raises(NotationError, match=r"cannot express `x / y`"):
        shardy_module(make_program("x / y", "x", (10,), MESH))
    strided = find_program(reshard.spec(MESH, "x@stride2"), reshard.spec(MESH, "x"), (8,))
    with pytest.raises(NotationError, match="cannot express `x@stride2`"):
        shardy_module(strided)
    with pytest.raises(NotationError, match="no element type for 'complex32'"):
        shardy_module(make_program("x", "-", (4,), MESH), "complex32")


def test_another_order_of_the_devices_is_a_mesh_of_its_own(
    shardy_prints: Callable[[str], str],
) -> None:
    turned = DeviceMesh.of(x=2, y=4, w=1, devices=range(7, -1, -1))
    program = find_program(reshard.spec(MESH, "x, y"), reshard.spec(turned, "x, y"), (8, 8))
    module = shardy_module(program)
    assert operations(module) == ["collective_permute"]
    assert "@mesh_target = " in shardy_prints(module)


def checked(module: str, source: reshard.ShardingSpec, target: reshard.ShardingSpec) -> None:
    """The ends of a module are the layouts of both sides, whatever meshes they are said over."""
    meshes = "\n".join(re.findall(r"sdy\.mesh @.*", module))
    texts = re.findall(r"#sdy\.sharding<.*?>(?=}\))", module)
    assert len(texts) == 2
    for text, spec in zip(texts, (source, target), strict=True):
        shape = (24,) * spec.ndim
        assert parse_shardy(f"{meshes}\n{text}", None, shape).layout(shape) is spec.layout(shape)


@pytest.mark.parametrize("case", keep_spread(15, CASES, "another of the measured cases"), ids=name)
def test_the_measured_cases_are_verified(shardy_prints: Callable[[str], str], case: Case) -> None:
    source, target = side(case["source"]), side(case["target"])
    try:
        program = find_program(source, target, tuple(case["shape"]), steps="classical")
    except PlanError:
        assert case["optimum_classical_legal_elements"] is None
        return
    try:
        module = shardy_module(program)
    except NotationError as error:
        refusal = str(error)
    else:
        refusal = None
        assert len(operations(shardy_prints(module))) == len(program.steps)
        checked(module, source, target)
    assert refusal is None or re.search(r"changes the order|different axes|only a perm", refusal)


@settings(max_examples=choose(15, 30))
@given(pairs())
def test_any_program_is_verified_or_refused(
    shardy_prints: Callable[[str], str], pair: Pair
) -> None:
    source, target, shape = pair
    program = find_program(source, target, shape)
    try:
        module = shardy_module(program)
    except NotationError as error:
        refusal = str(error)
    else:
        refusal = None
        assert len(operations(shardy_prints(module))) == len(program.steps)
        checked(module, source, target)
    assert refusal is None or ("cannot" in refusal and "do not continue" not in refusal)
