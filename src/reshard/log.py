"""The logger `reshard`, which is silent until a program listens, and notices of long waits.

>>> import logging
>>> logging.getLogger("reshard") is LOGGER
True
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

#: Of all of the library. Conversions and loading tell it when they begin and end.
LOGGER = logging.getLogger("reshard")
# Without a handler, Python itself would print warnings.
LOGGER.addHandler(logging.NullHandler())

# After how long a wait is worth a word.
NOTICE_S = 10.0


class WaitNotice:
    """A line on stderr for whoever waits longer than `NOTICE_S`, once.

    Whoever waits calls `check` again and again.

    Args:
        describe: returns what is waited for: ranks that have not come, by their numbers.

    >>> notice = WaitNotice(lambda: "ranks 1 and 3 of 4, which have not come")
    >>> notice.check()
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._due_s = time.monotonic() + NOTICE_S

    def check(self) -> None:
        """Say once what is waited for, if the time has come."""
        if time.monotonic() >= self._due_s:
            self._due_s = float("inf")
            text = f"waiting for {self._describe()}"
            LOGGER.warning("%s", text)
            sys.stderr.write(f"reshard: {text}\n")
            sys.stderr.flush()
