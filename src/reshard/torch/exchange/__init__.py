"""The exchange of messages between ranks, by which all tensors move between them.

`exchange` is where to start: messages of all tensors that move at once, in little memory, also in a
thread of their own. `packing` lists, copies and combines what is in a message (how large and in
which order: `reshard.plans.schedule`); `changes` sends only what changed since the run before;
`all_gather` uses a library's own collective. A `carrier` transports bytes. Ranks find each other by
`groups` and `rendezvous`, and compare their calls in `agreement`. `consistency` marks tensors that
a failed run left partly written, and `timeline` records what a rank does when.
"""
