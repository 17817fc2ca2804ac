"""Which notation a text is read as, and what is said where that cannot be known."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import LayoutError, MeshError, NotationError
from reshard.layout import Layout
from reshard.notation.registry import NOTATIONS, read_sharding
from strategies import specs_with_shapes

MESH = reshard.DeviceMesh.of(x=2, y=3)

RECOGNISED = [
    ("x, y", "native"),
    ("-, x / y@stride2 ?!1 | sum(y)", "native"),
    ("x:(1)2, -", "native"),
    ("", "native"),
    ("[[0], [1]]", "mlir"),
    ("[[], [0, 1]]", "mlir"),
    ("[[]]", "mlir"),
    ("shard.sharding @mesh split_axes = [[0], []]", "mlir"),
    ("P('x', None)", "jax"),
    ("P()", "jax"),
    ("PartitionSpec(('x', 'y'),)", "jax"),
    ("jax.sharding.PartitionSpec('x')", "jax"),
    ('[{"x"}, {}]', "shardy"),
    ('#sdy.sharding<@mesh, [{"x":(1)2, ?}p1, {}]>', "shardy"),
    ('<@mesh, [{}], replicated={"x"}>', "shardy"),
    ("[Shard(0), Replicate()]", "dtensor"),
    ("(Shard(dim=0), _StridedShard(dim=0, split_factor=2))", "dtensor"),
    ("S(0)R", "dtensor"),
    ("R P(sum)", "dtensor"),
    ("P(sum)", "dtensor"),
    ("P(sum) S(-1)", "dtensor"),
    ("Partial(max)", "dtensor"),
    ("PartitionedShard(0, 2, (4, 2))", "partitioned"),
    ("[PartitionedShard(0, 2, (4, 2)), Replicate()]", "partitioned"),
    ("RaggedShard(dims=(0,), local_units=(1, 5))", "ragged"),
    ("[RaggedShard(dims=(0,), local_units=(1, 5)), Replicate()]", "ragged"),
    ("{devices=[2,3]<=[6]}", "hlo"),
    ("sharding={replicated}", "hlo"),
    ("GSPMDSharding({devices=[2,1]<=[2]}, memory_kind=device)", "hlo"),
    ("{{maximal device=0}, {manual}}", "hlo"),
    ("6 6 2 2 0 0", "scalapack"),
    ("DESC_A = (1, 0, 8, 6, 2, 2, 0, 0, 4)", "scalapack"),
    ("order=column grid=2x3 mb=2 nb=2", "scalapack"),
    ("tp=2 dp=4 | partition_dim=0", "megatron"),
    ("partition_dim=1 partition_stride=2", "megatron"),
    ("etp=1 ep=4 | expert expert_ranks=3", "megatron"),
]


@pytest.mark.parametrize(("text", "name"), RECOGNISED, ids=lambda value: str(value))
def test_a_text_is_recognised(text: str, name: str) -> None:
    found = [other.name for other in NOTATIONS.values() if other.recognises(text)]
    assert (found or ["native"]) == [name]


@pytest.mark.parametrize(
    "text",
    ["x, y", "[[0], [1]]", "P('x', 'y')", '[{"x"}, {"y"}]', "[Shard(0), Shard(1)]", "S(0)S(1)"],
)
def test_all_say_the_same(text: str) -> None:
    reading = read_sharding(text, MESH, (6, 6))
    assert reading.sharding is reshard.spec(MESH, "x, y")
    name = reading.notation.name
    assert read_sharding(f"{name}:{text}", MESH, (6, 6)) == reading
    assert read_sharding(f" {name} : {text}", MESH, (6, 6), notation="ragged") == reading
    assert read_sharding(text, MESH, (6, 6), notation=name) == reading


@pytest.mark.parametrize("name", NOTATIONS)
def test_every_notation_reads_its_example(name: str) -> None:
    notation = NOTATIONS[name]
    mesh = {
        "mlir": reshard.DeviceMesh.of(a=2, b=2, c=2),
        "partitioned": reshard.DeviceMesh.of(tp=2),
        "ragged": reshard.DeviceMesh.of(tp=2),
        "scalapack": None,
        "megatron": None,
    }.get(name, reshard.DeviceMesh.of(dp=2, tp=4))
    shape = {"partitioned": (10, 2), "ragged": (4, 2)}.get(name, (8, 6))
    assert notation.recognises(notation.example) or name == "native"
    reading = read_sharding(notation.example, mesh, shape)
    assert reading.notation is notation
    sharding = reading.sharding
    layout = sharding if isinstance(sharding, Layout) else sharding.layout(shape)
    assert layout.shape == shape
    assert len(layout.holders) > 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", r"cannot read the axis '\[\]'"),
        ("x,,y", "an empty item"),
        ("lama:x, y", "cannot read the axis 'lama:x'"),
        ("[[0], {}] P(sum)", "may be mlir or dtensor"),
    ],
)
def test_errors_of_unreadable_texts_show_every_notation(text: str, said: str) -> None:
    with pytest.raises(NotationError, match=said) as raised:
        read_sharding(text, MESH, (6, 6))
    for notation in NOTATIONS.values():
        assert f"\n  {notation.name}:{notation.example}" in str(raised.value)


def test_errors_of_recognised_texts_name_the_notation() -> None:
    with pytest.raises(LayoutError, match=r"\(read as mlir\)"):
        read_sharding("[[0], [7]]", MESH, (6, 6))
    with pytest.raises(MeshError, match="unknown axis 'z'") as raised:
        read_sharding("x, z", MESH, (6, 6))
    assert "notation" not in str(raised.value)


def test_an_unknown_notation_is_named() -> None:
    with pytest.raises(NotationError, match="no notation 'lama'"):
        read_sharding("x", MESH, (6,), notation="lama")


def test_native_text_needs_a_mesh() -> None:
    with pytest.raises(NotationError, match="give a mesh"):
        read_sharding("x, y")


@given(specs_with_shapes())
def test_native_texts_are_read_as_native(case: tuple[reshard.ShardingSpec, object]) -> None:
    spec = case[0]
    reading = read_sharding(str(spec), spec.mesh)
    assert reading.notation.name == "native"
    assert reading.sharding is spec
    assert reading.notation.text(spec) == str(spec)


PIECES = st.sampled_from(
    [
        *("[", "]", "[[", "{", "}", "(", ")", ",", "'x'", '"x"', "x", "0", "6", "<@m", "sum", "="),
        *("|", ":", "P(", "Shard(", "RaggedShard(", "PartitionedShard(", "tp=", "grid=2x3"),
        *("jax:", "mlir:", "scalapack:", "megatron:", "ragged:", "partitioned:", "-"),
    ]
)


@given(st.lists(PIECES, max_size=8).map(" ".join))
def test_no_text_is_a_foreign_error(text: str) -> None:
    with contextlib.suppress(LayoutError):
        assert read_sharding(text, MESH, (6, 6)).notation.name in NOTATIONS
