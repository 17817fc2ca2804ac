"""Shardings that most notations can say: every dimension cut once, by ceil."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from reshard.mesh import Axis
from reshard.sharding import DimSpec, ShardingSpec
from strategies import axis_parts, meshes


@st.composite
def flat_specs(
    draw: st.DrawFn,
    reductions: Sequence[str],
    sub_axes: bool = False,
    replicated: bool = False,
) -> ShardingSpec:
    """Whole axes, or parts of them, on up to 4 dimensions; partial and replicated axes."""
    mesh = draw(meshes())
    whole = st.permutations([Axis(name) for name in mesh.axis_names])
    rank = draw(st.integers(0, 4))
    places = [*range(rank), *range(rank), "unused"] + ["partial"] * len(reductions)
    places += ["replicated"] * replicated
    uses: dict[object, list[Axis]] = {}
    for axis in draw(axis_parts(mesh) if sub_axes else whole):
        uses.setdefault(draw(st.sampled_from(places)), []).append(axis)
    return ShardingSpec(
        mesh,
        [DimSpec(uses.get(d, [])) for d in range(rank)],
        uses.get("replicated", ()),
        uses.get("partial", ()),
        draw(st.sampled_from(reductions)) if reductions else "sum",
    )
