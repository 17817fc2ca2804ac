"""The native notation as one among others: `dp tp, -`.

Its reader is `reshard.sharding_text`, which every part of the package can use; here it takes a mesh
and a shape as the readers of all notations do.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import NotationError
from reshard.mesh import DeviceMesh
from reshard.sharding import ShardingSpec
from reshard.sharding_text import spec


def parse_native(
    text: str, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> ShardingSpec:
    """The sharding that a text in the native notation writes.

    Raises:
        NotationError: text that cannot be read, or no mesh.

    >>> print(parse_native("x, ...", DeviceMesh.of(x=2), (4, 2, 2)))
    x, -, -
    """
    if mesh is None:
        raise NotationError(f"`{text}` names mesh axes; give a mesh, such as `--mesh dp=2,tp=4`")
    return spec(mesh, text, ndim=None if shape is None else len(shape))


def native_text(sharding: ShardingSpec) -> str:
    """The native text of a sharding."""
    return str(sharding)
