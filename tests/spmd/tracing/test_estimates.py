"""How long each rank computes: against what the parts really are, and by hand."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.cost import load_preset
from reshard.errors import LayoutError
from reshard.spmd.core.backend import library
from reshard.spmd.core.local_work import Function, LocalWork, stretches_of
from reshard.spmd.core.operator import Operator, operators, rule_of
from reshard.spmd.propagation.by_cost.cost_model import least_s, moved_bytes, operations_of
from reshard.spmd.shards.runner import InProcess
from reshard.spmd.tracing.estimates import local_sizes, shapes_of
from reshard.spmd.tracing.trace import Trace
from reshard.topology import Device, Link, Topology
from spmd.traced_functions import FUNCTIONS, Traced

MESH = DeviceMesh.of(x=2, y=3)
LINK = Link(1e9)


def on(device: Device | None, ranks: int = 6) -> Topology:
    return Topology([0] * ranks, within_host=LINK, device=device)


# With these the seconds are operations, and bytes.
OPERATIONS = on(Device(1e300, (("float32", 1.0),)))
BYTES = on(Device(1.0))


def counts(traced: Trace) -> list[tuple[float, ...]]:
    return [one.compute_s for one in traced.operations]


def test_each_rank_multiplies_what_it_has() -> None:
    """7 rows are 4 and 3, 5 in the middle are 2, 2 and 1."""
    x = sp.abstract((7, 5), "float32", spec(MESH, "x, y"))
    w = sp.abstract((5, 9), "float32", spec(MESH, "y, -"))
    (product,) = counts(sp.trace(lambda x, w: x @ w, x, w, topology=OPERATIONS))
    expected = [2 * rows * middle * 9 for rows in (4, 3) for middle in (2, 2, 1)]
    assert list(product) == expected
    assert sum(expected) == 2 * 7 * 5 * 9
    (product,) = counts(sp.trace(lambda x, w: x @ w, x, w, topology=BYTES))
    assert list(product) == [
        4 * (rows * middle + middle * 9 + rows * 9) for rows in (4, 3) for middle in (2, 2, 1)
    ]


@pytest.mark.parametrize("left", ["-, -", "x, -", "-, x", "x, y", "y, x", "x y, -", "-, y x"])
@pytest.mark.parametrize("right", ["-, -", "y, -", "-, x y", "x, y", "-, y"])
def test_ranks_share_the_dense_product(left: str, right: str) -> None:
    """Over the ranks that do different work it adds up to the product of whole matrices."""
    a = sp.abstract((7, 10), "float32", spec(MESH, left))
    b = sp.abstract((10, 11), "float32", spec(MESH, right))
    traced = sp.trace(lambda a, b: a @ b, a, b, topology=OPERATIONS)
    (one,) = traced.operations
    # What each rank multiplies, by its parts as they are.
    parts: dict[tuple[Any, ...], float] = {}
    for place, rank in enumerate(traced.ranks):
        boxes = []
        for kind, ran in zip(one.operands, one.runs_with, strict=True):
            assert kind is not None and ran is not None
            boxes.append(kind.with_spec(ran).layout.boxes(rank)[:1])
        rows, middle = boxes[0][0].shape if boxes[0] else (0, 0)
        columns = boxes[1][0].shape[1] if boxes[1] else 0
        assert one.compute_s[place] == pytest.approx(2 * rows * middle * columns, abs=1e-9)
        parts[tuple(map(str, boxes))] = one.compute_s[place]
    assert sum(parts.values()) == pytest.approx(2 * 7 * 10 * 11)


class Counting(InProcess):
    """Runs in this process, and counts what each rank's functions are given and give."""

    def __init__(self) -> None:
        super().__init__(library("numpy"))
        self.bytes: list[list[int]] = []

    def functions(self, operator: Operator, work: LocalWork) -> list[Function]:
        here = [0] * len(work.ranks)
        self.bytes.append(here)
        skipped = operator.reads_part

        def counted(place: int, function: Function) -> Function:
            def run(*operands: Any) -> Any:
                found = function(*operands)
                results = found if isinstance(found, tuple | list) else [found]
                read = 0 if skipped else sum(getattr(one, "nbytes", 0) for one in operands)
                here[place] = read + sum(one.nbytes for one in results)
                return found

            return run

        return [counted(place, one) for place, one in enumerate(super().functions(operator, work))]


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
@pytest.mark.parametrize("strategy", ["eager", "aggressive"])
def test_bytes_are_those_of_the_arrays_that_ranks_have_in_a_run(
    case: Traced, strategy: str
) -> None:
    traced = sp.trace(case.function, *case.types(), strategy=strategy, topology=BYTES)
    runner = Counting()
    traced.run(*case.arrays(), runner=runner)
    computed = [one for one in traced.operations if one.operation.operator != "with_sharding"]
    # What is run twice alike is compiled once.
    distinct = list(
        {
            (one.operation.operator, one.operands, str(one.operation.attributes)): one
            for one in computed
        }.values()
    )
    assert len(distinct) == len(runner.bytes)
    for one, found in zip(distinct, runner.bytes, strict=True):
        for place in range(len(traced.ranks)):
            counted = found[place % len(found)]
            row = operators.get(one.operation.operator)
            if row is not None and row.reads_part:
                counted *= 2
            assert one.compute_s[place] == counted, one.operation


