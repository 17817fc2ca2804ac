"""Engines' layouts: what they refuse, what ranks hold of each source, and their documents."""

from __future__ import annotations

import dataclasses
import json

import pytest

from reshard import DeviceMesh, from_json, spec, to_json
from reshard.binding import TensorName, View
from reshard.errors import LayoutError, NotationError, ReshardError, UsageError
from reshard.layout import Box
from reshard.recipes.engine_layouts import (
    Computed,
    Constant,
    EngineLayout,
    ParameterLayout,
    RankLayout,
    SourcePiece,
)

HIDDEN, HEADS, SIZE = 8, 4, 2
SOURCES = {
    "layers.0.q": ("bfloat16", (HEADS * SIZE, HIDDEN)),
    "layers.0.k": ("bfloat16", (SIZE, HIDDEN)),
    "layers.0.A_log": ("bfloat16", (HEADS,)),
    "embed": ("bfloat16", (10, HIDDEN)),
    "rope": ("float32", (3,)),
}


def rank_layout(rank: int) -> RankLayout:
    """One rank of two: half of the queries, the key head twice, a vocabulary padded to 12."""
    rows = HEADS * SIZE // 2
    qkv = ParameterLayout.of(
        "layers.0.qkv",
        (rows + SIZE, HIDDEN),
        "bfloat16",
        [
            SourcePiece(Box((rows, 0), (rows + SIZE, HIDDEN)), "layers.0.k", View(0, (HIDDEN, 1))),
            SourcePiece(
                Box((0, 0), (rows, HIDDEN)), "layers.0.q", View(rank * rows * HIDDEN, (HIDDEN, 1))
            ),
        ],
    )
    decay = ParameterLayout.of(
        "layers.0.A",
        (2,),
        "float32",
        computed=[
            Computed(
                Box((0,), (2,)), ("to float32", "exp"), ("layers.0.A_log",), View(2 * rank, (1,))
            )
        ],
    )
    stored = 6 - 2 * rank
    embed = ParameterLayout.of(
        "embed",
        (7, HIDDEN),
        "float32",
        [
            SourcePiece(
                Box((0, 0), (stored, HIDDEN)),
                "embed",
                View(6 * rank * HIDDEN, (HIDDEN, 1)),
                ("to float32",),
            )
        ],
        constants=[Constant(Box((stored, 0), (6, HIDDEN)), 0.0)] if rank else [],
        unfilled=[Box((6, 0), (7, HIDDEN))],
    )
    parameters = {one.name: one for one in (qkv, decay, embed)}
    return RankLayout(rank, parameters, ("rope",), (("embed", "layers.0.A"),), notes=("a note",))


def engine_layout() -> EngineLayout:
    ranks = (rank_layout(0), rank_layout(1))
    return EngineLayout("toy", "1.2", DeviceMesh.of(tp=2), SOURCES, ranks, ("of two ranks",))


def test_a_parameter_lists_its_regions() -> None:
    rank = rank_layout(1)
    qkv = rank["layers.0.qkv"]
    assert [piece.source for piece in qkv.pieces] == ["layers.0.q", "layers.0.k"]
    assert qkv.is_copied
    assert not rank["embed"].is_copied and not rank["layers.0.A"].is_copied
    binding = qkv.binding
    assert binding.layout.boxes(0) == tuple(piece.box for piece in qkv.pieces)
    assert binding.addresses[0] == (TensorName("layers.0.q"), TensorName("layers.0.k"))
    assert binding.views[0] == (View(32, (8, 1)), View(0, (8, 1)))
    assert str(rank["embed"]).splitlines() == [
        "embed float32 [7, 8]",
        "  [0:4, 0:8] embed from 48, strides 8, 1, to float32",
        "  [4:6, 0:8] filled with 0",
        "  [6:7, 0:8] not filled",
    ]
    assert "computed by to float32, exp of layers.0.A_log" in str(rank["layers.0.A"])


def test_layers_share_a_pattern() -> None:
    layers = [
        ParameterLayout.of("w", (4,), "int8", [SourcePiece(Box((0,), (4,)), name, View(0, (1,)))])
        for name in ("layers.0", "layers.1")
    ]
    assert layers[0].pattern is layers[1].pattern


