"""Sharding rules: how the dimensions of an operator's operands and results hang together.

`sharding_rule.py` is the rule and its text, `rule_builder.py` and `templates.py` make rules,
`shapes.py` reads axes and shapes for them. `alignment.py` finds the shardings that an operation
runs with, `reshape_factors.py` the factors of a reshape.
"""
