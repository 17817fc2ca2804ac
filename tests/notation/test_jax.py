"""JAX's notation: texts, and real objects of JAX over eight devices in a process of its own."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from notation.flat_specs import flat_specs
from reshard.errors import (
    LayoutError,
    MeshError,
    MissingExtraError,
    NotationError,
    SpecError,
)
from reshard.mesh import DeviceMesh
from reshard.notation.jax import (
    jax_text,
    parse_jax,
    sharding_of_jax,
    to_named_sharding,
    to_partition_spec,
)
from reshard.sharding import ShardingSpec
from strategies import Shape, specs_with_shapes

MESH = DeviceMesh.of(x=2, y=2, z=4)
NAMES = ("x", "y", "z")


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("P()", ""),
        ("P(None)", "-"),
        ("P('x')", "x"),
        ('PartitionSpec("x", ("y", "z"), None)', "x, y z, -"),
        (" jax.sharding.PartitionSpec( ('z', 'x') , )", "z x"),
        ("P(('x',), (), ['y'])", "x, -, y"),
        ("P(UNCONSTRAINED, 'x')", "?, x"),
        ("P(P.UNCONSTRAINED, PartitionSpec.UNCONSTRAINED)", "?, ?"),
        ("P('x', unreduced={'y'})", "x | sum(y)"),
        ("P('x', unreduced=frozenset({'z', 'y'}))", "x | sum(y z)"),
        ("P('x', reduced={'y'})", "x | replicated(y)"),
        ("P('x', unreduced=set(), reduced=frozenset())", "x"),
    ],
)
def test_a_text_means_its_sharding(text: str, native: str) -> None:
    assert parse_jax(text, MESH) is reshard.spec(MESH, native)


def test_trailing_entries_may_be_left_out() -> None:
    assert parse_jax("P('y')", MESH, (4, 4, 4)) is reshard.spec(MESH, "y, -, -")
    assert parse_jax("P()", MESH, ()) is reshard.spec(MESH, "")


def test_the_printed_form_of_a_named_sharding_is_read() -> None:
    printed = (
        "NamedSharding(mesh=Mesh('x': 2, 'y': 4, axis_types=(Auto, Auto)), "
        "spec=P('x', ('y',)), memory_kind=unpinned_host)"
    )
    assert parse_jax(printed) is reshard.spec(DeviceMesh.of(x=2, y=4), "x, y")
    older = "NamedSharding(mesh=Mesh('x': 2, 'y': 4), spec=PartitionSpec(None, 'y'))"
    turned = DeviceMesh.of(x=2, y=4, devices=[7, 6, 5, 4, 3, 2, 1, 0])
    assert parse_jax(older, turned) is reshard.spec(turned, "-, y")
    with pytest.raises(NotationError, match="over the mesh x=2,y=4, where the mesh x=2,y=2,z=4"):
        parse_jax(older, MESH)
    assert parse_jax("NamedSharding(mesh, P('x'))", MESH) is reshard.spec(MESH, "x")
    with pytest.raises(NotationError, match="whose mesh is not printed"):
        parse_jax("NamedSharding(mesh, P('x'))")
    with pytest.raises(NotationError, match="without a PartitionSpec"):
        parse_jax("NamedSharding(mesh, spec)", MESH)


@given(flat_specs(("sum",)))
def test_written_texts_are_read_back(spec: ShardingSpec) -> None:
    in_order = sorted(spec.partial_axes, key=lambda axis: spec.mesh.axis_names.index(axis.name))
    ordered = ShardingSpec(spec.mesh, spec.dim_specs, partial_axes=in_order)
    text = jax_text(spec)
    assert parse_jax(text, spec.mesh) is ordered
    assert jax_text(ordered) == text


def test_open_dimensions_are_written() -> None:
    spec = reshard.spec(MESH, "?, x")
    assert jax_text(spec) == "PartitionSpec(PartitionSpec.UNCONSTRAINED, 'x')"
    assert parse_jax(jax_text(spec), MESH) is spec


@given(specs_with_shapes())
def test_any_sharding_is_written_or_refused(pair: tuple[ShardingSpec, Shape]) -> None:
    spec, shape = pair
    try:
        text = jax_text(spec)
    except NotationError as error:
        refusal = str(error)
    else:
        refusal = None
        again = parse_jax(text, spec.mesh)
        assert (again.dim_specs, set(again.partial_axes)) == (
            spec.dim_specs,
            set(spec.partial_axes),
        )
        assert again.layout(shape).tables == spec.layout(shape).tables
    assert refusal is None or refusal.startswith("JAX cannot express `")


@pytest.mark.parametrize(
    ("native", "part"),
    [
        ("x / y", "x / y"),
        ("x@stride2", "x@stride2"),
        ("z:(1)2", "z:(1)2"),
        ("x ?", "x ?"),
        ("x !1", "x !1"),
        ("x | replicated(y)", "replicated(y)"),
        ("x | max(y)", "max(y)"),
        ("x | mean(y)", "mean(y)"),
        ("x | only(y=0)", "only(y=0)"),
    ],
)
def test_errors_name_the_part_that_cannot_be_expressed(native: str, part: str) -> None:
    spec = reshard.spec(MESH, native)
    with pytest.raises(NotationError) as caught:
        jax_text(spec)
    assert str(caught.value).startswith(f"JAX cannot express `{part}` of the sharding `{spec}`: ")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", NotationError, "cannot read ''; write PartitionSpec"),
        ("P('x'", NotationError, "cannot read"),
        ("Q('x')", NotationError, "cannot read"),
        ("'x', None", NotationError, "cannot read"),
        ("P('\\x78')", NotationError, "cannot read"),
        ("P(x)", NotationError, "cannot read the entry 'x'"),
        ("P(1)", NotationError, "cannot read the entry '1'"),
        ("P(*'x')", NotationError, "cannot read the entry"),
        ("P(('x', None))", NotationError, "cannot read the entry 'None'"),
        ("P('x', unreduced=None)", NotationError, "cannot read the entry 'None'"),
        ("P('x', memory='y')", NotationError, "unknown argument 'memory'"),
        ("P(**x)", NotationError, "unknown argument None"),
        ("P(unreduced={'x'}, unreduced={'y'})", NotationError, "unreduced is given twice"),
        ("P(" + "-" * 900 + "1)", NotationError, "cannot read"),
        ("P('w')", MeshError, "unknown axis 'w'"),
        ("P('x', unreduced={'w'})", MeshError, "unknown axis 'w'"),
        ("P('x', 'x')", SpecError, "axis x is used in dimension 0 and dimension 1"),
        ("P('x', unreduced={'x'})", SpecError, "dimension 0 and the partial axes"),
        ("P('x', reduced={'x'})", SpecError, "dimension 0 and the replicated axes"),
        ("P('')", MeshError, "axis name ''"),
        ("P('z:(1)2')", MeshError, r"axis name 'z:\(1\)2'"),
        ("P(None, None, None)", NotationError, r"3 entries for a tensor of shape \[4, 4\]"),
        ("P(" + "(" * 300 + ")" * 300 + ")", NotationError, "cannot read"),
    ],
)
def test_a_text_that_means_nothing_is_refused(
    text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        parse_jax(text, MESH, (4, 4))
    assert type(caught.value) is error
    assert str(caught.value).endswith(f"(in the JAX text `{text}`)")


def test_axes_need_a_mesh() -> None:
    with pytest.raises(NotationError, match="names mesh axes; give a mesh"):
        parse_jax("P('x')")


@given(st.text(alphabet="P('xyz, None)={}unred[]*.:NamedShrig2\\", max_size=24))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_jax(text, MESH)
    except LayoutError as error:
        refusal = str(error)
    else:
        refusal = None
        assert spec.mesh is MESH
    assert refusal is None or "in the JAX text" in refusal


def test_reading_and_writing_texts_does_not_load_jax() -> None:
    program = (
        "import sys\n"
        "from reshard.mesh import DeviceMesh\n"
        "from reshard.notation.jax import jax_text, parse_jax\n"
        "from reshard.notation.jax import is_jax\n"
        "print(jax_text(parse_jax('P(None)', DeviceMesh.of(x=2))), is_jax(1))\n"
        "print('jax' in sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["PartitionSpec(None)", "False", "False"], "")


def random_case(rng: random.Random) -> dict[str, Any]:
    """A mesh over some of eight devices in any order, and a sharding of a shape that divides."""
    mesh_shape: list[int] = []
    for _ in range(rng.randint(1, 3)):
        mesh_shape.append(
            rng.choice([n for n in (1, 2, 3, 4, 8) if n * math.prod(mesh_shape) <= 8])
        )
    names = list(NAMES[: len(mesh_shape)])
    devices = rng.sample(range(8), math.prod(mesh_shape))
    rank = rng.randint(0, 3)
    entries: list[Any] = [[] for _ in range(rank)]
    unreduced = []
    for name in rng.sample(names, len(names)):
        place = rng.randrange(-2, rank + 1)
        if 0 <= place < rank:
            entries[place].append(name)
        elif place == rank:
            unreduced.append(name)
    size_of = dict(zip(names, mesh_shape, strict=True))
    shape = [math.prod(size_of[n] for n in entry) * rng.randint(1, 3) for entry in entries]
    if rank and not entries[-1]:
        kind = rng.choice(["left out", "open", "whole"])
        if kind == "left out":
            entries.pop()
        elif kind == "open" and len(unreduced) < len(names):
            entries[-1] = "?"
    return {
        "mesh_shape": mesh_shape,
        "axis_names": names,
        "devices": devices,
        "entries": entries,
        "unreduced": unreduced,
        "shape": shape,
    }


@pytest.fixture(scope="module")
def cases_and_answers() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Random cases, and what a process with JAX over eight devices says to them."""
    pytest.importorskip("jax")
    rng = random.Random(4)
    cases = [random_case(rng) for _ in range(150)]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("jax_process.py")],
        input=json.dumps(cases),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return cases, json.loads(done.stdout)


