"""What is closed when its `with` block ends, however it ends."""

from __future__ import annotations

from typing import Self


class Closing:
    """A thing with `close()`, for `with` statements.

    >>> class Door(Closing):
    ...     def close(self):
    ...         print("shut")
    >>> with Door():
    ...     pass
    shut
    """

    __slots__ = ()

    def close(self) -> None:
        """Give up what is held. Doing it again does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
