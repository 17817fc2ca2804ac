"""Families of operators.

A module holds each operator's function, sharding rule, kernel, derivative and record.
"""

from __future__ import annotations

from reshard.spmd.core.operator import close_shipped
from reshard.spmd.operators import table  # noqa: F401
from reshard.spmd.ops import windows  # noqa: F401

close_shipped()
