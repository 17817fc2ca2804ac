"""Programs and questions of nabla's document on sharding, by the names that it has them under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import spec
from reshard.errors import MeshError, ReshardError, SpecError, UsageError
from reshard.spmd import nabla
from reshard.spmd.nabla import (
    AGGRESSIVE,
    BASIC,
    DeviceMesh,
    DimSpec,
    PropagationStrategy,
    ShardingSpec,
    Tensor,
    broadcast_with_shapes_template,
    elementwise_template,
    get_mesh_from_args,
    has_sharded_inputs,
    infer_output_sharding,
    matmul_template,
    propagate_sharding,
    reduce_template,
    reshard_tensor,
    slice_for_shard,
    transpose_template,
)

MESH = DeviceMesh("cluster", (2, 4), ("dp", "tp"))
DATA = np.arange(28.0).reshape(7, 4)


def test_its_user_api() -> None:
    """The program under "User API", with a `W`."""
    mesh = DeviceMesh("test", (2,), ("x",))
    A = Tensor.ones((4, 8)).trace()  # noqa: N806
    W = Tensor.full((8, 3), 0.5)  # noqa: N806

    # Functional: returns new sharded tensor
    A_sharded = A.shard(mesh, [DimSpec(["x"]), DimSpec([])])  # noqa: N806

    # Explicit resharding constraint
    B = (A_sharded @ W).with_sharding(mesh, [DimSpec([]), DimSpec([])])  # noqa: N806
    assert A.spec is None and str(A_sharded.spec) == "x, -" and str(B.spec) == "-, -"
    np.testing.assert_array_equal(np.asarray(B), np.full((4, 3), 4.0))


def test_its_tensors() -> None:
    made = [Tensor.zeros((2, 3)), Tensor.ones((2, 3)), Tensor.full((2, 3), 7), Tensor.arange(3)]
    assert [one.dtype.name for one in made] == ["float32"] * 4
    assert [float(sp.sum(one)) for one in made] == [0.0, 6.0, 42.0, 3.0]
    assert Tensor([[1, 2]]).shape == (1, 2) and Tensor.zeros(3, "int8").dtype.name == "int8"
    assert isinstance(made[0], Tensor) and isinstance(made[0], sp.ShardedArray)
    assert not isinstance(DATA, Tensor) and sp.Tensor is Tensor
    np.testing.assert_array_equal(np.asarray(Tensor.from_dlpack(DATA)), DATA)


def test_its_specs() -> None:
    """A mesh of 8 devices; parts of a spec and of a dimension."""
    assert MESH.size == 8 and MESH.shape == (2, 4) and MESH.axis_names == ("dp", "tp")
    dim = DimSpec(["dp", "tp"], is_open=True, priority=1)
    sharding = ShardingSpec(MESH, [dim, DimSpec([])], replicated_axes=[])
    assert [str(axis) for axis in sharding.dim_specs[0].axes] == ["dp", "tp"]
    assert sharding.dim_specs[0].is_open and sharding.dim_specs[0].priority == 1
    assert sharding.replicated_axes == ()


def test_its_templates() -> None:
    """The factors of each template that is named."""
    assert str(matmul_template(0).rule((4, 8), (8, 2))).startswith("([i, k], [k, j]) -> ([i, j])")
    assert str(elementwise_template(2).rule((4, 8), (4, 8))).startswith("([i, j], [i, j]) ->")
    assert reduce_template(2, (1,)).rule((4, 8)).reduction == (1,)
    assert transpose_template(2, (1, 0)).rule((4, 8)).result_shapes == ((8, 4),)
    assert broadcast_with_shapes_template((1, 8), (4, 8)).rule((1, 8)).result_shapes == ((4, 8),)


@pytest.mark.parametrize(("strategy", "expected"), [(BASIC, "dp ?"), (AGGRESSIVE, "dp tp ?")])
def test_its_strategies(strategy: str, expected: str) -> None:
    """BASIC takes the longest common prefix, AGGRESSIVE more parallelism."""
    rule = sp.rule_of("add", [(8,), (8,)])
    operands = [spec(MESH, "dp tp"), spec(MESH, "dp")]
    found = sp.propagate(rule, operands, [spec(MESH, "?")], strategy=strategy)[1][0]
    assert str(found) == expected
    assert propagate_sharding(rule, operands, [None], strategy)[1][0] is not None
    graph = sp.Graph.of([(8,), (8,)], [("add", [0, 1], rule)], [2])
    assert sp.propagate_graph(graph, {0: operands[0]}, strategy=strategy).values[2]


def test_its_conflicts() -> None:
    """AGGRESSIVE picks more parallelism; a stronger user priority wins first, unlike in Shardy."""
    mesh = DeviceMesh.of(a=2, b=4)
    rule = elementwise_template(1).rule((8,), (8,))

    def result(first: str, second: str, strategy: PropagationStrategy) -> str:
        operands = [spec(mesh, first), spec(mesh, second)]
        return str(propagate_sharding(rule, operands, [None], strategy)[1][0])

    assert result("a ?", "b ?", AGGRESSIVE) == "b ?"
    assert result("a ?", "b ?", BASIC) == "None"
    for strategy in (BASIC, AGGRESSIVE):
        assert result("a ?", "b ?!1", strategy) == "a ?"
        assert result("a ?!2", "b ?!1", strategy) == "b ?"
    assert result("a ?", "b ?!1", PropagationStrategy.SHARDY_BASIC) == "None"
    assert result("a ?", "-", BASIC) == "None", "closed at the same priority"


def test_its_priorities_up_to_a_limit() -> None:
    rule = elementwise_template(1).rule((8,), (8,))
    operands = [spec(MESH, "dp ?!1"), None]
    inputs, outputs = propagate_sharding(rule, operands, [None], BASIC, max_priority=0)
    assert [*map(str, inputs)] == ["dp ?!1", "None"] and outputs == (None,)
    outputs = propagate_sharding(rule, operands, [None], BASIC, max_priority=1)[1]
    assert str(outputs[0]) == "dp ?"


@pytest.mark.parametrize("text", ["dp tp, -", "-, dp tp", "tp, dp"])
def test_an_empty_part_keeps_the_other_lengths(text: str) -> None:
    sharding = spec(MESH, text)
    parts = [slice_for_shard(DATA[:3, :3], (3, 3), sharding, index) for index in range(8)]
    axis = 1 if text.startswith("-") else 0
    assert any(part.size == 0 for part in parts)
    if "-" in text:
        np.testing.assert_array_equal(np.concatenate(parts, axis=axis), DATA[:3, :3])
    else:
        assert [part.shape for part in parts] == [(1, 2)] * 3 + [(0, 2)] + [(1, 1)] * 3 + [(0, 1)]


def test_its_questions_look_into_nested_arguments() -> None:
    """As of an operation's arguments: lists of arrays, and what stands among them."""
    x = sp.array(DATA, spec(MESH, "dp, tp"))
    for args in (([x, x], 0), {"x": [x]}, [[{"x": (x,)}], None], iter([x])):
        assert has_sharded_inputs(args)
    for args in (([x, x], 0), {"x": [x]}, [[{"x": (x,)}], None], iter([x])):
        assert get_mesh_from_args(args) is MESH
    with pytest.raises(MeshError):
        get_mesh_from_args([[x], sp.array(DATA, spec(DeviceMesh.of(x=2), "x, -"))])


