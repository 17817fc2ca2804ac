"""The logger `reshard`, which is silent until a handler is added, and notices of long waits.

>>> import logging
>>> logging.getLogger("reshard") is LOGGER
True
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

#: The library's logger. Conversions and loads are logged when they begin and end.
LOGGER = logging.getLogger("reshard")
# Without a handler, Python prints warnings itself.
LOGGER.addHandler(logging.NullHandler())

# Waits longer than this are reported.
NOTICE_S = 10.0


class WaitNotice:
    """A line on stderr for waits longer than `NOTICE_S`, written once.

    The waiting code calls `check` repeatedly.

    Args:
        describe: returns a description of the wait, such as the ranks that are missing.

    >>> notice = WaitNotice(lambda: "ranks 1 and 3 of 4, which have not come")
    >>> notice.check()
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._due_s = time.monotonic() + NOTICE_S

    def check(self) -> None:
        """Write the notice if it is due."""
        if time.monotonic() >= self._due_s:
            self._due_s = float("inf")
            text = f"waiting for {self._describe()}"
            LOGGER.warning("%s", text)
            # Also without logging, which is silent by default: a wait for other ranks looks like a
            # hang.
            sys.stderr.write(f"reshard: {text}\n")
            sys.stderr.flush()
