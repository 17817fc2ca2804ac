"""Faults as a campaign that can be run again: see docs/soak.md."""