def test_uneven_ranks_are_told_apart() -> None:
    x = sp.abstract((7, 5), "float32", spec(DeviceMesh.of(x=3), "x, -"))
    traced = sp.trace(sp.exp, x, topology=on(Device(40.0), 3))
    assert traced.compute_s == {0: 3.0, 1: 3.0, 2: 1.0}
    assert traced.seconds_s == 3.0 and traced.inserted_s == 0.0
    assert "estimated time 3.00 s: each rank computes 1.00 s to 3.00 s" in str(traced)


def test_a_rank_that_has_nothing_computes_nothing() -> None:
    x = sp.abstract((2, 5), "float32", spec(DeviceMesh.of(x=4), "x, -"))
    traced = sp.trace(lambda x: x + 1, x, topology=on(Device(40.0), 4))
    assert counts(traced) == [(1.0, 1.0, 0.0, 0.0)]


def test_times_add_up() -> None:
    topology = load_preset("h100-8").topology()
    for case in FUNCTIONS:
        traced = sp.trace(case.function, *case.types(), topology=topology)
        assert traced.compute_s is not None and traced.inserted_s is not None
        total = sum(max(one.compute_s) + one.inserted_s for one in traced.operations)
        assert traced.seconds_s == pytest.approx(total)
        assert [one.seconds_s for one in traced.operations] == [
            max(one.compute_s) + one.inserted_s for one in traced.operations
        ]
        for place, rank in enumerate(traced.ranks):
            assert traced.compute_s[rank] == pytest.approx(
                sum(one.compute_s[place] for one in traced.operations)
            )


def test_a_topology_without_devices_tells_of_collectives_only() -> None:
    x = sp.abstract((8, 8), "float32", spec(MESH, "-, x"))
    w = sp.abstract((8, 8), "float32", spec(MESH, "x, -"))
    traced = sp.trace(lambda x, w: (x @ w).reduced(), x, w, topology=on(None))
    assert traced.compute_s is None and not traced.counts_compute
    assert traced.seconds_s == traced.inserted_s and traced.seconds_s
    text = str(traced)
    assert "the topology does not say how fast devices compute" in text
    assert text.splitlines()[0].split()[-2:] == ["live", "collectives"]
    page = traced.html()
    assert "collectives only: no device is known" in page
    found = json.loads(traced.to_json())
    assert found["compute_s"] is None and found["operations"][0]["compute_s"] is None
    assert found["inserted_s"] == found["seconds_s"] == traced.seconds_s
    bare = json.loads(sp.trace(lambda x, w: x @ w, x, w).to_json())
    assert bare["seconds_s"] is bare["inserted_s"] is bare["operations"][0]["seconds_s"] is None


def test_table_page_and_document_say_the_same() -> None:
    x = sp.abstract((512, 512), "float32", spec(MESH, "-, x"))
    w = sp.abstract((512, 512), "float32", spec(MESH, "x, -"))
    device = Device(1e9, (("float32", 1e9),))
    traced = sp.trace(lambda x, w: (x @ w).reduced(), x, w, topology=on(device))
    product, reduced = traced.operations
    assert product.busiest_s == pytest.approx(2 * 512 * 256 * 512 / 1e9)
    assert reduced.busiest_s == 0 and reduced.inserted_s > 0
    lines = str(traced).splitlines()
    assert lines[0].split()[-3:] == ["compute", "collectives", "time"]
    assert lines[4].split()[-5:] == ["134", "ms", "-", "134", "ms"]
    assert lines[-1].startswith("estimated time 1") and "each rank computes 134 ms" in lines[-1]
    page = traced.html()
    for words in ("134 ms", "estimated time", "each computes", "of it collectives"):
        assert words in page
    found = json.loads(traced.to_json())
    assert found["compute_s"] == list((traced.compute_s or {}).values())
    assert found["operations"][0]["compute_s"] == list(product.compute_s)
    assert found["operations"][1]["inserted_s"] == reduced.inserted_s
    assert found["seconds_s"] == pytest.approx(found["inserted_s"] + found["compute_s"][0])


