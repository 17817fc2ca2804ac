"""Equal means identical: however a value is spelled, copied, pickled, or made by many at once."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given

import reshard
from reshard._interning import Interned
from reshard.cut_rules import BlockCyclic, Ceil, Nested
from reshard.errors import LayoutError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import RunTable
from reshard.sharding import DimSpec, Level, ShardingSpec
from strategies import LayoutAndContents, Shape, movements, specs_with_shapes


@given(specs_with_shapes())
def test_a_sharding_and_all_in_it_come_back_as_themselves(
    pair: tuple[ShardingSpec, Shape],
) -> None:
    spec, shape = pair
    layout = spec.layout(shape)
    for value in (spec, spec.mesh, spec.dim_specs, layout, layout.tables):
        for again in (
            pickle.loads(pickle.dumps(value)),
            copy.copy(value),
            copy.deepcopy(value),
        ):
            if isinstance(value, tuple):
                assert all(a is b for a, b in zip(again, value, strict=True))
            else:
                assert again is value
    assert spec.layout(shape) is layout


def test_a_table_in_use_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, 0, 7919, 0)]
    table = RunTable(7919, 1, rows)
    for arguments in ((7919.0, 1, rows), (7919, True, rows), (7919, 1, [(0, 0, 7919.0, 0)])):
        with pytest.raises(LayoutError):
            RunTable(*arguments)
    monkeypatch.delattr(RunTable, "_build")
    assert RunTable(7919, 1, [(0, 0, 7919, 0)]) is table
    with pytest.raises(AttributeError, match="_build"):
        RunTable(7919, 1, [(0, 0, 7918, 0)])


@given(movements())
def test_a_plan_comes_back_as_itself(
    movement: tuple[LayoutAndContents, LayoutAndContents],
) -> None:
    (source, _), (target, _) = movement
    plan = reshard.plan(source, target, dtype="int8")
    assert pickle.loads(pickle.dumps(plan)) is plan
    assert copy.deepcopy([plan])[0] is plan


def test_equal_layouts_of_different_origin_are_one() -> None:
    mesh = DeviceMesh.of(x=2)
    named = DeviceMesh.of(tensor=2, name="other")
    from_spec = reshard.spec(mesh, "x, -").layout((4, 2))
    boxes = [(0, reshard.Box((0, 0), (2, 2))), (1, reshard.Box((2, 0), (4, 2)))]
    assert from_spec is reshard.spec(named, "tensor, -").layout((4, 2))
    assert from_spec is Layout.from_boxes((4, 2), boxes)
    assert from_spec is Layout.flat_ranges((4, 2), {0: (0, 4), 1: (4, 8)})
    assert from_spec is Layout.flat_ranges((4, 2), {1: (2, 4), 0: (0, 2)}, dims=1)


def test_rules_that_cut_alike_give_one_table() -> None:
    assert Ceil().table(8, 4) is BlockCyclic(2).table(8, 4)
    assert Ceil().table(8, 4) is Nested(((Ceil(), 2), (Ceil(), 2))).table(8, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: DeviceMesh.of(x=2), lambda: DeviceMesh.of(x=2, devices=[1, 0])),
        (lambda: DeviceMesh.of(x=2), lambda: DeviceMesh.of(x=2, name="pod")),
        (lambda: DimSpec(["x"]), lambda: DimSpec(["x"], is_open=True)),
        (lambda: DimSpec(["x"]), lambda: DimSpec(["x"], priority=1)),
        (lambda: DimSpec(["x", "y"]), lambda: DimSpec([Level(["x"]), Level(["y"])])),
        (lambda: RunTable(4, 1, [(0, 0, 4, 0)]), lambda: RunTable(5, 1, [(0, 0, 4, 0)])),
        (lambda: Layout.replicated((4,), 2), lambda: Layout.whole((4,), [0], 2)),
        (lambda: Layout.whole((4,), [0], 1), lambda: Layout.whole((4,), [0], 2)),
        (lambda: Layout.whole((4, 0), [0], 1), lambda: Layout.whole((0, 4), [0], 1)),
    ],
)
def test_different_values_are_different(
    one: Callable[[], object], other: Callable[[], object]
) -> None:
    a, b = one(), other()
    assert a is not b
    assert a != b
    assert a is one()


def test_many_threads_get_one_object() -> None:
    found: list[ShardingSpec] = []
    barrier = threading.Barrier(8)

    def build() -> None:
        for size in range(2, 40):
            barrier.wait()
            mesh = DeviceMesh.of(x=size, y=2, name="threads")
            found.append(reshard.spec(mesh, "x, y"))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 * 38
    assert len(set(map(id, found))) == 38


def test_unused_values_are_freed() -> None:
    mesh = DeviceMesh.of(only_here=3)
    reference = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert reference() is None


def test_classes_do_not_share_their_values() -> None:
    class One(Interned):
        def interning_key(self) -> object:
            return 1

    class Other(One):
        pass

    one, other = One(), Other()
    assert one is not other
    assert One() is one and Other() is other


def test_a_replaced_field_gives_the_interned_value() -> None:
    mesh = DeviceMesh.of(dp=2, tp=4)
    sharding = reshard.spec(mesh, "tp, - | max(dp)")
    assert mesh.replace(name="other") is DeviceMesh.of(name="other", dp=2, tp=4)
    assert sharding.replace(partial_axes=()) is reshard.spec(mesh, "tp, -")
    assert sharding.replace(partial_axes=()).replace(partial_axes=["dp"]).reduction == "sum"
    layout = sharding.layout((8, 4))
    assert layout.replace() is layout
    assert layout.replace(slots=9).slots == 9


def test_a_replaced_field_is_validated() -> None:
    mesh = DeviceMesh.of(dp=2, tp=4)
    with pytest.raises(reshard.errors.MeshError, match="8"):
        mesh.replace(devices=[0, 1])
    with pytest.raises(TypeError, match="a DeviceMesh has no field ranks"):
        mesh.replace(ranks=[0, 1])


def test_a_key_is_the_subclass_duty() -> None:
    class Keyless(Interned):
        pass

    with pytest.raises(NotImplementedError):
        Keyless()


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    program = (
        "import reshard\n"
        "mesh = reshard.DeviceMesh.of(x=3)\n"
        "print(reshard.spec(mesh, 'x, -').layout((5, 2)).fingerprint.hex())"
    )
    here = reshard.spec(DeviceMesh.of(x=3), "x, -").layout((5, 2))
    # Another hash seed, so that nothing can depend on the order of a set.
    there = subprocess.run(
        [sys.executable, "-R", "-c", program], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here.fingerprint.hex()
    assert len(here.fingerprint) == 16
    other = reshard.spec(DeviceMesh.of(x=3), "-, x").layout((5, 2))
    assert other.fingerprint != here.fingerprint