def test_the_order_of_pieces_makes_no_difference() -> None:
    halves = [SourcePiece(Box((i,), (i + 1,)), f"s{1 - i}", View(0, (1,))) for i in (0, 1)]
    one = ParameterLayout.of("w", (2,), "int8", halves)
    assert one == ParameterLayout.of("w", (2,), "int8", halves[::-1])
    assert one.sources == ("s1", "s0")


def test_source_layouts() -> None:
    found = engine_layout().source_layouts()
    assert list(found) == list(SOURCES)
    mesh = DeviceMesh.of(tp=2)
    assert found["layers.0.q"] is spec(mesh, "tp, -").layout((8, 8))
    assert found["layers.0.k"] is spec(mesh, "-, -").layout((2, 8))
    # What is computed element by element is held as it is read.
    assert found["layers.0.A_log"] is spec(mesh, "tp").layout((4,))
    assert found["embed"].boxes(0) == (Box((0, 0), (6, 8)),)
    assert found["embed"].boxes(1) == (Box((6, 0), (10, 8)),)
    assert found["rope"].holders == ()


def test_sources_of_unknown_computations_are_held_whole() -> None:
    whole = ParameterLayout.of(
        "w", (2,), "float32", computed=[Computed(Box((0,), (2,)), ("mm",), ("a", "b"))]
    )
    sources = {"a": ("float32", (3, 3)), "b": ("float32", ())}
    layout = EngineLayout("toy", "1", DeviceMesh.of(tp=1), sources, [RankLayout(0, {"w": whole})])
    found = layout.source_layouts()
    assert found["a"].boxes(0) == (Box((0, 0), (3, 3)),)
    assert found["b"].boxes(0) == (Box((), ()),)
    assert layout.computed == {"w": ("mm",)}


def test_elements_read_twice_are_held_once() -> None:
    """Gate and up of one tensor, interleaved, are all of it; a source of two parameters too."""
    halves = [SourcePiece(Box((2 * i,), (2 * i + 2,)), "gate_up", View(i, (2,))) for i in (0, 1)]
    parameters = {
        "w13": ParameterLayout.of("w13", (4,), "int8", halves),
        "again": ParameterLayout.of(
            "again", (2,), "int8", [SourcePiece(Box((0,), (2,)), "gate_up", View(1, (1,)))]
        ),
    }
    sources = {"gate_up": ("int8", (4,))}
    layout = EngineLayout("toy", "1", DeviceMesh.of(tp=1), sources, [RankLayout(0, parameters)])
    assert layout.source_layouts()["gate_up"].boxes(0) == (Box((0,), (4,)),)


def test_documents_round_trip() -> None:
    layout = engine_layout()
    text = to_json(layout)
    back = from_json(text)
    assert back == layout
    assert to_json(back) == text
    assert [*back.ranks[1].parameters] == [*layout.ranks[1].parameters]
    assert back.ranks[0].parameters["embed"].pattern is layout.ranks[0].parameters["embed"].pattern
    assert back.source_layouts() == layout.source_layouts()
    assert back.unread == ("rope",)


def test_names_and_values_that_are_special_come_back() -> None:
    names = ["a{}", "b.007", "c%d.1", "c%d.2", "d.1.2", "e", "f.99999999999", "10", ""]
    parameters = {
        name: ParameterLayout.of(name, (), "int8", [SourcePiece(Box((), ()), name, View(0, ()))])
        for name in names
    }
    parameters["fill"] = ParameterLayout.of(
        "fill", (2,), "float32", constants=[Constant(Box((0,), (2,)), float("-inf"))]
    )
    sources = dict.fromkeys(names, ("int8", ()))
    layout = EngineLayout("toy", "1", DeviceMesh.of(tp=1), sources, [RankLayout(0, parameters)])
    assert from_json(to_json(layout)) == layout


