"""Megatron's words in a line of text, read and written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import LayoutError, MeshError, NotationError
from reshard.megatron.parameters import MegatronParameter
from reshard.megatron.ranks import MegatronRanks
from reshard.notation.megatron import megatron_text, parse_megatron
from reshard.sharding import DimSpec, Level, ShardingSpec
from strategies import rules

RANKS = MegatronRanks(tp=2, pp=2, dp=2, ep=2)
READ = [
    ("tp=2 dp=4 | partition_dim=0 ndim=2", MegatronRanks(tp=2, dp=4).dense, "tp, -"),
    ("dp=4 | ndim=1", MegatronRanks(dp=4).dense, "-"),
    ("| ndim=0", MegatronRanks().dense, ""),
    (
        "tp=2 dp=4 order=dp-tp | partition_dim=1 partition_stride=2 ndim=2",
        MegatronRanks(tp=2, dp=4, order="dp-tp").dense,
        "-, tp@stride2",
    ),
    (
        "tp=2 offset=4 | partition_dim=0 partition_stride=2 local_lengths=4,4 ndim=1",
        MegatronRanks(tp=2, offset=4).dense,
        "tp@stride2[4,4]",
    ),
    (
        "tp=2 pp=2 | partition_dim=0 partition_sizes=16,8,4 stages=1 ndim=1",
        MegatronRanks(tp=2, pp=2).dense,
        "tp@blocks[32,16,8] | only(pp=1)",
    ),
    (
        "tp=2 | partition_dim=0 partition_sizes=3,1;2,2 ndim=1",
        MegatronRanks(tp=2).dense,
        "tp@pieces[3:2,1:2]",
    ),
    ("tp=2 | partition_dim=0 local_lengths=0,3 ndim=1", MegatronRanks(tp=2).dense, "tp@sizes[0,3]"),
    ("tp=8 | partition_dim=0 heads=4 ndim=1", MegatronRanks(tp=8).dense, "tp@heads4"),
    ("tp=2 | partition_dim=0 pad=128 ndim=1", MegatronRanks(tp=2).dense, "tp@pad128"),
    (
        "etp=2 ep=2 edp=1 pp=2 | expert partition_dim=1 stages=0 expert_ranks=1 ndim=2",
        MegatronRanks(tp=2, pp=2, dp=2, ep=2).expert,
        "-, etp | only(pp=0 ep=1)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "mesh", "native"), READ, ids=[item[0] for item in READ])
def test_texts_give_their_shardings(text: str, mesh: reshard.DeviceMesh, native: str) -> None:
    expected = reshard.spec(mesh, native)
    assert parse_megatron(text) is expected
    assert parse_megatron(megatron_text(expected)) is expected


def test_ranks_of_the_whole_model_for_an_expert() -> None:
    """The experts' grid follows from all sizes, or is written itself."""
    spec = parse_megatron("tp=2 dp=4 ep=4 etp=1 | expert partition_dim=0", shape=(4,))
    assert spec.mesh is MegatronRanks(tp=2, dp=4, ep=4, etp=1).expert
    assert megatron_text(spec) == "ep=4 edp=2 | expert partition_dim=0 ndim=1"


def test_a_mesh_for_a_text_without_ranks() -> None:
    mesh = reshard.DeviceMesh.of(dp=2, tp=2)
    spec = parse_megatron("partition_dim=0", mesh, (4, 2))
    assert spec is reshard.spec(mesh, "tp, -")
    # Ranks in the text are its own, whatever mesh the others are written over.
    assert parse_megatron("tp=4 | partition_dim=0", mesh, (4, 2)).mesh.size == 4
    experts = reshard.DeviceMesh.of(ep=2, etp=2)
    both = reshard.DeviceMesh.of(etp=2, tp=2)
    assert parse_megatron("partition_dim=0", both, (4,)) is reshard.spec(both, "tp")
    assert parse_megatron("expert partition_dim=0", experts, (4,)) is reshard.spec(experts, "etp")


