"""Sharding rules: how the dimensions of an operator's operands and results correspond.

`sharding_rule.py` has the rule and its text form. `rule_builder.py` and `templates.py` create
rules, and `shapes.py` reads axes and shapes for them. `alignment.py` finds the shardings with which
an operation runs, `reshape_factors.py` the factors of a reshape.
"""
