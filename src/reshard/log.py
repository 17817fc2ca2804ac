"""The logger `reshard`, which is silent until a program listens.

>>> import logging
>>> logging.getLogger("reshard") is LOGGER
True
"""

from __future__ import annotations

import logging

#: Of all of the library. Conversions and loading tell it when they begin and end.
LOGGER = logging.getLogger("reshard")
# Without a handler, Python itself would print warnings.
LOGGER.addHandler(logging.NullHandler())
