"""Plans and jobs: the direct exchange of one tensor, or of many together.

Start at `plan` (`reshard.plan`) and `job` (`reshard.Job`). A job lists `job_item`s; a plan is a job
of one tensor. What moves is `reshard.geometry`'s; what they add:

- `senders/` chooses who sends what; `hosts/` moves a job in two stages, so that each byte enters
  a host once; `relabelling` gives the places of a target to the ranks that hold most of it;
- `schedule/` has the messages and batches that ranks agree on; `run` carries plans out in one
  process; `estimates` says the seconds, `local_copies` what each rank copies in its own memory;
- `job_transfers` and `traffic` are what moves, by tensor and by rank; `tables/` prints it and
  `documents/` writes it as JSON.
"""

from reshard.plans.load_balancing import balanced_shares

__all__ = ["balanced_shares"]
