"""Packing: how local tensors become the messages that ranks exchange, and what arrives tensors.

`pieces` are views of tensors, with what they travel as; `messages` lists those that travel together
or stay; `copies` copies and combines them; `slots` is the memory that messages have in turn.
"""
