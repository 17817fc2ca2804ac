"""For all tests: the same examples of Hypothesis in every run, and a ctrl-C that is felt."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A shell's background jobs ignore ctrl-C, and their children with them: there it would not be felt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
