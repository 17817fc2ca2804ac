"""For tests of software that uses reshard: a brute-force oracle, and Hypothesis strategies.

Raises MissingExtraError on import where hypothesis is not installed.
"""

from __future__ import annotations

from reshard.testing import oracle, rule_definitions, strategies

__all__ = ["oracle", "rule_definitions", "strategies"]
