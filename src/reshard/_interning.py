"""Interned (hash-consed) values: equal values are the same object.

Layouts are compared and looked up far more often than they are built, and some are large. An
interned class keeps a single object per key, so equality is identity, hashing takes constant time,
and results can be cached by the objects they were computed from.

>>> class Point(Interned):
...     def __init__(self, x: int) -> None:
...         self.x = x
...     def interning_key(self) -> object:
...         return self.x
>>> Point(1) is Point(1), Point(1) is Point(2)
(True, False)
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

_lock = threading.Lock()
_values: WeakValueDictionary[tuple[type, object], Any] = WeakValueDictionary()
_values_by_arguments: WeakValueDictionary[tuple[type, object], Any] = WeakValueDictionary()


class _InterningType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        arguments_key = cls.arguments_key(*args, **kwargs)  # type: ignore[attr-defined]
        if arguments_key is not None:
            known = _values_by_arguments.get((cls, arguments_key))
            if known is not None:
                return known
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

    A subclass builds and validates itself as usual and defines `interning_key()`, a hashable
    value that determines the object completely. Instances must not change once built.
    """

    def interning_key(self) -> object:
        raise NotImplementedError

    @classmethod
    def arguments_key(cls, *args: Any, **kwargs: Any) -> object:
        """Return a hashable value that determines the arguments, types included, or None.

        A value that was built from the same arguments, and that is still in use, is returned
        without building it again.
        """
        return None

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self
