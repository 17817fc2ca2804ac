"""Vocabularies: what a notation can express, checked before anything is written.

A sharding may have parts that another system has no words for. Each printer states its words
once, as a `Vocabulary`, and checks the sharding against it before it writes anything: a text
that leaves something out would be read back as another sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.cut_rules import CutRule
from reshard.errors import NotationError
from reshard.sharding import DimSpec, ShardingSpec


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parts of a sharding that a notation has words for.

    Attributes:
        notation: its name, for messages.
        rules: cut rules beside the plain one, by ceil.
        reductions: of partial axes.
        has_sub_axes: whether it can take a mesh axis in part.
        has_open_dims: whether it can leave a dimension open to propagation.
        has_priorities: whether it can rank dimensions in propagation.
        has_replicated_axes: whether it can ask for copies along an axis.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding_text import spec
    >>> Vocabulary("JAX").check(spec(DeviceMesh.of(x=2), "x@stride2"))
    Traceback (most recent call last):
        ...
    reshard.errors.NotationError: JAX cannot say `x@stride2` of the sharding `x@stride2`: it has
    no cut rule `stride2`
    """

    notation: str
    rules: tuple[type[CutRule], ...] = ()
    reductions: tuple[str, ...] = ()
    has_sub_axes: bool = False
    has_open_dims: bool = False
    has_priorities: bool = False
    has_replicated_axes: bool = False

    def check(self, spec: ShardingSpec) -> None:
        """Raise NotationError for the first part of `spec` that the notation cannot express."""
        for dim in spec.dim_specs:
            self._check_dim(spec, dim)
        if not self.has_sub_axes:
            used = [axis for dim in spec.dim_specs for axis in dim.axes]
            for axis in (*used, *spec.replicated_axes, *spec.partial_axes):
                if not axis.is_full:
                    raise self.refusal(
                        spec, str(axis), "it takes whole mesh axes; split the axis of the mesh"
                    )
        if spec.replicated_axes and not self.has_replicated_axes:
            raise self.refusal(
                spec,
                f"replicated({' '.join(map(str, spec.replicated_axes))})",
                "it keeps copies along every axis that nothing uses, and cannot ask for them; "
                "leave these axes out",
            )
        if spec.reduction is not None and spec.reduction not in self.reductions:
            known = f"only {', '.join(self.reductions)}" if self.reductions else "no partial axes"
            raise self.refusal(
                spec,
                f"{spec.reduction}({' '.join(map(str, spec.partial_axes))})",
                f"it has {known}; reduce the tensor first",
            )
        if spec.only:
            held = " ".join(f"{axis}={','.join(map(str, at))}" for axis, at in spec.only)
            raise self.refusal(
                spec,
                f"only({held})",
                "every device of its mesh holds a part; give a mesh of the devices that hold one",
            )

    def _check_dim(self, spec: ShardingSpec, dim: DimSpec) -> None:
        if len(dim.levels) > 1:
            flat = " ".join(map(str, dim.axes))
            raise self.refusal(
                spec,
                str(dim),
                f"it cuts a dimension once; `{flat}` is the same where the sizes divide",
            )
        for level in dim.levels:
            if not level.rule.is_default and not isinstance(level.rule, self.rules):
                raise self.refusal(spec, str(level), f"it has no cut rule `{level.rule.text}`")
        if dim.is_open and not self.has_open_dims:
            raise self.refusal(spec, str(dim), "it has no open dimensions; leave out the `?`")
        if dim.priority and not self.has_priorities:
            raise self.refusal(
                spec, str(dim), f"it has no priorities; leave out the `!{dim.priority}`"
            )

    def refusal(self, spec: ShardingSpec, part: str, why: str) -> NotationError:
        """The error for a part of a sharding that the notation cannot express."""
        return NotationError(f"{self.notation} cannot say `{part}` of the sharding `{spec}`: {why}")
