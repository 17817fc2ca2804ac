"""Shardings: where the elements go, equivalent spellings, and what a sharding may not be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from oracle import NO_ELEMENT, contents_of_spec
from reshard.cut_rules import Balanced, Ceil, Halo, Strided
from reshard.errors import LayoutError, MeshError, NotationError, RuleError, SpecError, UsageError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec, spec
from strategies import Shape, specs_with_shapes

MESH = DeviceMesh.of(x=8, y=2)


@given(specs_with_shapes())
def test_a_layout_has_the_elements_of_each_device(pair: tuple[ShardingSpec, Shape]) -> None:
    spec, shape = pair
    layout, held = spec.layout(shape), contents_of_spec(spec, shape)
    assert layout.holders == tuple(sorted(held.elements))
    assert (layout.contributions, layout.reduction) == (held.contributions, held.reduction)
    assert not held.missing()
    for rank in layout.holders:
        (cell,) = layout.cells_of(rank)
        assert layout.local_shape(rank) == held.elements[rank].shape
        assert layout.cell_contribution[cell] == held.contribution[rank]
        assert layout.cell_elements[cell] == (held.elements[rank] != NO_ELEMENT).sum()
        owned: set[int] = set()
        for box in layout.boxes(rank):
            window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            owned |= set(np.arange(np.prod(shape, dtype=int)).reshape(shape)[window].ravel())
        assert owned <= set(held.elements[rank].ravel().tolist())
    assert layout.is_padded == any(
        any(run[3] == 3 for part in range(table.parts) for run in table.runs_of(part))
        for table in layout.tables
    )


def test_one_level_is_flat_and_several_are_nested() -> None:
    mesh = DeviceMesh.of(dp=2, tp=2)
    flat = ShardingSpec(mesh, [DimSpec(["dp", "tp"])]).layout((6,))
    nested = ShardingSpec(mesh, [DimSpec([Level(["dp"]), Level(["tp"])])]).layout((6,))
    assert [flat.local_shape(rank) for rank in range(4)] == [(2,), (2,), (2,), (0,)]
    assert [nested.local_shape(rank) for rank in range(4)] == [(2,), (1,), (2,), (1,)]


def test_axis_order_is_major_to_minor() -> None:
    mesh = DeviceMesh.of(x=2, y=2)
    layout = ShardingSpec(mesh, [DimSpec(["y", "x"])]).layout((4,))
    assert [layout.boxes(rank)[0].start[0] for rank in range(4)] == [0, 2, 1, 3]


def test_slots_are_ranks_whatever_their_order() -> None:
    mesh = DeviceMesh.of(x=2, devices=[5, 3])
    layout = ShardingSpec(mesh, [DimSpec(["x"])]).layout((4,))
    assert (layout.slots, layout.holders) == (6, (3, 5))
    assert layout.boxes(5)[0].start == (0,)
    assert layout.boxes(3)[0].start == (2,)


def test_a_scalar_is_on_every_device() -> None:
    layout = ShardingSpec(MESH, []).layout(())
    assert layout.holders == tuple(range(16))
    assert layout.local_shape(7) == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["x:(1)2", "x:(2)2"], ["x:(1)4"]),
        (["x:(1)2", "x:(2)4"], ["x"]),
        (["x:(1)8"], ["x"]),
        ([Axis("x", 1, 8)], [Axis("x")]),
        (["x:(1)2", "x:(2)2", "x:(4)2", "y"], ["x", "y"]),
    ],
)
def test_spellings_of_the_same_axes_are_one_sharding(one: list[str], other: list[str]) -> None:
    assert ShardingSpec(MESH, [one]) is ShardingSpec(MESH, [other])
    assert ShardingSpec(MESH, [[]], replicated_axes=one) is ShardingSpec(
        MESH, [[]], replicated_axes=other
    )
    assert ShardingSpec(MESH, [[]], partial_axes=one) is ShardingSpec(
        MESH, [[]], partial_axes=other
    )


def test_the_minor_half_first_is_another_sharding() -> None:
    assert ShardingSpec(MESH, [["x:(4)2", "x:(1)4"]]) is not ShardingSpec(MESH, [["x"]])


def test_the_order_of_replicated_axes_is_irrelevant() -> None:
    assert ShardingSpec(MESH, [[]], ["y", "x"]) is ShardingSpec(MESH, [[]], ["x", "y"])
    assert ShardingSpec(MESH, [[]], ["x:(4)2", "x:(1)4"]) is ShardingSpec(MESH, [[]], ["x"])


def test_only_some_coordinates_of_an_axis_hold_anything() -> None:
    mesh = DeviceMesh.of(pp=3, tp=2, devices=[5, 4, 3, 2, 1, 0])
    layout = ShardingSpec(mesh, [["tp"], []], only={"pp": [2, 0]}).layout((4, 3))
    assert (layout.slots, layout.holders) == (6, (0, 1, 4, 5))
    assert [layout.local_shape(rank) for rank in range(6)] == [(2, 3)] * 2 + [None] * 2 + [
        (2, 3)
    ] * 2
    assert [layout.boxes(rank)[0].start[0] for rank in (5, 4, 1, 0)] == [0, 2, 0, 2]
    partial = ShardingSpec(mesh, [[]], [], ["tp"], only={"pp": [1]}).layout((4,))
    assert (partial.holders, partial.cell_contribution.tolist()) == ((2, 3), [1, 0])


def test_spellings_of_the_same_coordinates_are_one_sharding() -> None:
    one = ShardingSpec(MESH, [[]], only={"y": [1], "x": [3, 0, 3]})
    assert one is ShardingSpec(MESH, [[]], only=[("x", (0, 3)), ("y", range(1, 2))])
    assert one.only == (("x", (0, 3)), ("y", (1,)))
    assert ShardingSpec(MESH, [["x"]], only={"y": [1, 0]}) is ShardingSpec(MESH, [["x"]])


def test_the_reduction_without_partial_axes_is_irrelevant() -> None:
    assert ShardingSpec(MESH, [["x"]], reduction="max") is ShardingSpec(MESH, [["x"]])


def test_names_are_as_good_as_levels() -> None:
    named = DimSpec(["x", "y"])
    assert named is DimSpec([Level(["x", "y"])]) is DimSpec([Level([Axis("x"), Axis("y")], Ceil())])
    assert named is not DimSpec([Level(["x", "y"], Balanced())])
    assert named.axes == (Axis("x"), Axis("y"))


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (lambda: ShardingSpec(MESH, [["z"]]), MeshError, "unknown axis 'z'"),
        (lambda: ShardingSpec(MESH, [[]], ["z"]), MeshError, "unknown axis 'z'"),
        (lambda: ShardingSpec(MESH, [[]], [], ["z"]), MeshError, "unknown axis 'z'"),
        (
            lambda: ShardingSpec(MESH, [["x"], ["x"]]),
            SpecError,
            "axis x is used in dimension 0 and dimension 1",
        ),
        (lambda: ShardingSpec(MESH, [["x", "x"]]), SpecError, "axis x is used in dimension 0, twi"),
        (
            lambda: ShardingSpec(MESH, [["x"]], ["x"]),
            SpecError,
            "axis x is used in dimension 0 and the replicated axes",
        ),
        (
            lambda: ShardingSpec(MESH, [["x"]], [], ["x"]),
            SpecError,
            "axis x is used in dimension 0 and the partial axes",
        ),
        (
            lambda: ShardingSpec(MESH, [["x"], ["x:(1)2"]]),
            SpecError,
            "axis x is used in dimension 0 and dimension 1",
        ),
        (
            lambda: ShardingSpec(MESH, [["x:(1)2"], ["x:(1)2"]]),
            SpecError,
            r"axis x:\(1\)2 is used in",
        ),
        (
            lambda: ShardingSpec(MESH, [["x:(1)4"], ["x:(2)2"]]),
            SpecError,
            r"sub-axes x:\(1\)4 and x:\(2\)2 of dimension 0 and dimension 1 overlap",
        ),
        (
            lambda: ShardingSpec(MESH, [["x:(1)3"]]),
            MeshError,
            r"sub-axis x:\(1\)3 does not divide axis 'x' of size 8",
        ),
        (
            lambda: ShardingSpec(MESH, [[]], [], ["x"], "median"),
            SpecError,
            "unknown reduction 'median'; it is one of sum, max",
        ),
        (lambda: ShardingSpec(MESH, [[]], only={"z": [0]}), MeshError, "unknown axis 'z'"),
        (
            lambda: ShardingSpec(MESH, [["x:(1)2"]], only={"x": [0]}),
            SpecError,
            "axis x is used in dimension 0 and the restricted axes",
        ),
        (
            lambda: ShardingSpec(MESH, [[]], only=[("x", [0]), ("x", [1])]),
            SpecError,
            r"axis x is restricted twice; .* such as only\(x=0,1\)",
        ),
        (
            lambda: ShardingSpec(MESH, [[]], only={"y": [2]}),
            SpecError,
            r"only coordinates \[2\] of axis y, whose coordinates are 0 to 1",
        ),
        (lambda: ShardingSpec(MESH, [[]], only={"y": [-1]}), SpecError, r"coordinates \[-1\]"),
        (lambda: ShardingSpec(MESH, [[]], only={"y": []}), SpecError, "give at least one of them"),
        (
            lambda: ShardingSpec(MESH, [["x"], []]).layout((4,)),
            SpecError,
            r"`x, -` is for tensors of 2 dimensions, not for shape \[4\]",
        ),
        (lambda: DimSpec(["x"], priority=-1), SpecError, "priority -1"),
        (lambda: DimSpec([Level(["x"]), "y"]), SpecError, "give one or the other"),
        (lambda: Level([]), SpecError, "at least one mesh axis"),
        (
            lambda: ShardingSpec(MESH, [["x:(1)6"]]).layout((4,)),
            MeshError,
            r"x:\(1\)6 does not divide",
        ),
        (lambda: ShardingSpec(MESH, [["x"]]).layout((-1,)), LayoutError, "-1"),
    ],
)
def test_invalid_shardings_are_refused(
    refused: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        refused()


def test_sub_axes_on_a_size_that_does_not_divide_them_overlap() -> None:
    # On 12, x:(1)2 ends at 2 and x:(3)2 begins at 3: their digits are not apart.
    with pytest.raises(SpecError, match=r"x:\(1\)2 and x:\(3\)2 .* overlap"):
        ShardingSpec(DeviceMesh.of(x=12), [["x:(1)2"], ["x:(3)2"]])


def test_a_rule_that_does_not_fit_names_its_numbers() -> None:
    from reshard.cut_rules import Sizes

    spec = ShardingSpec(DeviceMesh.of(x=2), [DimSpec([Level(["x"], Sizes((3, 1)))])])
    with pytest.raises(RuleError, match=r"\[3, 1\] add up to 4, but the length is 5"):
        spec.layout((5,))


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (lambda: spec(MESH, "x, y").layout("75"), SpecError, "shape '75' must be a list of whole"),
        (lambda: spec(MESH, "x, y").layout((7.9, 4)), SpecError, r"shape \[7\.9, 4\] must be"),
        (lambda: spec(MESH, "x, y").layout((7, True)), SpecError, r"shape \[7, True\] must be"),
        (lambda: spec(MESH, "x, y").layout((7, -4)), SpecError, r"shape \[7, -4\] must not be neg"),
        (lambda: spec(MESH, "x, y").layout((2**40, 2**40)), LayoutError, "bytes fit 64 bits"),
        (lambda: spec(MESH, "x, y").layout((2**70, 4)), SpecError, "must be at most"),
        (lambda: spec(MESH, "x@cyclic1").layout((2**40,)), LayoutError, "at most 67108864"),
        (
            lambda: spec(MESH, "x@stride1099511627776").layout((2**40,)),
            RuleError,
            "at most 67108864",
        ),
        (
            lambda: spec("a=2", "a"),
            SpecError,
            r"is not a DeviceMesh; .*DeviceMesh\.parse\('a=2'\)",
        ),
        (lambda: spec(None, "a"), SpecError, r"None is not a DeviceMesh; make one"),
        (lambda: spec(MESH, ["dp"]), NotationError, r"sharding \['dp'\]; give it as a text"),
        (lambda: spec(MESH, "x, ...", ndim=2.5), UsageError, r"ndim 2\.5 must be a whole number"),
        (lambda: ShardingSpec("a=2", [["a"]]), SpecError, "'a=2' is not a DeviceMesh"),
        (lambda: ShardingSpec(MESH, "x, y"), SpecError, r"read by reshard\.spec\(mesh, 'x, y'\)"),
        (lambda: ShardingSpec(MESH, ["x", "y"]), SpecError, r"dimension 'x' .* such as \['tp'\]"),
        (lambda: ShardingSpec(MESH, [["x"]], "y"), SpecError, "axes 'y'; give a list"),
        (lambda: ShardingSpec(MESH, [[]], only=3), SpecError, "only 3; give coordinates by axis"),
        (lambda: ShardingSpec(MESH, [[]], only={"x": [0.0]}), SpecError, r"axis x \[0\.0\] must"),
        (lambda: ShardingSpec(MESH, [[]], only={"x": 0}), SpecError, "axis x 0 must be a list"),
        (lambda: DimSpec("dp"), SpecError, "levels 'dp' of a dimension; give a list of mesh axes"),
        (lambda: DimSpec(3), SpecError, "levels 3 of a dimension"),
        (lambda: DimSpec(["dp"], priority=1.5), SpecError, r"priority 1\.5 must be a whole number"),
        (lambda: Level(["dp"], "balanced"), RuleError, "'balanced' is not a cut rule"),
    ],
)
def test_arguments_that_are_something_else_are_refused(
    refused: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        refused()


MESH_3D = DeviceMesh.of(dp=2, tp=8, pp=3)


@given(specs_with_shapes())
def test_every_sharding_reads_back_as_itself(pair: tuple[ShardingSpec, Shape]) -> None:
    spec, _ = pair
    assert reshard.spec(spec.mesh, str(spec)) is spec


@given(specs_with_shapes())
def test_spaces_around_marks_say_nothing(pair: tuple[ShardingSpec, Shape]) -> None:
    spec, _ = pair
    text = str(spec)
    for mark in (",", "/", "|"):
        text = text.replace(mark, f" {mark}  ")
    assert reshard.spec(spec.mesh, f"  {text} ") is spec


@pytest.mark.parametrize(
    ("text", "dims", "replicated", "partial", "reduction"),
    [
        ("dp tp, -", [["dp", "tp"], []], [], [], "sum"),
        ("-, tp:(1)2 pp", [[], [Axis("tp", 1, 2), "pp"]], [], [], "sum"),
        ("dp / tp, -", [DimSpec([Level(["dp"]), Level(["tp"])]), []], [], [], "sum"),
        ("tp@stride2, -", [DimSpec([Level(["tp"], Strided(2))]), []], [], [], "sum"),
        (
            "dp tp@balanced@halo[1,1] / pp",
            [DimSpec([Level(["dp", "tp"], Halo(1, 1, rule=Balanced())), Level(["pp"])])],
            [],
            [],
            "sum",
        ),
        ("tp ?, - !1", [DimSpec(["tp"], is_open=True), DimSpec(priority=1)], [], [], "sum"),
        ("tp ?!2, ?", [DimSpec(["tp"], True, 2), DimSpec(is_open=True)], [], [], "sum"),
        ("tp | replicated(dp) max(pp)", [["tp"]], ["dp"], ["pp"], "max"),
        ("- | sum(tp:(2)4 pp)", [[]], [], [Axis("tp", 2, 4), "pp"], "sum"),
        ("| sum(pp)", [], [], ["pp"], "sum"),
        ("", [], [], [], "sum"),
    ],
)
def test_a_text_means_its_sharding(
    text: str, dims: list[DimSpec], replicated: list[str], partial: list[str], reduction: str
) -> None:
    spec = reshard.spec(MESH_3D, text)
    assert spec is ShardingSpec(MESH_3D, dims, replicated, partial, reduction)
    assert reshard.spec(MESH_3D, str(spec)) is spec


@pytest.mark.parametrize(
    ("text", "only", "written"),
    [
        ("tp | only(pp=1)", {"pp": [1]}, "tp | only(pp=1)"),
        ("tp | only( pp = 2 , 0  dp=1 )", {"dp": [1], "pp": [0, 2]}, "tp | only(dp=1 pp=0,2)"),
        ("tp | only(dp=0) only(pp=1)", {"dp": [0], "pp": [1]}, "tp | only(dp=0 pp=1)"),
        ("tp | only(pp=0,1,2)", {}, "tp"),
    ],
)
def test_a_text_restricts_coordinates(text: str, only: dict[str, list[int]], written: str) -> None:
    spec = reshard.spec(MESH_3D, text)
    assert spec is ShardingSpec(MESH_3D, [["tp"]], only=only)
    assert str(spec) == written
    both = reshard.spec(MESH_3D, "- | replicated(dp) max(tp) only(pp=1)")
    assert both is ShardingSpec(MESH_3D, [[]], ["dp"], ["tp"], "max", {"pp": [1]})
    assert str(both) == "- | replicated(dp) max(tp) only(pp=1)"


def test_dots_stand_for_dimensions_that_are_not_cut() -> None:
    assert str(reshard.spec(MESH_3D, "tp, ...", ndim=3)) == "tp, -, -"
    assert str(reshard.spec(MESH_3D, "..., tp", ndim=3)) == "-, -, tp"
    assert str(reshard.spec(MESH_3D, "dp, ..., tp", ndim=2)) == "dp, tp"
    assert str(reshard.spec(MESH_3D, "...", ndim=0)) == ""
    assert (
        str(reshard.spec(MESH_3D, "tp, ... | replicated(dp)", ndim=2)) == "tp, - | replicated(dp)"
    )


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("zp, -", MeshError, "unknown axis 'zp'"),
        ("tp, tp", SpecError, "axis tp is used in dimension 0 and dimension 1"),
        ("tp tp", SpecError, "axis tp is used in dimension 0, twice"),
        ("tp / tp", SpecError, "axis tp is used in dimension 0, twice"),
        ("tp | replicated(tp)", SpecError, "axis tp is used in dimension 0 and the replicated"),
        ("tp | sum(tp)", SpecError, "axis tp is used in dimension 0 and the partial axes"),
        ("tp:(1)4, tp:(2)4", SpecError, r"sub-axes tp:\(1\)4 and tp:\(2\)4 of .* overlap"),
        ("pp:(1)2", MeshError, r"sub-axis pp:\(1\)2 does not divide axis 'pp' of size 3"),
        ("tp:(4)4", MeshError, r"tp:\(4\)4 does not divide"),
        ("tp:(0)2", MeshError, r"tp:\(0\)2: pre and size"),
        ("tp,, dp", NotationError, "an empty item"),
        (",", NotationError, "an empty item"),
        ("tp /, -", NotationError, "an empty level in 'tp /'"),
        ("tp //dp", NotationError, "an empty level"),
        ("tp@, -", NotationError, "cannot read 'tp@'"),
        ("@stride2", NotationError, "cannot read '@stride2'"),
        ("tp@spiral", NotationError, "unknown cut rule 'spiral'"),
        ("tp@stride", NotationError, "cannot read the cut rule 'stride'; write stride2"),
        ("tp@stride0", RuleError, "stride 0 must be at least 1"),
        ("t-p", NotationError, "cannot read the axis 't-p'"),
        ("- tp", NotationError, "cannot read the axis '-'"),
        ("tp ? dp", NotationError, r"cannot read the axis '\?'"),
        ("tp !x", NotationError, "cannot read the axis '!x'"),
        ("tp | ", None, ""),
        ("tp | median(dp)", NotationError, r"cannot read 'median\(dp\)' after the bar"),
        ("tp | sum()", NotationError, r"cannot read 'sum\(\)'"),
        ("tp | sum(dp) max(pp)", NotationError, "two reductions, sum and max"),
        ("tp | sum(dp", NotationError, r"cannot read 'sum\(dp'"),
        ("tp | dp | pp", NotationError, r"cannot read 'dp \| pp'"),
        ("tp | only()", NotationError, r"cannot read 'only\(\)' after the bar"),
        ("tp | only(pp)", NotationError, r"cannot read 'pp' in only\(pp\); write an axis and"),
        ("tp | only(pp=x)", NotationError, "cannot read 'pp=x'"),
        ("tp | only(pp=1,)", NotationError, "cannot read 'pp=1,'"),
        ("tp | only(p-p=1)", MeshError, "axis name 'p-p'"),
        ("tp | only(pp=3)", SpecError, r"only coordinates \[3\] of axis pp"),
        ("tp | only(tp=1)", SpecError, "axis tp is used in dimension 0 and the restricted axes"),
        ("tp | only(pp=1) only(pp=2)", SpecError, "axis pp is restricted twice"),
        ("tp, ...", NotationError, r"`...` can be used once, and only if the number"),
    ],
)
def test_a_text_that_means_nothing_is_refused(
    text: str, error: type[Exception] | None, message: str
) -> None:
    if error is None:
        assert str(reshard.spec(MESH_3D, text)) == "tp"
        return
    with pytest.raises(error, match=message) as caught:
        reshard.spec(MESH_3D, text)
    assert type(caught.value) is error
    assert f"`{text}`" in str(caught.value)
    assert "dp=2,tp=8,pp=3" in str(caught.value)


def test_dots_can_be_used_once() -> None:
    with pytest.raises(NotationError, match="can be used once"):
        reshard.spec(MESH_3D, "..., ...", ndim=4)


@given(st.text(alphabet="dtp /,-|?!@()[]:=12stride.sumonly", max_size=16))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = reshard.spec(MESH_3D, text)
    except LayoutError as error:
        refusal = str(error)
    else:
        refusal = None
        assert reshard.spec(MESH_3D, str(spec)) is spec
    assert refusal is None or f"`{text}`" in refusal
