"""The exchange of messages between ranks: the one way in which tensors move between them.

`exchange` is where to start: messages of all tensors that move at once, in little memory. What is
in a message is listed, copied and combined in `packing` (how large and in which order:
`reshard.plans.schedule`); `changes` sends only what changed since the run before, `compared`
chooses between that and `stages`; `background` runs an exchange in a thread, `all_gather` by a
library's own collective. `agreement` is what ranks tell each other before and after; `usability`
marks tensors that a run left partly written, `timeline` records what a rank does when.
"""
