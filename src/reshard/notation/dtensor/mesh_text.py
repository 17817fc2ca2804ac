"""The mesh in front of placements, as torch prints it or a program writes it.

torch prints a mesh by its sizes, and its ranks only where `TORCH_DISTRIBUTED_DEBUG=DETAIL` is set;
a program writes them out::

    DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))                        sizes and names
    DeviceMesh((2, 2), 'cpu', stride=(2, 1), Mesh: [[3, 1], [2, 0]])      sizes and ranks
    DeviceMesh('cpu', [[3, 1], [2, 0]], mesh_dim_names=('dp', 'tp'))      names and ranks

1. The mesh is in the brackets after `DeviceMesh`; the placements follow it.
2. Nested square brackets are ranks; else the first round ones are sizes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

import numpy as np

from reshard.errors import NotationError
from reshard.mesh import DeviceMesh
from reshard.runs import IntArray

_BEFORE = re.compile(r"\s*\(?\s*|\s*DTensor\(.*device_mesh\s*=\s*", re.DOTALL)
_RANKS = re.compile(r"\[[\s\d,\[\]]*\]")
_NAMES = re.compile(r"mesh_dim_names\s*=\s*[(\[]([^)\]]*)[)\]]")
_STRIDE = re.compile(r"stride\s*=\s*(\((?:[^()]|\([^()]*\))*\))")
_SIZES = re.compile(r"\(([^()]*)\)")
_SIZE = re.compile(r"(?:(\w+)\s*=\s*)?(\d{1,9})")


def split_mesh(text: str, mesh: DeviceMesh | None = None) -> tuple[DeviceMesh | None, str]:
    """The mesh of a text and the placements behind it.

    Args:
        text: placements, or a mesh and placements, or a printed DTensor.
        mesh: the answer where the text names none, or the same one by its sizes.

    Raises:
        NotationError: a mesh that cannot be read.
        MeshError: one that cannot be.

    >>> split_mesh("DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)), (Shard(dim=0), Replicate())")
    (DeviceMesh('torch', dp=2,tp=2), '(Shard(dim=0), Replicate())')
    >>> split_mesh("DeviceMesh('cpu', [[3, 1], [2, 0]]), [Shard(0), Replicate()]")[0]
    DeviceMesh('torch', dim0=2,dim1=2, devices=[3, 1, 2, 0])
    """
    begin = text.find("DeviceMesh(")
    if begin < 0:
        return mesh, text
    before = text[:begin]
    end = _find_closing(text, begin + len("DeviceMesh"))
    if end is None or not _BEFORE.fullmatch(before):
        raise NotationError(
            f"cannot read the mesh in `{text}`; write DeviceMesh('cpu', [[0, 1], [2, 3]]) in front "
            "of the placements, or give a mesh"
        )
    rest = text[end + 1 :].strip().removeprefix(",").strip()
    # In a printed DTensor the placements are an argument, and its bracket closes behind them.
    if "(" in before:
        rest = re.sub(r"^placements\s*=\s*", "", rest).removesuffix(")").strip()
    return _read_mesh(text[begin + len("DeviceMesh(") : end], text, mesh), rest


def _find_closing(text: str, at: int) -> int | None:
    """Where the bracket that opens at `at` closes."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return None


def _read_mesh(body: str, text: str, given: DeviceMesh | None) -> DeviceMesh:
    named = _NAMES.search(body)
    names = [name.strip(" '\"") for name in named[1].split(",") if name.strip()] if named else []
    stride = _STRIDE.search(body)
    # Names and strides have brackets of their own, which would be taken for sizes.
    body = _NAMES.sub("", _STRIDE.sub("", body))
    listed = _RANKS.search(body)
    shape: tuple[int, ...] = ()
    devices: list[int] | None = None
    if listed:
        ranks = _read_ranks(listed[0], text)
        shape, devices = ranks.shape, ranks.reshape(-1).tolist()
    sizes = _SIZES.search(body)
    if sizes:
        words = [word.strip() for word in sizes[1].split(",") if word.strip()]
        matches = [match for word in words if (match := _SIZE.fullmatch(word))]
        if len(matches) != len(words):
            raise NotationError(f"cannot read the sizes of a mesh ({sizes[1]}) in `{text}`")
        names = names or [match[1] for match in matches if match[1]]
        shape = tuple(int(match[2]) for match in matches)
    elif not listed:
        raise NotationError(f"the mesh in `{text}` has neither sizes nor ranks")
    if (
        given is not None
        and given.shape == tuple(shape)
        and (not names or list(given.axis_names) == names)
        and (devices is None or list(given.devices) == devices)
    ):
        return given
    # A slice of a larger mesh has that one's strides, and ranks that the text does not have.
    if devices is None and stride and not _is_row_major(stride[1], shape):
        raise NotationError(
            f"the mesh in `{text}` is a part of another one, whose ranks are not in the text; give "
            "a mesh, or print it with TORCH_DISTRIBUTED_DEBUG=DETAIL"
        )
    return DeviceMesh("torch", shape, names or [f"dim{d}" for d in range(len(shape))], devices)


def _read_ranks(listed: str, text: str) -> IntArray:
    """The ranks in nested brackets: each depth is an axis."""
    try:
        return np.array(json.loads(listed), dtype=np.int64)
    except (ValueError, OverflowError, RecursionError):
        raise NotationError(
            f"cannot read the ranks {listed[:80]} of the mesh in `{text}`; write equal rows, such "
            "as [[0, 1], [2, 3]]"
        ) from None


def _is_row_major(stride: str, shape: Sequence[int]) -> bool:
    expected = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [int(number) for number in re.findall(r"\d{1,18}", stride)] == expected