def test_a_parameter_as_text() -> None:
    parameter = MegatronParameter(RANKS, (4, 3), True, partition_stride=2, stages=(1,))
    text = megatron_text(parameter.spec())
    assert text == (
        "tp=2 dp=2 pp=2 | partition_dim=0 partition_stride=2 local_lengths=4,4 stages=1 ndim=2"
    )
    assert parse_megatron(text, shape=parameter.global_shape) is parameter.spec()


orders = st.permutations(["tp", "cp", "ep", "dp"]).map(lambda words: "-".join([*words, "pp"]))


@st.composite
def specs(draw: st.DrawFn) -> ShardingSpec:
    """Shardings over a grid of Megatron's, by any rule, some at a stage or expert rank only."""
    two = st.integers(1, 2)
    sizes = {name: draw(two) for name in ("tp", "cp", "pp", "ep", "etp")}
    dp = draw(st.integers(1, 2)) * sizes["ep"] * sizes["etp"]
    offset = draw(st.sampled_from([0, 0, 3]))
    ranks = MegatronRanks(**sizes, dp=dp, order=draw(orders), offset=offset)
    mesh, axis = draw(st.sampled_from([(ranks.dense, "tp"), (ranks.expert, "etp")]))
    dims = [DimSpec()] * draw(st.integers(0, 3))
    if dims and draw(st.booleans()):
        rule = draw(rules([draw(st.integers(1, 8))], mesh.axis_size(axis)))
        dims[draw(st.integers(0, len(dims) - 1))] = DimSpec([Level([axis], rule)])
    places = st.lists(st.integers(0, 1), min_size=1)
    only: dict[str, list[int]] = {}
    for name in {"pp", "ep"} & set(mesh.axis_names):
        if draw(st.booleans()) and mesh.axis_size(name) == 2:
            only[name] = draw(places)
    return ShardingSpec(mesh, dims, only=only)


@given(specs())
def test_written_texts_are_read_back(spec: ShardingSpec) -> None:
    levels = [level for dim in spec.dim_specs for level in dim.levels]
    foreign = ("unit", "balanced", "windows", "whole", "cyclic", "halo")
    try:
        text = megatron_text(spec)
    except NotationError as error:
        text, said = "", str(error)
    if text:
        assert parse_megatron(text) is spec
        assert not any(word in level.rule.text for level in levels for word in foreign)
    else:
        (level,) = levels
        assert f"Megatron cannot express `{level}`" in said


def native(mesh: str, text: str) -> ShardingSpec:
    return reshard.spec(reshard.DeviceMesh.parse(mesh), text)


