"""Hypothesis settings: the same examples in every run, more of them when asked for."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("RESHARD_HYPOTHESIS_EXAMPLES", "0"))

settings.register_profile(
    "reshard",
    derandomize=EXAMPLES == 0,
    deadline=None,
    print_blob=True,
    max_examples=EXAMPLES or 100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("reshard")
