"""Allowances: what a user may accept that is an error otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.errors import UsageError
from reshard.text.quantities import count_text

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


def describe_unmatched(names: Sequence[str], total: int, by: str) -> str:
    """The error of tensors that no rule matches; `by` says whose rules these are."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"no rule {by} matches {len(names)} of {count_text(total, 'tensor')}: {shown}. Give rules "
        "for them, `*=...` behind all others for copies on every rank, or accept such copies: "
        "--allow unmatched, in Python allow=['unmatched']"
    )