def test_a_misspelt_operator_is_told_its_likely_name() -> None:
    x = sp.array(DATA, spec(MESH, "dp, tp"))
    with (
        pytest.warns(UserWarning, match="did you mean 'matmul'"),
        pytest.raises(SpecError, match="did you mean 'matmul'"),
    ):
        infer_output_sharding("matmull", [x, np.ones((4, 3))])
    with pytest.raises(AttributeError, match="no attribute 'softmaks'; did you mean 'softmax'"):
        sp.softmaks  # noqa: B018


def test_its_questions() -> None:
    x, w = sp.array(DATA, spec(MESH, "dp, tp")), np.ones((4, 3))
    assert has_sharded_inputs([1, x]) and not has_sharded_inputs([sp.array(DATA), w, 2])
    assert get_mesh_from_args([w, x]) is MESH and get_mesh_from_args([w, 1]) is None
    for index, rank in enumerate(MESH.devices):
        part = slice_for_shard(DATA, DATA.shape, x.spec, index)
        np.testing.assert_array_equal(part, x.shards[rank])
    for tensor in (x, sp.array(DATA), DATA):
        found = reshard_tensor(tensor, x.spec, spec(MESH, "tp, -"), MESH)
        assert str(found.spec) == "tp, -"
        np.testing.assert_array_equal(np.asarray(found), DATA)
    assert str(reshard_tensor(x, None, None, MESH).spec) == "-, -"


