"""One tensor of a job: its name, its dtype, how its layout changes, and where its shards lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from reshard.binding import Binding
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import PlanError
from reshard.geometry.layout_change import LayoutChange
from reshard.layout import Layout


@dataclass(frozen=True, slots=True)
class JobItem:
    """One tensor of a job; `dtype` may be given as a name, or as NumPy's or torch's.

    Raises:
        PlanError: a name that is no text, a binding that is not of the plan's layout.
        UsageError: a dtype that is none.
    """

    name: str
    dtype: DType
    change: LayoutChange
    source: Binding
    target: Binding

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise PlanError(f"a tensor named {self.name!r}; expected a text")
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        for side, binding, layout in (
            ("source", self.source, self.change.source),
            ("target", self.target, self.change.target),
        ):
            if binding.layout is not layout:
                raise PlanError(
                    f"the {side} binding of {self.name!r} is of {binding.layout!r}, its plan of "
                    f"{layout!r}"
                )

    def named(self, name: str) -> JobItem:
        """A tensor of another name that moves alike."""
        return JobItem(name, self.dtype, self.change, self.source, self.target)

    @classmethod
    def between_ranks(cls, name: str, dtype: object, source: Layout, target: Layout) -> JobItem:
        """A tensor whose slots are the memories of the ranks of the same numbers.

        Raises PlanError for layouts of different shapes, or what is no layout.
        """
        return cls(name, as_dtype(dtype), *_between_ranks(source, target))


# Layers of a model move alike.
@lru_cache(maxsize=4096)
def _between_ranks(source: Layout, target: Layout) -> tuple[LayoutChange, Binding, Binding]:
    return LayoutChange(source, target), Binding.to_ranks(source), Binding.to_ranks(target)
