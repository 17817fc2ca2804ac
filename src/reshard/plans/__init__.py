"""Plans and jobs: what moves from one layout to another, who sends it, and in which order.

plan         the plan of one tensor, `reshard.plan`; start here
job          all tensors together: senders balanced over them
senders/     who sends what        hosts/     in two stages, between and within hosts
schedule/    in which order        documents/ plans and jobs as JSON
tables/      both as text          relabelling, estimates, traffic
"""

from reshard.plans.senders.shares import balanced_shares

__all__ = ["balanced_shares"]
