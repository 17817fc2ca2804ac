"""Rosters as documents: read back as they were, and checked like any input."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

import reshard
from reshard.errors import NotationError, ReshardError
from reshard.layout import Layout

torch = pytest.importorskip("torch")

from reshard.megatron.names import MegatronNames, PipelineLayers  # noqa: E402
from reshard.megatron.parameters import LocalParameter  # noqa: E402
from reshard.megatron.ranks import MegatronGrids, MegatronRanks  # noqa: E402
from reshard.recipes.naming import Fusion  # noqa: E402
from reshard.torch.models.manifest_documents import (  # noqa: E402
    read_manifest,
    read_manifests,
    read_names,
    write_manifest,
    write_manifests,
    write_names,
)
from reshard.torch.models.model_manifest import (  # noqa: E402
    Entry,
    ModelManifest,
    NameColumns,
)

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
def test_what_is_read_is_what_was_written(manifest: ModelManifest) -> None:
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
    assert found[0][0].columns.columns is found[1][0].columns.columns


def test_layers_that_are_alike_are_written_once() -> None:
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


def test_text_that_is_no_document() -> None:
    with pytest.raises(NotationError, match="not JSON"):
        read_manifest("\x80\x04K\x01.", NameColumns())


@pytest.mark.parametrize("manifest", MANIFESTS[1:])
def test_whatever_is_said_is_read_or_refused(manifest: ModelManifest) -> None:
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
