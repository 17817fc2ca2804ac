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

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

R = TypeVar("R", bound="Record")


class _LazyFields:
    """The attribute by which `dataclasses` recognises a dataclass, built when it is first read."""

    def __get__(self, instance: object, cls: Any) -> dict[str, dataclasses.Field[Any]]:
        return _make_fields(cls)


@cache
def _make_fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    # `dataclasses` lacks a public way to make a field of a given name.
    template: Any = dataclasses.make_dataclass("_Template", ["field"])
    (field,) = dataclasses.fields(template)
    fields = {name: copy.copy(field) for name in cls.field_names}
    for name, field in fields.items():
        field.name, field.type = name, cls._types[name]
        field.default = cls._defaults.get(name, dataclasses.MISSING)
        field.compare = name in cls._compared_names
        if name in cls.declared_fields:
            field.default_factory = cls.declared_fields[name].default_factory
            field.metadata = cls.declared_fields[name].metadata
    return fields


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Record:
    """A base class of frozen values with named fields.

    Fields are the annotated names of a class, except for ClassVars, after those of its bases. As
    in a dataclass, fields may have defaults, also of `dataclasses.field` (its `default`,
    `default_factory`, `metadata`, `compare` and `hash`), and `__post_init__` may validate.
    Subclasses compare and hash by their fields, or by identity with the class argument `eq=False`.
    `replace`, `fields`, `asdict` and `astuple` of `dataclasses` accept them.
    """

    field_names: ClassVar[tuple[str, ...]] = ()
    _compared_names: ClassVar[tuple[str, ...]] = ()
    _hashed_names: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[Mapping[str, Any]] = {}
    _factories: ClassVar[Mapping[str, Callable[[], Any]]] = {}
    _types: ClassVar[Mapping[str, Any]] = {}
    declared_fields: ClassVar[Mapping[str, dataclasses.Field[Any]]] = {}
    __dataclass_fields__: ClassVar[Any] = _LazyFields()
    # Read by `dataclass` of a base class: plug-ins derive dataclasses from records.
    __dataclass_params__: ClassVar[Any] = SimpleNamespace(frozen=True)

    def __init_subclass__(cls, *, eq: bool = True) -> None:
        annotations = cls.__annotations__
        # As text, since annotations are strings under `from __future__ import annotations`:
        # evaluating them would import the modules that only type checkers see.
        names = [name for name, kind in annotations.items() if "ClassVar" not in str(kind)]
        own = {name: vars(cls)[name] for name in names if name in vars(cls)}
        declared = {n: value for n, value in own.items() if isinstance(value, dataclasses.Field)}
        for name, field in declared.items():
            del own[name]
            if field.default is not dataclasses.MISSING:
                # As in a dataclass, the class attribute becomes the default, not the `Field`.
                own[name] = field.default
                setattr(cls, name, field.default)
        factories = {
            name: field.default_factory
            for name, field in declared.items()
            if field.default_factory is not dataclasses.MISSING
        }
        compared = [name for name in names if name not in declared or declared[name].compare]
        cls.field_names = (*cls.field_names, *names)
        hashed = [n for n in compared if n not in declared or declared[n].hash is not False]
        cls._compared_names = (*cls._compared_names, *compared)
        cls._hashed_names = (*cls._hashed_names, *hashed)
        cls._defaults = {**cls._defaults, **own}
        cls._factories = {**cls._factories, **factories}
        cls._types = {**cls._types, **{name: annotations[name] for name in names}}
        cls.declared_fields = {**cls.declared_fields, **declared}
        if not eq:
            cls.__eq__ = object.__eq__  # type: ignore[method-assign]
            cls.__hash__ = object.__hash__  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Written to `__dict__`, since `__setattr__` refuses every assignment.
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
        for name, factory in cls._factories.items():
            if name not in values:
                values[name] = factory()
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
        return self._values(self.field_names)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        # As tuples, which compare identical values without calling their `__eq__`.
        names = self._compared_names
        return self._values(names) == other._values(names)

    def __hash__(self) -> int:
        return hash(self._values(self._hashed_names))

    def _values(self, names: Sequence[str]) -> tuple[Any, ...]:
        values = self.__dict__
        return tuple([values[name] for name in names])

    def __repr__(self) -> str:
        pairs = zip(self.field_names, self.astuple(), strict=True)
        fields = ", ".join(f"{name}={value!r}" for name, value in pairs)
        return f"{type(self).__qualname__}({fields})"

    def replace(self: R, **changes: Any) -> R:
        """Return a copy with some fields changed, which is validated again."""
        return type(self)(**dict(zip(self.field_names, self.astuple(), strict=True)) | changes)