Asked = tuple[list[dict[str, Any]], dict[str, Any]]


def test_every_device_holds_the_indices_that_jax_gives_it(cases_and_answers: Asked) -> None:
    cases, told = cases_and_answers
    for case, answer in zip(cases, told["answers"], strict=True):
        names = case["axis_names"]
        mesh = DeviceMesh("mesh", case["mesh_shape"], names, case["devices"])
        words = [
            "UNCONSTRAINED" if entry == "?" else repr(tuple(entry)) if entry else "None"
            for entry in case["entries"]
        ]
        words += [f"unreduced={set(case['unreduced'])!r}"] * bool(case["unreduced"])
        spec = parse_jax(f"P({', '.join(words)})", mesh, case["shape"])
        layout = spec.layout(case["shape"])
        assert sorted(answer["boxes"]) == sorted(map(str, layout.holders)), case
        for rank in layout.holders:
            ((start, stop),) = layout.boxes(rank)
            expected = answer["boxes"][str(rank)]
            assert [list(pair) for pair in zip(start, stop, strict=True)] == expected, case
        assert answer["spec"] == str(spec), case
        assert answer["devices"] == case["devices"], case


def test_the_objects_and_their_texts_agree(cases_and_answers: Asked) -> None:
    cases, told = cases_and_answers
    for case, answer in zip(cases, told["answers"], strict=True):
        claims = [key for key in answer if key.startswith("is_")]
        assert len(claims) == 5
        assert [key for key in claims if not answer[key]] == [], case
    asked = [str(case["entries"]) + str(case["unreduced"]) for case in cases]
    assert any("?" in words for words in asked) and any(case["unreduced"] for case in cases)


