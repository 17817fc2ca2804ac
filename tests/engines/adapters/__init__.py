"""Adapters of PEFT: what is merged here, against PEFT's own merge."""
