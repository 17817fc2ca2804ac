"""Parts of tensor-parallel ranks make the parameter that they were cut from, or are refused."""

from __future__ import annotations

import itertools
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from deepspeed_records import unpack
from reshard.binding import View
from reshard.checkpoint.formats.chunks import BlockPlace, flat_block
from reshard.checkpoint.formats.deepspeed.tensor_parallel import Joiner
from reshard.errors import FormatError
from reshard.geometry.regions import Region

INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r"norm\..*"],
    "parameter_to_average_patterns": [r"mean$"],
    "parameter_with_row_parallelism_patterns": [r"layers\.\d+\.row"],
    "vocabulary_parameter_patterns": [r"embed"],
    "original_vocab_size": 7,
    "parameter_with_2_sub_params_cat_dim_0": [r"halves"],
    "parameter_with_sub_params": [
        {"patterns": ["qkv"], "shape": [[4, 2, 2], -1], "partition_dim": 0},
        {"patterns": ["columns"], "shape": [-1, [5, 4]], "partition_dim": 1},
    ],
    "sub_param_shard_widths": {"columns": [[3, 2], [1, 3]]},
}


def pieces(name: str, whole: np.ndarray, ranks: int) -> list[np.ndarray]:
    """What each rank has of a parameter, cut by hand."""
    if name.startswith(("norm", "mean")):
        return [whole] * ranks
    if name == "layers.3.row":
        return np.array_split(whole, ranks, 1)
    if name == "embed":
        return np.array_split(np.concatenate([whole, 0 * whole[:1]]), ranks)
    if name == "halves":
        halves = [np.split(half, ranks) for half in np.split(whole, 2)]
        return [np.concatenate(pair) for pair in zip(*halves, strict=True)]
    if name == "qkv":
        parts = [np.split(part, ranks) for part in np.split(whole, [4, 6])]
        return [np.concatenate(own) for own in zip(*parts, strict=True)]
    if name == "columns":
        return [whole[:, [0, 1, 2, 5]], whole[:, [3, 4, 6, 7, 8]]]
    return np.array_split(whole, ranks)


def rebuild(
    places: tuple[BlockPlace, ...], parts: list[np.ndarray], cuts: list[int], are_copies: bool
) -> np.ndarray:
    """A parameter of the cells of ranges of its flattened parts; elements that none has are -1."""
    found = np.full(places[0].shape, -1)
    for rank, part in enumerate(parts):
        flat = part.reshape(-1)
        ends = sorted({0, *(cut for cut in cuts if cut < flat.size), flat.size})
        for start, stop in itertools.pairwise(ends):
            held = flat[start:stop]
            stored = [(rank, Region((start,), (stop,), "file", 0, (1,)))]
            for _, region in places[rank].place(flat_block(stored, 0, part.shape)):
                place = tuple(slice(a, b) for a, b in zip(*region.box, strict=True))
                own = held[View(region.offset, region.strides).positions(region.shape)]
                is_new = found[place] == -1
                assert (is_new | (are_copies & (found[place] == own))).all(), "an element twice"
                found[place] = own
    return found


SHAPES = {
    "norm.weight": (5,),
    "mean": (3, 2),
    "layers.3.row": (4, 6),
    "embed": (7, 3),
    "halves": (8, 3),
    "qkv": (8, 3),
    "columns": (3, 9),
    "plain": (6, 2, 2),
}


@pytest.mark.parametrize("name", [*SHAPES])
@given(cuts=st.lists(st.integers(1, 30), max_size=3))
def test_parts_are_joined_to_the_parameter_that_was_sharded(name: str, cuts: list[int]) -> None:
    """By each pattern, whatever ranges of a part a file has."""
    shape = SHAPES[name]
    whole = np.arange(np.prod(shape)).reshape(shape)
    parts = pieces(name, whole, 2)
    places, is_averaged = Joiner(INFO, 2, "file").join(name, [part.shape for part in parts])
    are_copies = name in ("norm.weight", "mean")
    np.testing.assert_array_equal(rebuild(places, parts, cuts, are_copies), whole)
    assert is_averaged == (name == "mean")


def piece(shape: list[int], source: int, dest: int, strides: list[int]) -> dict[str, Any]:
    place = {"shape": shape, "locations": [0]}
    return {**place, "source": [source, [3, 1]], "dest": [dest, strides]}


