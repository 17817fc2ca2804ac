"""Jobs in two stages: an exchange that brings every byte into a host once, and a fan-out within.

Start at `staged_job`. `target_regions` and `element_groups` find elements that the same ranks hold
and want, `flows` how those get to the hosts that lack them, `copy_shares` and `fragments` who makes
which copies, `fragment_boxes` the boxes; `verification` proves both stages together.
"""
