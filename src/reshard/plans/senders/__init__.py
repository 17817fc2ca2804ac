"""The policy of senders: who sends each element that several ranks hold.

Start at `selection`, which has both ways to choose (balanced and stable). `sender_assignment`
divides all bytes of a job, by the `shares` of holders that `rank_groups` and `share_rounding` make
quick and whole; `sender_transfers` writes out the boxes, `box_parts` those that several ranks
send, and `message_identity` names them.
"""