def described(*, scale: float = 1.0) -> dict[str, Any]:
    """A map of a parameter of 4 by 3: columns 0 and 2 on the first rank, column 1 on the second."""
    first = [piece([4, 1], 0, 0, [2, 1]), piece([4, 1], 2, 1, [2, 1])]
    second = [{**piece([4, 1], 1, 0, [1, 1]), "scale": scale}]
    ranks = {
        0: {"shard_shape": [4, 2], "pieces": first},
        1: {"shard_shape": [4, 1], "pieces": second},
    }
    params = {r"^mapped$": {"logical_shape": [4, 3], "ranks": ranks}}
    return {"affine_map": {"version": 1, "params": params}}


def test_a_map_counts_before_patterns() -> None:
    whole = np.arange(12).reshape(4, 3)
    parts = [whole[:, [0, 2]], whole[:, [1]]]
    info = {**described(), "tp_replicated_parameter_patterns": ["mapped"]}
    places, _ = Joiner(info, 2, "file").join("mapped", [part.shape for part in parts])
    np.testing.assert_array_equal(rebuild(places, parts, [3], are_copies=False), whole)


@pytest.mark.parametrize(
    ("info", "name", "parts", "expected"),
    [
        (None, "plain", [(2,), (2,)], "has no universal_checkpoint_info .*Megatron-DeepSpeed"),
        ({"universal_checkpoint_version": 0.2}, "plain", [(2,), (2,)], "has no universal_check"),
        (INFO, "norm.weight", [(2,), (3,)], r"shapes \[2\], \[3\], expected equal ones"),
        (INFO, "layers.3.row", [(4,), (4,)], "dimension 1 alone"),
        (INFO, "plain", [(), ()], "dimension 0 alone"),
        (INFO, "halves", [(3, 1), (3, 1)], "two halves each"),
        (INFO, "qkv", [(3, 3), (3, 3)], "sub-parameters of 'qkv'"),
        (INFO, "columns", [(3, 5), (3, 5)], "sub_param_shard_widths of 'columns'"),
        ({**INFO, "original_vocab_size": 99}, "embed", [(4, 3), (4, 3)], "original_vocab_size 99"),
        ({**INFO, "tp_replicated_parameter_patterns": "norm"}, "x", [(2,)] * 2, "expected a list"),
        ({"tp_replicated_parameter_patterns": ["(a+)+b"]}, "x", [(2,)] * 2, "none of them of a"),
        ({"tp_replicated_parameter_patterns": ["["]}, "x", [(2,)] * 2, "the pattern"),
        ({"tp_replicated_parameter_patterns": ["x", "."]}, "x", [(2,)] * 2, "several patterns"),
        (
            {**INFO, "autotp_unsupported_parameter_patterns": {"odd": "a fused projection"}},
            "odd",
            [(2,), (2,)],
            "cannot be joined: a fused projection",
        ),
        (described(scale=0.5), "mapped", [(4, 2), (4, 1)], "that is scaled"),
        (described(), "mapped", [(4, 1), (4, 1)], "expected .*on rank 0"),
        ({"affine_map": {"version": 2}}, "mapped", [(4, 2), (4, 1)], "affine_map of version 2"),
    ],
)
def test_descriptions_that_do_not_determine_the_assembly_are_errors(
    info: Any, name: str, parts: list[tuple[int, ...]], expected: str
) -> None:
    """With what is wrong, of which parameter."""
    with pytest.raises(FormatError, match=expected):
        Joiner(info, 2, "file").join(name, parts)


@pytest.mark.parametrize("offset", [-1, 9, 12])
def test_pieces_outside_of_a_parameter_are_errors(offset: int) -> None:
    info = described()
    ranks = info["affine_map"]["params"]["^mapped$"]["ranks"]
    ranks[0]["pieces"][0]["source"] = [offset, [3, 1]]
    with pytest.raises(FormatError, match="outside of"):
        Joiner(info, 2, "file").join("mapped", [(4, 2), (4, 1)])


def test_a_map_that_leaves_elements_out_is_an_error() -> None:
    info = described()
    ranks = info["affine_map"]["params"]["^mapped$"]["ranks"]
    del ranks[0]["pieces"][0]
    with pytest.raises(FormatError, match="have 8 elements, expected 12"):
        Joiner(info, 2, "file").join("mapped", [(4, 2), (4, 1)])


def test_tensor_parallel_parts_without_a_description_are_an_error(tmp_path: Any) -> None:
    """Files with another name of the key: nothing tells how parts are joined."""
    folder = unpack("zero3-fp32-2-slices-over2", tmp_path)
    for path in folder.rglob("*model_states.pt"):
        with zipfile.ZipFile(path) as old:
            records = {info.filename: old.read(info) for info in old.infolist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, content in records.items():
                new.writestr(name, content.replace(b"universal_checkpoint_info", b"x" * 25))
    with pytest.raises(FormatError, match="has no universal_checkpoint_info"):
        reshard.checkpoint.open(folder)
