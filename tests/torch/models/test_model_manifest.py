"""What ranks list, put together and matched; without any process."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

import reshard
from reshard.errors import NotationError, ReshardError, UsageError
from reshard.layout import Layout

torch = pytest.importorskip("torch")

from reshard.megatron.names import (  # noqa: E402
    MegatronNames,
    PipelineLayers,
)
from reshard.megatron.parameters import LocalParameter  # noqa: E402
from reshard.megatron.ranks import (  # noqa: E402
    MegatronGrids,
    MegatronRanks,
)
from reshard.recipes.naming import Fusion  # noqa: E402
from reshard.torch import BlockQuantized  # noqa: E402
from reshard.torch.models.model_manifest import (  # noqa: E402  # noqa: E402  # noqa: E402
    Entry,
    ModelManifest,
    ModelTensor,
    NameColumns,
    assemble_tensors,
    find_tied_names,
    merge_layouts,
    read_manifest,
    read_manifests,
    read_names,
    shift_ranks,
    write_manifest,
    write_manifests,
    write_names,
)
from reshard.torch.models.naming import renamed  # noqa: E402
from reshard.torch.models.parameters import find_position, member_layout  # noqa: E402
from reshard.torch.refitting.matching import match_tensors  # noqa: E402
from reshard.torch.refitting.plan import RefitPlan, staging_bytes  # noqa: E402

ROWS = reshard.spec(reshard.DeviceMesh.of(tp=2), "tp, -").layout((5, 4))
COLUMNS = reshard.spec(reshard.DeviceMesh.of(tp=2), "-, tp").layout((5, 4))


def manifests(*entries: list[Entry], **others: Any) -> dict[int, ModelManifest]:
    return {rank: ModelManifest(tuple(of), **others) for rank, of in enumerate(entries)}


def problems_of(*entries: list[Entry], **others: Any) -> list[str]:
    return assemble_tensors(manifests(*entries, **others), "source")[1]


def test_layouts_that_ranks_agree_on() -> None:
    listed = [[Entry("w", "int8", (3, 4), ROWS)], [Entry("w", "int8", (2, 4), ROWS)]]
    held, problems = assemble_tensors(manifests(*listed), "source")
    assert (held, problems) == ({"w": ModelTensor("int8", ROWS)}, [])


def test_ranks_of_several_layouts_have_each_a_copy() -> None:
    later = shift_ranks(COLUMNS, 2)
    entries = [
        [Entry("w", "int8", layout.local_shape(rank), layout)]
        for rank, layout in ((0, ROWS), (1, ROWS), (2, later), (3, later))
    ]
    found, problems = assemble_tensors(manifests(*entries), "source")
    assert not problems
    layout = found["w"].layout
    boxes = {rank: layout.boxes(rank) for rank in range(4)}
    both = ROWS, ROWS, later, later
    assert boxes == {rank: one.boxes(rank) for rank, one in enumerate(both)}
    # Of equal parts there is one each, wherever they are.
    again = merge_layouts([ROWS, shift_ranks(ROWS, 2)])
    assert again is not None
    assert again.tables == ROWS.tables
    # Each rank is told what its own layout says.
    entries[3] = [Entry("w", "int8", (1, 1), later)]
    assert (
        "w: rank 3 has local shape [1, 1]" in assemble_tensors(manifests(*entries), "source")[1][0]
    )


def test_layouts_that_are_not_replicas_are_not_merged() -> None:
    mesh = reshard.DeviceMesh.of(x=2)
    partial = reshard.spec(mesh, "-, - | sum(x)").layout((5, 4))
    assert merge_layouts([ROWS, COLUMNS]) is None
    assert merge_layouts([ROWS, shift_ranks(partial, 2)]) is None
    assert merge_layouts([ROWS, shift_ranks(Layout.replicated((5, 3), 2), 2)]) is None


def test_an_alias_is_filled_by_the_other_name() -> None:
    tied = Entry("h", "int8", (3, 4), ROWS, alias_of="e")
    there = [Entry("e", "int8", (3, 4), ROWS), tied]
    other = tied._replace(shape=(2, 4))
    elsewhere = [Entry("e", "int8", (2, 4), ROWS), Entry("h", None, None, ROWS)]
    found, problems = assemble_tensors(
        manifests(there, [*elsewhere[:1], other], elsewhere[1:]), "target"
    )
    assert (list(found), problems) == (["e"], [])
    # A rank where it has memory of its own needs its values.
    own = other._replace(alias_of="")
    found, problems = assemble_tensors(manifests(there, [*elsewhere[:1], own]), "target")
    assert (list(found), problems) == (["e", "h"], [])
    assert found["h"].layout is ROWS
    plain = [Entry("h", "int8", (5, 4), alias_of="e")], [Entry("h", "int8", (5, 4))]
    found, problems = assemble_tensors(manifests(*plain), "target")
    assert (found["h"].layout.holders, problems) == ((1,), [])


def test_any_name_of_a_tied_source_fills_a_target() -> None:
    tied = Entry("h", "int8", (3, 4), ROWS, alias_of="e")
    there = [Entry("e", "int8", (3, 4), ROWS), tied]
    own = [Entry("e", "int8", (2, 4), ROWS), Entry("h", "int8", (2, 4), ROWS)]
    # Both are sources, whatever the target takes.
    found, problems = assemble_tensors(manifests(there, own), "source")
    assert (list(found), problems) == (["e", "h"], [])
    assert find_tied_names(manifests(there, there)) == {"h": "e"}
    assert find_tied_names(manifests(there, own)) == {}
    source, one = {"e": held(), "h": held()}, {"h": "e"}
    assert matched(source, {"e": held()}, one_tensor=one)[1] == []
    assert matched(source, {"h": held()}, one_tensor=one)[1] == []
    assert matched(source, {"e": held()})[1] == ["h: in the source only"]
    assert matched(source | {"left": held()}, {"h": held()}, one_tensor=one)[1] == [
        "left: in the source only"
    ]
    others = {"w": held()}
    assert matched(source | others, others, one_tensor=one)[1] == [
        "e: in the source only",
        "h: in the source only",
    ]


def test_a_rank_without_a_part_may_describe_the_tensor() -> None:
    whole = Layout.whole((5, 4), [1], 2)
    listed = [[Entry("w", None, None, whole)], [Entry("w", "int8", (5, 4), whole)]]
    assert assemble_tensors(manifests(*listed), "source") == ({"w": ModelTensor("int8", whole)}, [])


def test_plain_tensors_are_replicated_on_ranks_that_have_them() -> None:
    held, problems = assemble_tensors(manifests([], [Entry("b", "int8", (3,))], []), "target")
    assert not problems
    assert held["b"].layout is Layout.whole((3,), [1], 2)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (
            [[Entry("w", "int8", (3, 4), ROWS)], [Entry("w", "int8", (5, 2), COLUMNS)]],
            "w: ranks 0 and 1 have different layouts of the source",
        ),
        (
            [[Entry("w", "int8", (3, 4), ROWS)], [Entry("w", "int8", (5, 4))]],
            "w: ranks 0 and 1 have different layouts of the source",
        ),
        (
            [[Entry("w", "int8", (3, 4), ROWS)], [Entry("w", "int16", (2, 4), ROWS)]],
            "w: the source is int8 on rank 0, int16 on rank 1",
        ),
        (
            [[Entry("w", "int8", (2, 4), ROWS)], [Entry("w", "int8", (2, 4), ROWS)]],
            "w: rank 0 has local shape [2, 4], the source's layout says [3, 4]",
        ),
        (
            [[Entry("w", "int8", (3, 4), ROWS)], []],
            "w: rank 1 has no part of the source, which its layout says it holds",
        ),
        (
            [[Entry("b", "int8", (3,))], [Entry("b", "int8", (4,))]],
            "b: a plain tensor of the source is whole on every rank, but it has shape [3] on rank "
            "0, [4] on rank 1",
        ),
        ([[Entry("w", None, None, ROWS)]], "w: no rank has it"),
        (
            [[Entry("b", "int8", (3,)), Entry("b", "int8", (3,))]],
            "b: twice in the source, on rank 0",
        ),
        (
            [[Entry("b", "int8", (3,), own_name="x"), Entry("b", "int8", (3,), own_name="y")]],
            "b: twice in the source, on rank 0, as 'x' and 'y'",
        ),
        (
            [[Entry("b", "int8", (3,), own_name=name)] for name in "xxy"],
            "b: the name of two tensors of the source, 'x' of rank 0 and 'y' of rank 2; give each "
            "a name of its own, and declare ties where they are one",
        ),
        (
            [
                [Entry("w", "int8", (3, 4), ROWS, own_name="x")],
                [Entry("w", "int8", (2, 4), ROWS, own_name="y")],
            ],
            "w: the name of two tensors of the source, 'x' of rank 0 and 'y' of rank 1; give each "
            "a name of its own, and declare ties where they are one",
        ),
    ],
)
def test_mismatches_are_reported(entries: list[list[Entry]], told: str) -> None:
    assert problems_of(*entries) == [told]


def test_a_rank_without_a_part_may_use_another_name() -> None:
    whole = Layout.whole((5, 4), [1], 2)
    described = Entry("w", None, None, whole, own_name="x")
    has = Entry("w", "int8", (5, 4), whole, own_name="y")
    assert problems_of([described], [has]) == []


def test_two_of_megatrons_names_for_one() -> None:
    # The embedding of the first stage, and the output layer of the last, by a table.
    names = MegatronNames(MegatronRanks(pp=2))
    local = LocalParameter((2, 3), dtype="int8")
    first, last = (
        Entry("embed", "int8", (2, 3), None, local, name, 0, None, name) for name in ("e", "out")
    )
    problems = problems_of([first], [last], names=names)
    assert problems[0].startswith("embed: the name of two tensors of the source, 'e' of rank 0")


def test_problems_of_ranks_come_with_the_rank() -> None:
    assert problems_of([], problems=("no memory",)) == ["rank 0: no memory"]


def test_megatron_on_ranks_that_begin_elsewhere() -> None:
    names = MegatronNames(MegatronRanks(tp=2))
    half = LocalParameter((2, 3), tensor_model_parallel=True, dtype="int8")
    entry = Entry("common", "int8", (2, 3), None, half, "own", 0)
    both = {rank: ModelManifest((entry,), names, 4) for rank in (4, 5)}
    held, problems = assemble_tensors({0: ModelManifest(), **both}, "source")
    assert not problems
    assert held["common"].layout.boxes(5) == ROWS_OF_4.boxes(1)
    assert held["common"].layout.holders == (4, 5)
    _, problems = assemble_tensors({4: both[4]}, "source")
    assert problems[0].startswith("the source's ranks do not fit: no roster of rank 1")


ROWS_OF_4 = reshard.spec(reshard.DeviceMesh.of(tp=2), "tp, -").layout((4, 3))


def held(dtype: str = "float32", layout: Layout = ROWS) -> ModelTensor:
    return ModelTensor(dtype, layout)


def matched(source: Any, target: Any, **options: Any) -> tuple[list[Any], list[str]]:
    chosen = {"ties": {}, "cast": False, "strict": True, "transforms": {}} | options
    return match_tensors(source, target, **chosen)


def test_all_mismatches_are_reported_at_once() -> None:
    source = {"a": held(), "b": held(), "d": held(), "left": held()}
    target = {
        "a": held(layout=COLUMNS),
        "b": held("bfloat16"),
        "c": held(),
        "d": held(layout=ROWS_OF_4),
    }
    found, problems = matched(source, target)
    assert [(one.name, one.source, one.target) for one in found] == [("a", ROWS, COLUMNS)]
    assert problems == [
        "b: the source is float32, the target bfloat16; to convert, say cast=True",
        "c: not in the source",
        "d: shape [4, 3], the source's [5, 4]",
        "left: in the source only",
    ]
    assert matched(source, {"a": held()}, strict=False)[1] == []


@pytest.mark.parametrize(
    ("cast", "travels"),
    [
        (True, "bfloat16"),
        ("bfloat16", "bfloat16"),
        ({"w": "BF16"}, "bfloat16"),
        ({"w": True}, "bfloat16"),
        ("float16", "w: cast to float16, but the target is bfloat16"),
        ({"v": True}, "w: the source is float32, the target bfloat16; to convert, say cast=True"),
        (False, "w: the source is float32, the target bfloat16; to convert, say cast=True"),
    ],
)
def test_casts(cast: Any, travels: str) -> None:
    found, problems = matched({"w": held()}, {"w": held("bfloat16")}, cast=cast)
    assert [one.dtype for one in found] + problems == [travels]


def test_the_narrower_type_is_sent() -> None:
    types = {"bfloat16": "bfloat16", "float64": "float32", "int32": "int32", "float32": "float32"}
    for target, travels in types.items():
        found, _ = matched({"w": held()}, {"w": held(target)}, cast=True)
        assert [one.dtype for one in found] == [travels], target


def test_imaginary_parts_are_not_dropped() -> None:
    _, problems = matched({"w": held("complex64")}, {"w": held()}, cast=True)
    assert problems == [
        "w: the source is complex64, the target float32; imaginary parts would be lost: give a "
        "complex target, or the tensor's .real"
    ]
    for source, target in (("complex128", "complex64"), ("float32", "complex64")):
        assert matched({"w": held(source)}, {"w": held(target)}, cast=True)[1] == []


def test_partial_sums_are_not_cast() -> None:
    partial = reshard.spec(reshard.DeviceMesh.of(tp=2), "-, - | sum(tp)").layout((5, 4))
    _, problems = matched({"w": held(layout=partial)}, {"w": held("bfloat16")}, cast=True)
    assert problems == ["w: partial, and float32 to bfloat16; combine it before it is cast"]
    assert matched({"w": held(layout=partial)}, {"w": held()})[1] == []


def test_ties() -> None:
    ties = {"head": "embed"}
    both = {"embed": held(), "head": held()}
    only = {"embed": held()}
    for source, target, expected in (
        (only, both, ["embed", "embed"]),
        (both, both, ["embed", "head"]),
        (both, only, ["embed"]),
        ({"head": held()}, only, ["head"]),
        ({"head": held()}, both, ["head", "head"]),
    ):
        found, problems = matched(source, target, ties=ties)
        assert ([one.source_name for one in found], problems) == (expected, [])


def test_results_of_a_transform_need_no_source() -> None:
    target = {"w": held("float8_e4m3fn"), "w_scale_inv": held()}
    found, problems = matched({"w": held("bfloat16")}, target, transforms={"w": BlockQuantized()})
    assert not problems
    assert [(match.name, match.dtype, match.made_of) for match in found] == [("w", "bfloat16", "w")]


def test_invalid_names_are_refused() -> None:
    with pytest.raises(UsageError, match="'w' became 3"):
        renamed("w", lambda name: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="more `\\*` than the pattern"):
        renamed("a.b", {"a.*": "*.*"})


def test_members_of_a_stack() -> None:
    mesh = reshard.DeviceMesh.of(ep=2, tp=2)
    stacked = reshard.spec(mesh, "ep, tp, -").layout((6, 4, 3))
    for number in range(6):
        member = member_layout(stacked, number)
        assert member.holders == ((0, 1) if number < 3 else (2, 3))
        for slot in range(4):
            at = find_position(stacked, slot, number)
            assert at == (number % 3 if slot in member.holders else None)
            if at is not None:
                ((start, stop),) = stacked.boxes(slot)
                assert member.boxes(slot) == (reshard.Box(start[1:], stop[1:]),)


def test_layouts_on_later_ranks() -> None:
    later = shift_ranks(ROWS, 3)
    assert later.holders == (3, 4)
    assert [later.boxes(rank + 3) == ROWS.boxes(rank) for rank in range(2)] == [True, True]


def plan_of(count: int, staging: int) -> RefitPlan:
    source = {f"{i}.w": held() for i in range(count)} | {"b": held()}
    target = {name: held(layout=COLUMNS) for name in source}
    transforms = {f"{i}.w": BlockQuantized() for i in range(count)}
    found, problems = matched(source, target, transforms=transforms)
    assert not problems
    return RefitPlan(tuple(found), staging)


def test_batches_of_transformed_tensors() -> None:
    (first, *_, direct) = plan_of(5, 1 << 20).matches
    # The largest parts: 3 rows of 4, and 5 rows of 2, of 4 bytes; 40 is 48 when aligned.
    assert (first.name, direct.name, staging_bytes(first)) == ("0.w", "b", 48 + 48)
    assert plan_of(5, 1 << 20).batches == (1, 1, 1, 1, 1, 0)
    assert plan_of(5, 2 * 96).batches == (1, 1, 2, 2, 3, 0)
    assert plan_of(5, 2 * 96).part(0).staging_bytes == 2 * 96
    assert plan_of(0, 0).part(0).staging_bytes == 0
    with pytest.raises(UsageError, match="give at least 192"):
        _ = plan_of(1, 95).batches


def test_parts_of_a_plan_are_equal_after_pickling() -> None:
    plan = plan_of(2, 1 << 20)
    for rank in range(2):
        part = plan.part(rank)
        again = pickle.loads(pickle.dumps(part))
        assert (again.digest, again.batches) == (part.digest, part.batches)
        for one, other in zip(again.items, part.items, strict=True):
            assert one.match == other.match and one.change is other.change
            assert str(one.transfers) == str(other.transfers)
    assert plan.part(7).items == ()


MESH = reshard.DeviceMesh("cluster", (2, 2), ("dp", "tp"), (4, 5, 6, 7))
SPEC = reshard.spec(MESH, "tp@stride2 ?, - !1 | replicated(dp)")
GRIDS = MegatronGrids.from_groups(
    {rank: {"tp": of} for rank, of in {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}.items()}
)
NAMES = MegatronNames(MegatronRanks(pp=2, dp=2, ep=2), PipelineLayers.windows([5, 7]), 4)
MANIFESTS = [
    ModelManifest(),
    ModelManifest((Entry("h", None, None, Layout.whole((5, 4), [1], 2)),), problems=("why",)),
    ModelManifest(
        (
            Entry("a", "bfloat16", (2, 4), SPEC.layout((4, 4)), own_name="module.a", spec=SPEC),
            Entry("b", "bfloat16", (2, 4), SPEC.layout((4, 4)), own_name="module.b", spec=SPEC),
            Entry("c", "bfloat16", (2, 4), SPEC.layout((4, 4)), alias_of="b"),
            Entry("qkv", "int8", (8,), fusion=Fusion(("q", "k", "v"), (4, 2, 2), 2)),
            Entry("e", "int8", (3, 2), fusion=Fusion(("e.{}.down",), stacked=3, transposed=True)),
        ),
        first_rank=3,
        unmatched=("bias",),
    ),
    ModelManifest(
        (
            Entry(
                "decoder.layers.5.fc1",
                "float32",
                (2, 3),
                parameter=LocalParameter((2, 3), True, 0, 2, (1, 1), 4, 9, True, "float32"),
                local_name="layers.0.fc1",
                chunk=1,
                own_name="decoder.layers.5.fc1",
            ),
        ),
        NAMES,
    ),
    ModelManifest((), MegatronNames(GRIDS)),
]


def read_again(manifest: ModelManifest) -> ModelManifest:
    return read_manifest(write_manifest(manifest), read_names(write_names(manifest)))


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifests_round_trip(manifest: ModelManifest) -> None:
    found = read_again(manifest)
    assert found == manifest
    for mine, its in zip(found.entries, manifest.entries, strict=True):
        assert mine.layout is its.layout
        assert mine.spec is its.spec


def test_equal_manifests_have_one_text() -> None:
    assert len({write_manifests(MANIFESTS[2], MANIFESTS[3]) for _ in range(3)}) == 1


def test_ranks_of_equal_names_have_one_list_of_them() -> None:
    entries = MANIFESTS[2].entries
    other = replace(MANIFESTS[2], entries=[one._replace(dtype="int16") for one in entries])
    messages = {rank: write_manifests(one, one) for rank, one in enumerate((MANIFESTS[2], other))}
    assert messages[0][0] == messages[1][0]
    assert messages[0][1] != messages[1][1]
    found = read_manifests(messages)
    assert found[1] == (other, other)
    assert found[0][0].columns.name_columns is found[1][0].columns.name_columns


def test_equal_layers_are_written_once() -> None:
    layout = SPEC.layout((4096, 4096))
    names_of = [f"layers.{i}.up" for i in range(900)]
    kind = Entry("", "bfloat16", (2048, 4096), layout, spec=SPEC)
    entries = [kind._replace(name=name, own_name=name) for name in names_of]
    manifest = ModelManifest(tuple(entries))
    names, others = write_manifests(manifest, ModelManifest())
    assert len(names + others) < 900 * len('"layers.000.up",') + 2000
    assert tuple(read_again(manifest).entries) == tuple(entries)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"reshard": "plan"}, "is not a roster"),
        ({"version": 9}, "version 9"),
        ({"kind_of": [0]}, "1 kinds of"),
        ({"names": ["a", 1, "c", "d"]}, "not a list of texts"),
        ({"own_names": ["a"]}, "own_names: 1 of 5"),
        ({"samples": ["a"]}, "samples: 1 of 5"),
        ({"kind_of": [0, 1, 2, 3, 9]}, "number 9"),
        ({"kind_of": [0, 1, 2, 3, -1]}, "-1"),
        ({"first_rank": "0"}, "first_rank"),
        ({"kinds": [{"dtype": "int3", "shape": None}] * 3}, "int3"),
        ({"kinds": [{"dtype": None, "shape": [-1]}] * 3}, "-1"),
        ({"kinds": [{"dtype": None, "shape": None, "layout": 7}] * 3}, "number 7"),
        ({"kinds": [{"dtype": None, "shape": None, "fusion": {}}] * 3}, "does not say"),
        ({"kinds": [{"dtype": None, "shape": None, "spec": [1, "tp"]}] * 3}, "not a JSON object"),
        ({"megatron": [{"grids": []}]}, "0 grids"),
    ],
)
def test_invalid_manifests_are_refused(change: dict[str, Any], told: str) -> None:
    names, manifest = (
        json.loads(write(MANIFESTS[2])) | change for write in (write_names, write_manifest)
    )
    if "reshard" in change:
        names["reshard"] = "names"
    with pytest.raises(ReshardError, match=told):
        read_manifest(json.dumps(manifest), read_names(json.dumps(names)))


def test_other_text_is_refused() -> None:
    with pytest.raises(NotationError, match="not JSON"):
        read_manifest("\x80\x04K\x01.", NameColumns())


@pytest.mark.parametrize("manifest", MANIFESTS[1:])
def test_random_documents_are_read_or_refused(manifest: ModelManifest) -> None:
    draw = random.Random(7)
    junk: list[Any] = [None, True, -1, 1 << 62, 1.5, "x", [], [[]], {}, {"a": 1}, [1, 2, 3]]

    def change(value: Any) -> Any:
        if draw.random() < 0.08:
            return draw.choice(junk)
        if isinstance(value, list):
            return [change(one) for one in value]
        if isinstance(value, dict):
            return {key: change(one) for key, one in value.items()}
        return value

    documents = [json.loads(write(manifest)) for write in (write_names, write_manifest)]
    for _ in range(400):
        try:
            names, others = (json.dumps(change(one)) for one in documents)
            found = read_manifest(others, read_names(names))
        except ReshardError:
            continue
        assert isinstance(found, ModelManifest)
