"""The schedule of an exchange, which both ends of every message find without talking.

`messages` has the sizes of messages, what travels in each, their order, and the batches of those
that need memory beside their messages.
"""
