"""Packing: convert local tensors to messages between ranks, and received messages to tensors.

`pieces` are views of tensors, and the form in which they are sent. `messages` lists the pieces that
are sent together or stay, `copies` copies and combines them, and `slots` is the memory of messages.
"""
