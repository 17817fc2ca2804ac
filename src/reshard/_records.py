"""Frozen records: classes of named fields, like frozen dataclasses, that are cheap to define.

A dataclass compiles its methods when its module is imported, which takes half a millisecond per
class, and commands import many. `Record` provides the same interface by ordinary methods. Type
checkers treat its subclasses as frozen dataclasses (PEP 681).

>>> class Point(Record):
...     x: int
...     y: int = 0
>>> Point(1), Point(1) == Point(x=1, y=0), Point(1).replace(y=2)
(Point(x=1, y=0), True, Point(x=1, y=2))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

R = TypeVar("R", bound="Record")


@dataclass_transform(frozen_default=True)
class Record:
    """A base class of frozen values with named fields.

    Fields are the annotated names of a class, except for ClassVars, after those of its bases. As
    in a dataclass, fields may have defaults, and `__post_init__` may validate. Subclasses compare
    and hash by their fields, or by identity with the class argument `eq=False`.
    """

    field_names: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, *, eq: bool = True) -> None:
        annotations = {k: v for k, v in cls.__annotations__.items() if "ClassVar" not in str(v)}
        cls.field_names = (*cls.field_names, *annotations)
        own = {name: vars(cls)[name] for name in annotations if name in vars(cls)}
        cls._defaults = {**cls._defaults, **own}
        if not eq:
            cls.__eq__ = object.__eq__  # type: ignore[method-assign]
            cls.__hash__ = object.__hash__  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = self.field_names
        if len(args) == len(names) and not kwargs:
            self.__dict__.update(zip(names, args, strict=True))
        else:
            self.__dict__.update(self._bind(args, kwargs))
        self.__post_init__()

    @classmethod
    def _bind(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = cls.field_names
        by_position = dict(zip(names, args, strict=False))
        values = {**cls._defaults, **by_position, **kwargs}
        wrong = [name for name in kwargs if name not in names or name in by_position]
        missing = [name for name in names if name not in values]
        if len(args) > len(names) or wrong or missing:
            raise TypeError(
                f"{cls.__name__}() takes {', '.join(names) or 'no arguments'}; got {len(args)} by "
                f"position and {list(kwargs)} by name"
            )
        return {name: values[name] for name in names}

    def __post_init__(self) -> None:
        """Validate the fields, or normalize them by `object.__setattr__`."""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"cannot set {name!r}: a {type(self).__name__} is frozen")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r}: a {type(self).__name__} is frozen")

    def astuple(self) -> tuple[Any, ...]:
        """Return the values of the fields, in their order."""
        values = self.__dict__
        return tuple([values[name] for name in self.field_names])

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.astuple() == other.astuple()

    def __hash__(self) -> int:
        return hash(self.astuple())

    def __repr__(self) -> str:
        pairs = zip(self.field_names, self.astuple(), strict=True)
        fields = ", ".join(f"{name}={value!r}" for name, value in pairs)
        return f"{type(self).__qualname__}({fields})"

    def replace(self: R, **changes: Any) -> R:
        """Return a copy with some fields changed, which is validated anew."""
        return type(self)(**dict(zip(self.field_names, self.astuple(), strict=True)) | changes)
