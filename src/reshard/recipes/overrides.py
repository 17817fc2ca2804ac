"""Allowances: conditions that a user may accept and that are errors otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from reshard.errors import UsageError
from reshard.text import count_text, first_text

DIFFERING_COPIES = "differing-copies"
UNSCALED = "unscaled"
IDLE_AXES = "replicas"
STATELESS = "stateless"
ALLOWANCES = (
    *("incomplete", "uncomputable", "unknown", UNSCALED, DIFFERING_COPIES, IDLE_AXES, STATELESS),
)
FORMER_ALLOWANCES = {"unmatched": "unknown"}
"""The words of earlier versions, with those that replace them."""


def parse_allowed(allow: Iterable[str], known: Sequence[str] = ALLOWANCES) -> frozenset[str]:
    """Return the words of `allow`, all of which must be in `known`.

    Raises:
        UsageError: a word that cannot be allowed, or an object that is not a list of words.

    >>> parse_allowed(["unknown"])
    frozenset({'unknown'})
    """
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise UsageError(f"allow {allow!r}; give a list, such as ['{known[0]}']")
    words = []
    for word in allow:
        if word in FORMER_ALLOWANCES and FORMER_ALLOWANCES[word] in known:
            new = FORMER_ALLOWANCES[word]
            warnings.warn(f"allow {word!r} is now {new!r}", DeprecationWarning, stacklevel=2)
            word = new
        if word not in known:
            raise UsageError(f"{word!r} cannot be allowed; choose from {', '.join(known)}")
        words.append(word)
    return frozenset(words)


def describe_unknown(names: Sequence[str], total: int, by: str) -> str:
    """Describe tensors that no rule matches, as an error; `by` names the owner of the rules."""
    return (
        f"no rule {by} matches {len(names)} of {count_text(total, 'tensor')}: "
        f"{first_text(names, 3)}. Give rules for them, `*=...` after all others for copies on "
        "every rank, or accept such copies: "
        "--allow unknown, in Python allow=['unknown']"
    )
