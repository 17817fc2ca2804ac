"""Packing: convert local tensors to messages between ranks, and received messages to tensors.

`messages` lists the pieces of tensors that are sent together or stay, and `copies` copies and
combines them.
"""