@pytest.mark.parametrize(
    "op", [sp.matmul, "matmul", sp.operator_of("matmul"), lambda a, b: a @ b, np.matmul]
)
def test_an_operation_is_named_or_given_itself(op: Any) -> None:
    x, w = sp.array(DATA, spec(MESH, "dp, tp")), np.ones((4, 3))
    found = infer_output_sharding(op, [x, w], MESH)
    assert found is (x @ w).spec and str(found) == "dp, - | sum(tp)"


def test_the_sharding_of_a_function_is_that_of_its_result() -> None:
    x = sp.array(DATA, spec(MESH, "dp, tp"))
    functions: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (sp.softmax, {"axis": 1}),
        (sp.sum, {"axis": 0}),
        (sp.sort, {}),
        (sp.linalg.svdvals, {}),
    ]
    for function, attributes in functions:
        assert infer_output_sharding(function, [x], **attributes) is function(x, **attributes).spec
    values, places = infer_output_sharding(lambda x: sp.top_k(x, 2), [x])  # type: ignore[misc]
    assert str(values) == str(places) == "dp, -"
    assert str(infer_output_sharding(sp.exp, [DATA], MESH)) == "-, -"


@pytest.mark.parametrize(
    ("question", "kind", "said"),
    [
        (lambda x: infer_output_sharding(7, [x]), UsageError, r"7 is no operation; give the name"),
        (
            lambda x: infer_output_sharding("no_such", [x]),
            SpecError,
            r"no_such .* no rule: .*@",
        ),
        (
            lambda x: infer_output_sharding("exp", [[1]]),
            UsageError,
            r"\[1\], a list, as an",
        ),
        (lambda x: infer_output_sharding(sp.exp, [DATA]), UsageError, r"exp of .*; give mesh="),
        (
            lambda x: infer_output_sharding(sp.matmul, [x, np.ones((3, 2))], MESH),
            SpecError,
            r"\(7, 4\), \(3, 2\): 4 and 3",
        ),
        (
            lambda x: infer_output_sharding(sp.sum, [x], axis=7),
            SpecError,
            r"dimensions \(7,\)",
        ),
        (
            lambda x: reshard_tensor([1, 2], None, None, MESH),
            UsageError,
            r"\[1, 2\], a list; ",
        ),
        (lambda x: reshard_tensor(x, None, "x, -", MESH), UsageError, "to_spec 'x, -' is not"),
        (lambda x: reshard_tensor(x, None, None, None), UsageError, r"over None; give the DeviceM"),
        (
            lambda x: reshard_tensor(x, spec(MESH, "tp, -"), None, MESH),
            SpecError,
            r"by `dp, tp`, not by `tp, -`; give x\.spec",
        ),
        (
            lambda x: reshard_tensor(x, None, spec(DeviceMesh.of(x=2), "x, -"), MESH),
            MeshError,
            r"to_spec `x, -` is over",
        ),
        (lambda x: slice_for_shard([1, 2], (2,), None, 0), UsageError, r"\[1, 2\], a list; "),
        (
            lambda x: slice_for_shard(DATA, (7, 4), x.spec, 8),
            UsageError,
            r"device 8 of a mesh",
        ),
        (
            lambda x: slice_for_shard(DATA, (7, 4), x.spec, 0.5),
            UsageError,
            r"device 0\.5 of",
        ),
        (lambda x: slice_for_shard(DATA, (4, 7), x.spec, 0), SpecError, r"\[7, 4\] is not of"),
    ],
)
@pytest.mark.filterwarnings("ignore:operator no_such has no sharding rule")
def test_questions_that_cannot_be_answered(
    question: Callable[[Any], Any], kind: type[ReshardError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        question(sp.array(DATA, spec(MESH, "dp, tp")))


def test_its_names_are_all_there() -> None:
    assert all(hasattr(nabla, name) for name in nabla.__all__)
    assert sp.nabla is nabla
