"""The exchange of messages between ranks, by which all tensors move.

`exchange` is where to start: messages of all tensors that move at once, in little memory,
optionally in a separate thread. `packing` lists, copies and combines the contents of messages
(their sizes and order: `reshard.plans.schedule`). `changes` sends only changes since the previous
run. `all_gather` uses a library's own collective. A `carrier` transports bytes. Ranks find each
other by `groups` and `rendezvous`, and compare their calls in `agreement`. `consistency` marks
tensors that a failed run left partly written, and `timeline` records the activity of a rank.
"""