def test_regions_cover_a_parameter_once() -> None:
    piece = SourcePiece(Box((0, 0), (2, 4)), "s", View(0, (4, 1)))
    with pytest.raises(LayoutError, match=r"'w': the boxes .* have 8 elements of 12"):
        ParameterLayout.of("w", (3, 4), "int8", [piece])
    overlapping = piece._replace(box=Box((1, 0), (3, 4)))
    with pytest.raises(LayoutError, match="have 16 elements of 12, some twice"):
        ParameterLayout.of("w", (3, 4), "int8", [piece, overlapping])
    # As many elements as there are, and still not each once.
    half = SourcePiece(Box((0, 0), (1, 4)), "s", View(0, (4, 1)))
    with pytest.raises(LayoutError, match="some twice"):
        ParameterLayout.of("w", (2, 4), "int8", [half, half])
    crossed = [
        SourcePiece(Box((0, 0), (1, 2)), "s", View(0, (1, 1))),
        SourcePiece(Box((0, 1), (2, 2)), "s", View(0, (1, 1))),
    ]
    with pytest.raises(LayoutError, match="some twice"):
        ParameterLayout.of("w", (2, 2), "int8", crossed)
    with pytest.raises(LayoutError, match="has no element in a parameter"):
        ParameterLayout.of("w", (1, 4), "int8", [piece])
    with pytest.raises(LayoutError, match="give a range and a stride for every dimension"):
        ParameterLayout.of("w", (2, 4), "int8", [piece._replace(view=View(0, (1,)))])


def test_invalid_layouts_are_refused() -> None:
    layout = engine_layout()
    far = ParameterLayout.of(
        "w", (4, 8), "int8", [SourcePiece(Box((0, 0), (4, 8)), "layers.0.q", View(64, (8, 1)))]
    )
    ranks = [RankLayout(0, {"w": far}), layout.ranks[1]]
    with pytest.raises(LayoutError, match=r"reads elements 64 to 95 of 'layers.0.q', which has 64"):
        dataclasses.replace(layout, ranks=ranks)
    with pytest.raises(LayoutError, match=r"filled from 'layers.0.q', which is not a source"):
        dataclasses.replace(layout, sources={"rope": ("float32", (3,))})
    with pytest.raises(LayoutError, match=r"ranks \[0\] for the mesh tp=2"):
        dataclasses.replace(layout, ranks=layout.ranks[:1])
    with pytest.raises(LayoutError, match="give its dtype and shape"):
        dataclasses.replace(layout, sources={"rope": 3})
    with pytest.raises(LayoutError, match="no parameter 'lm_head'"):
        layout.ranks[0]["lm_head"]
    with pytest.raises(UsageError, match="rank 7 of a layout for tp=2"):
        layout.rank(7)
    with pytest.raises(LayoutError, match="method 'guessed'"):
        dataclasses.replace(layout.ranks[0], method="guessed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["patterns"][0].update(pieces=[0]), "columns of"),
        (lambda d: d["patterns"][0].update(shape=[3, 3]), "which has no|elements of 9|no element"),
        (lambda d: d["ranks"][0].update(names=99), "number 99"),
        (lambda d: d["ranks"][0].update(sources=0), "sources"),
        (lambda d: d.update(names=[["a.{}", [1], [2]]]), "columns of"),
        (lambda d: d.update(kinds=[["complex7", []]]), "complex7"),
        (lambda d: d.update(mesh=3), "mesh"),
        (lambda d: d["ranks"].pop(), "for the mesh"),
        (lambda d: d.pop("engine"), "engine"),
        (lambda d: d["ranks"][0].update(tied=[["nobody"]]), "nobody"),
    ],
)
def test_documents_that_are_wrong_are_our_errors(change: object, message: str) -> None:
    document = json.loads(to_json(engine_layout()))
    change(document)  # type: ignore[operator]
    with pytest.raises(ReshardError, match=message):
        from_json(json.dumps(document))


def test_damaged_documents_raise_only_our_errors() -> None:
    """Any value in it replaced by another kind of value."""

    def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        return [path, *(p for key, one in items for p in places(one, (*path, key)))]

    text = to_json(engine_layout())
    for path in places(json.loads(text))[1:]:
        for wrong in (None, -1, 1 << 70, "x", [], {}, [[]], True):
            document = json.loads(text)
            inside = document
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = wrong
            try:
                from_json(json.dumps(document))
            except ReshardError:
                continue


def test_json_of_another_version_is_refused() -> None:
    document = json.loads(to_json(engine_layout()))
    document["version"] = 7
    with pytest.raises(NotationError, match="version 7"):
        from_json(json.dumps(document))
