"""Interned (hash-consed) values: equal values are the same object.

Layouts are compared and looked up far more often than they are built, and some are large. An
interned class keeps a single object per key, so equality is identity, hashing takes constant time,
and results can be cached by the objects they were computed from.

>>> class Point(Interned):
...     field_names = ("x", "y")
...     def __init__(self, x: int, y: int = 0) -> None:
...         self.x, self.y = x, y
>>> Point(1) is Point(1, 0), Point(1) is Point(2), Point(1).replace(y=3) is Point(1, 3)
(True, False, True)
"""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

V = TypeVar("V", bound="Interned")

_lock = threading.Lock()
# Weak, so that interning alone keeps no layout of a finished job in memory.
_values: WeakValueDictionary[tuple[type, object], Any] = WeakValueDictionary()
_values_by_arguments: WeakValueDictionary[tuple[type, object], Any] = WeakValueDictionary()


class _InterningType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        arguments_key = cls.arguments_key(*args, **kwargs)  # type: ignore[attr-defined]
        if arguments_key is not None:
            # Without the lock: after a miss, the value is built again, and `setdefault` below
            # decides.
            cached = _values_by_arguments.get((cls, arguments_key))
            if cached is not None:
                return cached
        value = super().__call__(*args, **kwargs)
        key = (cls, value.interning_key())
        with _lock:
            # If several threads build the same value at once, all get the first.
            value = _values.setdefault(key, value)
            if arguments_key is not None:
                _values_by_arguments[cls, arguments_key] = value
        return value


class Interned(metaclass=_InterningType):
    """A base class whose equal values are the same object.

    A subclass builds and validates itself as usual, and lists its arguments, two or more, in
    `field_names`: in order, each by the attribute that stores it. Its key is the values of these
    attributes, unless it defines `interning_key`. Instances must not change once built.
    """

    field_names: ClassVar[tuple[str, ...]] = ()
    _get_values: ClassVar[attrgetter[Any]]

    def __init_subclass__(cls) -> None:
        # Keys are computed for every construction; a getter of two attributes or more returns a
        # tuple, in half the time of a tuple of `getattr`s.
        if cls.field_names:
            cls._get_values = attrgetter(*cls.field_names)

    def interning_key(self) -> object:
        """Return a hashable value that determines the object completely."""
        if not self.field_names:
            raise NotImplementedError
        return self._get_values(self)

    @classmethod
    def arguments_key(cls, *args: Any, **kwargs: Any) -> object:
        """Return a hashable value that determines the arguments, types included, or None.

        A value that was built from the same arguments, and that is still in use, is returned
        without building it again.
        """
        return None

    def replace(self: V, **changes: Any) -> V:
        """Return the value with some fields changed, which is validated again."""
        values = dict(zip(self.field_names, self._get_values(self), strict=True))
        unknown = changes.keys() - values.keys()
        if unknown:
            raise TypeError(f"a {type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return type(self)(*(values | changes).values())

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling calls the class, so that the value is interned in the process that reads it.
        return (type(self), self._get_values(self))

    # Equality is identity, so a copy of its own would differ from the original.
    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self
