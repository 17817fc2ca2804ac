"""Sharding rules: how the dimensions of an operator's operands and results correspond.

`sharding_rule.py` has the rule and its text form. `rule_builder.py` creates the rules of operators
from patterns, and `templates.py` rules that are independent of shapes. `alignment.py` finds the
shardings with which an operation runs.
"""