def test_a_rank_that_the_topology_has_not_is_told() -> None:
    x = sp.abstract((8, 8), "float32", spec(MESH, "x, y"))
    with pytest.raises(LayoutError, match="rank 4 of a topology over ranks 0 to 3"):
        sp.trace(sp.exp, x, topology=on(Device(1.0), 4))


def test_operands_decide_the_rate() -> None:
    rates = (("bfloat16", 4.0), ("float32", 2.0))
    topology = on(Device(1e300, rates), 1)
    narrow, wide = (sp.abstract((2, 2), name) for name in ("bfloat16", "float32"))
    for operands, rate in (((narrow, narrow), 4.0), ((narrow, wide), 2.0), ((wide, wide), 2.0)):
        (one,) = sp.trace(lambda a, b: a @ b, *operands, topology=topology).operations
        assert one.compute_s == (16 / rate,)


def by_hand(subscripts: str, *shapes: tuple[int, ...]) -> int:
    """Twice the products that a loop over all letters makes."""
    sizes = {}
    for letters, shape in zip(subscripts.partition("->")[0].split(","), shapes, strict=True):
        sizes |= dict(zip(letters, shape, strict=True))
    return 2 * sum(1 for _ in itertools.product(*map(range, sizes.values())))


def test_operations_are_those_of_loops() -> None:
    cases: list[tuple[str, list[tuple[int, ...]], dict[str, Any], float]] = [
        ("matmul", [(2, 3, 4), (4, 5)], {}, by_hand("bij,jk->bik", (2, 3, 4), (4, 5))),
        ("vecdot", [(3, 4), (4,)], {}, by_hand("ij,j->i", (3, 4), (4,))),
        (
            "einsum",
            [(2, 3, 4), (2, 5, 4)],
            {"subscripts": "bik,bjk->bij"},
            by_hand("bik,bjk->bij", (2, 3, 4), (2, 5, 4)),
        ),
        # A window of 3 over 8, in two groups of 3 channels each: 6 places.
        ("convolution", [(2, 6, 8), (10, 3, 3)], {"groups": 2}, 2 * 2 * 6 * 10 * 3 * 3),
        # 8 heads, 5 queries, 7 keys: scores over 16 channels, then 32 of the values.
        (
            "attention",
            [(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)],
            {},
            2 * 2 * 8 * 5 * 7 * (16 + 32),
        ),
        ("cholesky", [(2, 6, 6)], {}, 2 * 6**3 / 3),
        ("triangular_solve", [(2, 6, 6), (2, 6, 5)], {}, 2 * 6 * 6 * 5),
        ("solve", [(6, 6), (3, 6, 5)], {}, 2 * 6**3 / 3 + 2 * 36 * 15),
        ("solve", [(2, 6, 6), (6,)], {}, 2 * (2 * 6**3 / 3 + 2 * 36)),
        ("qr", [(8, 3)], {}, 4 * (8 * 9 - 9)),
        # Rows of a table are read, not multiplied by ones and zeros.
        ("take", [(100, 8), (4,)], {"axis": 0}, 0),
        ("embedding", [(100, 8), (4,)], {}, 0),
        ("sum", [(4, 8)], {"axis": 1}, 0),
        ("add", [(4, 8), (8,)], {}, 0),
    ]
    for name, shapes, attributes, expected in cases:
        rule = rule_of(name, shapes, **attributes)
        assert operations_of(name, rule) == pytest.approx(expected), name


def test_rules_of_ones_own_are_products_where_they_sum_over_several_operands() -> None:
    rule = rule_of("matmul", [(3, 4), (4, 5)])
    assert operations_of("a_users_own", rule) == 2 * 3 * 4 * 5
    assert operations_of("a_users_own", rule_of("sum", [(3, 4)], axis=0)) == 0


def test_operands_read_in_part_count_in_part() -> None:
    table, rows = 4 * 100 * 8, 4 * 4 * 8
    assert moved_bytes("take", [table, 16], [rows]) == 16 + 2 * rows
    assert moved_bytes("sort", [table], [table]) == 2 * table
    assert moved_bytes("arange", [], [40]) == 40


def test_time_is_the_longer_of_work_and_memory_traffic() -> None:
    device = Device(10.0, (("float32", 5.0), ("int8", 20.0)))
    assert least_s(device, 100, 10, ["float32"]) == 20
    assert least_s(device, 100, 10, ["int8"]) == 5
    assert least_s(device, 100, 1000, ["int8"]) == 100
    # Types that are not given, and devices that give none.
    assert least_s(device, 100, 10, ["float64"]) == 20
    assert least_s(Device(10.0), 100, 10, ["float64"]) == 1


