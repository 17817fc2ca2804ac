"""The order in which a mesh counts its ranks, by the purpose of its axes.

Neighbouring ranks exchange the most: tensor-parallel ranks are on the same host, and
pipeline stages and replicas are apart. `tp=2,pp=2` therefore means `pp=2,tp=2`, which trainers and
engines use: stage 1 is on ranks 2 and 3.

::

    fastest    tp   cp   ep   fsdp   dp   pp   other axes, in the order of the text    slowest
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.text import rank_text

# From the fastest to the slowest. Virtual stages share a rank. `etp` and `vtp` rank with `tp`,
# and PyTorch's two axes of data parallelism with `fsdp` and `dp`.
RANK_ORDER = (
    *("vp", "tp", "etp", "vtp", "cp", "ep"),
    *("dp_shard", "fsdp", "dp", "dp_replicate", "pp"),
)
_MAX_SHOWN = 8
TEXT_ORDER = "text"
"""The order of axes as they are written, the last one fastest."""


def order_axes(mesh: DeviceMesh, order: str | Sequence[str] | None = None) -> DeviceMesh:
    """Return a mesh of the same axes, major to minor, in the order in which they count ranks.

    Args:
        mesh: with ranks in row-major order.
        order: the axes from the fastest to the slowest, as a list or a text (`tp,pp,dp`); `text`
            for the mesh as it is; by the purpose of axes if None.

    Raises:
        UsageError: an axis that is missing in the order, in it twice, or not an axis of the mesh.

    >>> order_axes(DeviceMesh.of(tp=2, pp=3, mine=5)).text
    'mine=5,pp=3,tp=2'
    >>> order_axes(DeviceMesh.of(tp=2, dp=3, pp=4), "tp,pp,dp").text
    'dp=3,pp=4,tp=2'
    """
    if order == TEXT_ORDER:
        return mesh
    rank_order = RANK_ORDER if order is None else _parse_order(order, mesh)
    slow = [axis for axis in mesh.axis_names if axis not in rank_order]
    names = [*slow, *(axis for axis in reversed(rank_order) if axis in mesh.axis_names)]
    return DeviceMesh(mesh.name, [mesh.axis_size(axis) for axis in names], names)


def _parse_order(order: str | Sequence[str], mesh: DeviceMesh) -> tuple[str, ...]:
    # Megatron writes tp-cp-ep-dp-pp.
    words = order.replace("-", ",").split(",") if isinstance(order, str) else order
    axes = tuple(str(word).strip() for word in words)
    for axis in axes:
        if axis not in (*mesh.axis_names, *RANK_ORDER) or axes.count(axis) > 1:
            wrong = "is in it twice" if axes.count(axis) > 1 else "is not an axis of it"
            raise UsageError(
                f"the order {','.join(axes)!r} for the mesh {mesh.text}: {axis!r} {wrong}; give "
                f"its axes from the fastest to the slowest, such as tp,pp, or {TEXT_ORDER!r}"
            )
    missing = [axis for axis in mesh.list_long_axes() if axis not in axes]
    if missing:
        raise UsageError(
            f"the order {','.join(axes)!r} for the mesh {mesh.text} lacks {', '.join(missing)}; "
            f"give all axes from the fastest to the slowest, or {TEXT_ORDER!r}"
        )
    return axes


def describe_order(
    mesh: DeviceMesh, written: DeviceMesh, *, can_change: bool = True
) -> tuple[str, ...]:
    """Return a note if a mesh counts its ranks in another order than as written.

    `can_change` is whether `--mesh-order` could count them as written.

    >>> describe_order(DeviceMesh.of(pp=2, tp=2), DeviceMesh.of(tp=2, pp=2))[0]
    'ranks are counted over pp=2,tp=2, the last axis fastest, not as written (--mesh-order text)'
    """
    long = mesh.list_long_axes()
    # An engine may have ranks without an axis for each of its sizes.
    if long == tuple(axis for axis in written.list_long_axes() if axis in long):
        return ()
    change = f" (--mesh-order {TEXT_ORDER})" if can_change else ""
    return (f"ranks are counted over {mesh.text}, the last axis fastest, not as written{change}",)


def describe_groups(mesh: DeviceMesh, axis: str) -> str:
    """Describe the ranks at each coordinate along an axis.

    >>> describe_groups(DeviceMesh.of(pp=2, tp=2), "pp")
    'pp 0 is ranks 0,1, pp 1 is ranks 2,3'
    """
    along = mesh.coordinates([axis]).tolist()
    ranks: dict[int, list[int]] = {}
    for rank, coordinate in zip(mesh.devices, along, strict=True):
        ranks.setdefault(coordinate, []).append(rank)
    shown = [
        f"{axis} {coordinate} is ranks {rank_text(sorted(ranks[coordinate]))}"
        for coordinate in sorted(ranks)[:_MAX_SHOWN]
    ]
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