def test_other_objects_of_jax(cases_and_answers: Asked) -> None:
    others = cases_and_answers[1]["others"]
    assert others["abstract"] == "DeviceMesh(x=4,y=2)"
    assert others["reduced"] == "x | replicated(y)"
    assert (others["single"], others["single_devices"]) == ("-, -", [3])
    assert others["single_array"] == "ShardingSpec(DeviceMesh(, devices=[5]), '-, -')"
    assert others["are_jax"] == [True, True, True, False]
    expected = [
        "NotationError: a single device; give the shape",
        "NotationError: a PartitionSpec names mesh axes; give a mesh",
        "MeshError: unknown axis 'z'",
        "NotationError: a Mesh names no mesh axes",
        "NotationError: str is not an object of JAX",
        "NotationError: SingleDeviceSharding is not a mesh of JAX",
        "NotationError: an empty mesh of JAX",
        "NotationError: no device for rank 9 of the mesh",
        "NotationError: no device for rank 1 of the mesh",
        "NotationError: JAX refuses the sharding `? | sum(x)`: ",
    ]
    for refused, begin in zip(others["refused"], expected, strict=True):
        assert refused.startswith(begin)


class PartitionSpec(tuple[Any, ...]):
    """What a PartitionSpec is in older versions of JAX: a tuple."""

    __module__ = "jax._src.partition_spec"
    UNCONSTRAINED = object()


def test_a_partition_spec_that_is_a_tuple_is_read() -> None:
    older = PartitionSpec(("x", None, ("y", "z"), PartitionSpec.UNCONSTRAINED))
    assert sharding_of_jax(older, MESH) is reshard.spec(MESH, "x, -, y z, ?")
    assert sharding_of_jax(older, MESH, (2,) * 5) is reshard.spec(MESH, "x, -, y z, ?, -")
    with pytest.raises(NotationError, match="mesh axis 3 is not named by a text"):
        sharding_of_jax(PartitionSpec((3,)), MESH)


def test_without_jax_objects_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    for make in (to_partition_spec, to_named_sharding):
        with pytest.raises(MissingExtraError, match="pip install jax"):
            make(reshard.spec(MESH, "x"))
        with pytest.raises(NotationError, match="JAX cannot express"):
            make(reshard.spec(MESH, "x@pad"))