GRID = "pp=2,dp=2,cp=1,tp=2"
EXPERTS = "pp=1,edp=2,ep=2,etp=2"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (native("x=2", "x"), "its axes are named tp, cp, dp, pp, or etp, ep, edp, pp"),
        (native("dp=2,tp=2", "tp"), "Megatron cannot express the mesh dp=2,tp=2"),
        (
            reshard.spec(reshard.DeviceMesh.of(pp=1, dp=1, cp=1, tp=2, devices=[1, 0]), "tp"),
            r"the devices \[1, 0\]",
        ),
        (native(GRID, "dp"), "a single dimension is sharded, over the axis tp"),
        (native(GRID, "tp dp"), "a single dimension is sharded"),
        (native(GRID, "tp, dp"), "a single dimension is sharded"),
        (native(GRID, "dp / tp"), "it shards a dimension once"),
        (native(GRID, "- | sum(dp)"), "it has no partial axes"),
        (native(GRID, "- | replicated(dp)"), "it keeps copies along every axis"),
        (native(GRID, "tp ?"), "it has no open dimensions"),
        (native(GRID, "tp !1"), "it has no priorities"),
        (
            native(GRID, "tp | only(dp=1)"),
            r"`only\(dp=1\)` .*: tensors are restricted along pp",
        ),
        (native(EXPERTS, "etp | only(edp=1)"), r"`only\(edp=1\)`"),
        (native(GRID, "tp@balanced"), "`tp@balanced`"),
        (native(GRID, "tp@unit4"), "`tp@unit4`"),
        (native(GRID, "tp@blocks[3,1]"), r"`tp@blocks\[3,1\]`"),
        (native(GRID, "tp@balanced@blocks[4,2]"), "`tp@balanced@blocks"),
        (native(GRID, "tp@stride1"), "`tp@stride1`"),
    ],
)
def test_errors_name_what_megatron_cannot_express(spec: ShardingSpec, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        megatron_text(spec)


@pytest.mark.parametrize(
    ("text", "more", "error", "message"),
    [
        ("tp=2 | nonsense", {}, NotationError, "cannot read 'nonsense'"),
        ("tp=2 tp=2 | ndim=1", {}, NotationError, "cannot read 'tp=2'.*at most once"),
        ("partition_dim=0 | tp=2", {}, NotationError, "cannot read 'tp=2'"),
        ("tp= | ndim=1", {}, NotationError, "cannot read 'tp='"),
        ("tp=two | ndim=1", {}, NotationError, "cannot read tp=two.*whole numbers"),
        ("tp=-2 | ndim=1", {}, NotationError, "cannot read tp=-2"),
        ("tp=1,2 | ndim=1", {}, NotationError, "write a single number"),
        ("tp=2 | expert=1 ndim=1", {}, NotationError, "cannot read 'expert=1'"),
        ("tp=2 | partition_dim=0 stages=a ndim=1", {}, NotationError, "cannot read stages=a"),
        ("partition_dim=0", {}, NotationError, "no ranks in 'partition_dim=0'"),
        ("tp=2 | partition_dim=0", {}, NotationError, "add ndim=2, or give a shape"),
        ("tp=2 | ndim=1", {"shape": (2, 2)}, NotationError, r"ndim=1 .* of shape \[2, 2\]"),
        ("tp=2 | partition_dim=2", {"shape": (2, 2)}, NotationError, "of a tensor of 2 dim"),
        ("tp=2 | partition_stride=2 ndim=1", {}, NotationError, "stride without partition_dim"),
        ("tp=2 | local_lengths=2,1 ndim=1", {}, NotationError, "lengths without partition_dim"),
        ("tp=2 | partition_dim=0 heads=2 pad=2 ndim=1", {}, NotationError, "heads and pad in"),
        (
            "tp=2 | partition_dim=0 heads=2 local_lengths=2,1 ndim=1",
            {},
            NotationError,
            "heads and local_lengths in",
        ),
        ("tp=2 | partition_dim=0 partition_sizes=1;2;3 ndim=1", {}, NotationError, "of 3 ranks"),
        ("tp=2 | partition_dim=0 partition_sizes=1,1;2 ndim=1", {}, NotationError, "of 2 ranks"),
        ("tp=2 | partition_dim=0 expert_ranks=0 ndim=1", {}, NotationError, "without `expert`"),
        ("etp=2 edp=2 | partition_dim=0 ndim=1", {}, NotationError, "edp=2 .* `expert` after"),
        ("tp=2 edp=2 | expert ndim=1", {}, NotationError, "belongs to an expert's grid"),
        ("tp=0 | ndim=1", {}, MeshError, "parallel size tp 0 must be at least 1"),
        ("tp=2 order=dp | ndim=1", {}, MeshError, "leaves out tp"),
        (
            "partition_dim=0",
            {"mesh": reshard.DeviceMesh.of(x=2), "shape": (2,)},
            NotationError,
            "is sharded over tp, but the mesh has x",
        ),
    ],
)
def test_unreadable_texts_are_refused(
    text: str, more: dict[str, Any], error: type[LayoutError], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_megatron(text, **more)