def test_factors_of_one_dimension_are_cut_from_the_major_one_on() -> None:
    rule = rule_of("attention", [(2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)])
    here = local_sizes(rule, [(2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 32), (2, 4, 5, 32)])
    assert math.prod(here) == 2 * 4 * 5 * 7 * 16 * 32
    grouped = rule_of("convolution", [(2, 6, 8), (10, 3, 3)], groups=2)
    assert math.prod(local_sizes(grouped, [(2, 3, 8), (5, 3, 3), (2, 5, 6)])) == 2 * 5 * 6 * 3 * 3
    nothing = rule_of("matmul", [(4, 4), (4, 4)])
    assert math.prod(local_sizes(nothing, [(0, 4), (4, 4), (0, 4)])) == 0


def test_shapes_are_those_of_each_rank() -> None:
    kind = sp.abstract((7, 5), "float32", spec(MESH, "x, y"))
    assert shapes_of(kind, (0, 2, 5)) == ((4, 2), (4, 1), (3, 1))
    assert shapes_of(sp.abstract((7, 5)), (0, 1)) == ((7, 5), (7, 5))
    few = sp.abstract((1, 5), "float32", spec(MESH, "x, -"))
    assert shapes_of(few, (0, 3)) == ((1, 5), (0, 5))


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"is_causal": True, "window": 5}])
@pytest.mark.parametrize("rule", ["", "@zigzag"])
def test_turns_of_ring_attention_work_on_pairs_that_see_each_other(
    rule: str, mask: dict[str, Any]
) -> None:
    """On the busiest rank of each turn, counted one by one."""
    parts, size, heads, width = 3, 12, 2, 4
    cut = spec(DeviceMesh.of(x=parts), f"-, -, x{rule}, -")
    places = [
        [at for start, stop in one for at in range(start, stop)]
        for one in stretches_of(cut, 2, size)
    ]
    reach = mask.get("window", size)

    def sees(query: int, key: int) -> bool:
        return not mask or 0 <= query - key < reach

    busiest = [
        max(
            sum(sees(q, k) for q in places[rank] for k in places[(rank + turn) % parts])
            for rank in range(parts)
        )
        for turn in range(parts)
    ]
    x = sp.abstract((1, heads, size, width), "float32", cut)

    def weigh(x: Any) -> Any:
        return sp.sum(sp.attention(x, x, x, **mask))

    for function, products in ((weigh, 2), (sp.grad(weigh), 2 + 5)):
        traced = sp.trace(function, x, topology=on(OPERATIONS.device, parts))
        turns = [one for one in traced.operations if one.operation.operator.startswith("attention")]
        total = sum(one.busiest_s for one in turns)
        assert total == products * sum(busiest) * heads * 2 * width


@pytest.mark.parametrize("cut", [1, 2])
def test_attention_and_its_gradients_work_on_pairs_of_queries_and_keys(cut: int) -> None:
    """Two products forward; back the scores and the values' agreement, and three with these."""
    queries, keys, values = (2, 8, 5, 16), (2, 4, 7, 16), (2, 4, 7, 32)
    for name, shapes, channels in (
        ("attention", [queries, keys, values], 16 + 32),
        ("attention_gradient", [queries, keys, values, (2, 8, 5, 32)], 3 * 16 + 2 * 32),
    ):
        rule = rule_of(name, shapes)
        # The first factor is the batch.
        sizes = (rule.sizes[0] // cut, *rule.sizes[1:])
        assert operations_of(name, rule, sizes) == 2 * (2 * 8 * 5 * 7) * channels / cut


MASKS = [{"is_causal": True}, {"window": 3}, {"is_causal": True, "window": 3}]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("parts", [1, 3])
def test_attention_under_a_mask_works_on_pairs_that_see_each_other(
    parts: int, mask: dict[str, Any]
) -> None:
    """On the busiest of ranks that have a part of the queries each, counted one by one."""
    size, heads, width = 12, 2, 4
    reach = mask.get("window", size)
    least = 0 if mask.get("is_causal") else 1 - reach
    busiest = max(
        sum(
            least <= query - key < reach
            for query in range(start, start + size // parts)
            for key in range(size)
        )
        for start in range(0, size, size // parts)
    )
    x = sp.abstract((1, heads, size, width), "float32", spec(DeviceMesh.of(x=parts), "-, -, x, -"))
    keys = sp.abstract(x.shape, "float32", spec(x.spec.mesh, "-, -, -, -"))

    def weigh(x: Any, keys: Any) -> Any:
        return sp.sum(sp.attention(x, keys, keys, **mask))

    for function, products in ((weigh, 2), (sp.grad(weigh), 2 + 5)):
        traced = sp.trace(function, x, keys, topology=on(OPERATIONS.device, parts))
        found = [one for one in traced.operations if one.operation.operator.startswith("attention")]
        total = sum(one.busiest_s for one in found)
        assert total == products * busiest * heads * 2 * width
