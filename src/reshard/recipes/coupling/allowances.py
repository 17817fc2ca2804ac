"""Allowances: what a user may accept that is an error otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import UsageError

ALLOWANCES = ("uncomputable", "unmatched")


def parse_allowed(allow: Iterable[str]) -> frozenset[str]:
    """The words of `allow`.

    Raises:
        UsageError: a word that is none, or what is no list of them.

    >>> parse_allowed(["unmatched"])
    frozenset({'unmatched'})
    """
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise UsageError(f"allow {allow!r}; give a list, such as ['{ALLOWANCES[0]}']")
    words = list(allow)
    for word in words:
        if word not in ALLOWANCES:
            raise UsageError(f"{word!r} cannot be allowed; what can is {' and '.join(ALLOWANCES)}")
    return frozenset(words)
