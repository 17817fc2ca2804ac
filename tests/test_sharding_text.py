"""The native notation: everything a sharding can say is written, and read back as itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.block_rules import Strided
from reshard.cut_rules import Balanced, Halo
from reshard.errors import LayoutError, MeshError, NotationError, RuleError, SpecError
from reshard.mesh import Axis, DeviceMesh
from reshard.sharding import DimSpec, Level, ShardingSpec
from reshard.testing.strategies import Shape, specs_with_shapes

MESH = DeviceMesh.of(dp=2, tp=8, pp=3)


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
    spec = reshard.spec(MESH, text)
    assert spec is ShardingSpec(MESH, dims, replicated, partial, reduction)
    assert reshard.spec(MESH, str(spec)) is spec


@pytest.mark.parametrize(
    ("text", "only", "written"),
    [
        ("tp | only(pp=1)", {"pp": [1]}, "tp | only(pp=1)"),
        ("tp | only( pp = 2 , 0  dp=1 )", {"dp": [1], "pp": [0, 2]}, "tp | only(dp=1 pp=0,2)"),
        ("tp | only(dp=0) only(pp=1)", {"dp": [0], "pp": [1]}, "tp | only(dp=0 pp=1)"),
        ("tp | only(pp=0,1,2)", {}, "tp"),
    ],
)
def test_a_text_says_where_alone_something_is(
    text: str, only: dict[str, list[int]], written: str
) -> None:
    spec = reshard.spec(MESH, text)
    assert spec is ShardingSpec(MESH, [["tp"]], only=only)
    assert str(spec) == written
    both = reshard.spec(MESH, "- | replicated(dp) max(tp) only(pp=1)")
    assert both is ShardingSpec(MESH, [[]], ["dp"], ["tp"], "max", {"pp": [1]})
    assert str(both) == "- | replicated(dp) max(tp) only(pp=1)"


def test_dots_stand_for_dimensions_that_are_not_cut() -> None:
    assert str(reshard.spec(MESH, "tp, ...", ndim=3)) == "tp, -, -"
    assert str(reshard.spec(MESH, "..., tp", ndim=3)) == "-, -, tp"
    assert str(reshard.spec(MESH, "dp, ..., tp", ndim=2)) == "dp, tp"
    assert str(reshard.spec(MESH, "...", ndim=0)) == ""
    assert str(reshard.spec(MESH, "tp, ... | replicated(dp)", ndim=2)) == "tp, - | replicated(dp)"


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
        ("tp | median(dp)", NotationError, r"cannot read 'median\(dp\)' behind the bar"),
        ("tp | sum()", NotationError, r"cannot read 'sum\(\)'"),
        ("tp | sum(dp) max(pp)", NotationError, "two reductions, sum and max"),
        ("tp | sum(dp", NotationError, r"cannot read 'sum\(dp'"),
        ("tp | dp | pp", NotationError, r"cannot read 'dp \| pp'"),
        ("tp | only()", NotationError, r"cannot read 'only\(\)' behind the bar"),
        ("tp | only(pp)", NotationError, r"cannot read 'pp' in only\(pp\); write an axis and"),
        ("tp | only(pp=x)", NotationError, "cannot read 'pp=x'"),
        ("tp | only(pp=1,)", NotationError, "cannot read 'pp=1,'"),
        ("tp | only(p-p=1)", MeshError, "axis name 'p-p'"),
        ("tp | only(pp=3)", SpecError, r"only coordinates \[3\] of axis pp"),
        ("tp | only(tp=1)", SpecError, "axis tp is used in dimension 0 and the restricted axes"),
        ("tp | only(pp=1) only(pp=2)", SpecError, "axis pp is restricted twice"),
        ("tp, ...", NotationError, r"`...` can be used once, and where the number"),
    ],
)
def test_a_text_that_means_nothing_is_refused(
    text: str, error: type[Exception] | None, message: str
) -> None:
    if error is None:
        assert str(reshard.spec(MESH, text)) == "tp"
        return
    with pytest.raises(error, match=message) as caught:
        reshard.spec(MESH, text)
    assert type(caught.value) is error
    assert f"`{text}`" in str(caught.value)
    assert "dp=2,tp=8,pp=3" in str(caught.value)


def test_dots_can_be_used_once() -> None:
    with pytest.raises(NotationError, match="can be used once"):
        reshard.spec(MESH, "..., ...", ndim=4)


@given(st.text(alphabet="dtp /,-|?!@()[]:=12stride.sumonly", max_size=16))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = reshard.spec(MESH, text)
    except LayoutError as error:
        refusal = str(error)
    else:
        refusal = None
        assert reshard.spec(MESH, str(spec)) is spec
    assert refusal is None or f"`{text}`" in refusal
