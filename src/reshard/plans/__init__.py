"""Plans and jobs: the direct exchange of a tensor, or of many tensors together.

Start at `plan` (`reshard.plan`) and `job` (`reshard.Job`, a set of tensors); a plan is a job of a
single tensor.
Which elements move follows from the layouts (`reshard.geometry`). This package adds:

source_selection    the sender of each element, with shares from `load_balancing`
hierarchical        staged jobs that send each byte to a host once: `element_groups` are divided
                    into `fragments` and forwarded along a `broadcast_tree`
rank_permutation    the assignment of ranks to the target that keeps most bytes in place
schedule            messages, their order, batches and pipelines
estimates, traffic  seconds, and bytes between ranks
run                 execution on arrays in a process
tables              the text of `print(plan)` and `print(job)`
documents           versioned JSON documents; `serialization` has `to_json` and `from_json`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.plans.load_balancing import balanced_shares
    from reshard.plans.run import run_change

__all__ = ["balanced_shares", "run_change"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "reshard.plans.load_balancing": ["balanced_shares"],
        "reshard.plans.run": ["run_change"],
    },
)
