"""Preparation of refits of many tensors: what need not be planned again.

A trainer prepares one refit for each engine, and engines are much alike. A plan follows from what
all ranks say of their models and from the options, so a rank that has planned the same before uses
that plan. Nobody else has to: the others find the same.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Generic, TypeVar

Plan = TypeVar("Plan")


class KnownPlans(Generic[Plan]):
    """Plans by what they follow from: those that somebody has, and the one that was used last.

    So an engine that comes again, after the only one has gone, finds the plan that it had.

    >>> known = KnownPlans[frozenset[str]]()
    >>> known.keep(b"a", frozenset({"up"}))
    >>> known.find(b"a"), known.find(b"b")
    (frozenset({'up'}), None)
    """

    def __init__(self) -> None:
        self._plans: weakref.WeakValueDictionary[bytes, Plan] = weakref.WeakValueDictionary()
        self._last: Plan | None = None

    def keep(self, key: bytes | None, plan: Plan) -> None:
        """Know a plan, unless it has no key."""
        if key is not None:
            self._plans[key] = self._last = plan

    def find(self, key: bytes | None) -> Plan | None:
        """The plan of a key; None where it is not known, or not any more."""
        found = None if key is None else self._plans.get(key)
        if found is not None:
            self._last = found
        return found


def make_key(options: object | None, messages: Mapping[int, tuple[bytes, ...]]) -> bytes | None:
    """A digest of what a plan follows from: options, and what all ranks say; None without options.

    >>> make_key((True, 3), {0: (b"a",)}) == make_key((True, 3), {0: (b"b",)}), make_key(None, {})
    (False, None)
    """
    if options is None:
        return None
    hasher = hashlib.blake2b(repr(options).encode(), digest_size=16)
    # Ranks that say the same have one object.
    every = {id(one): one for message in messages.values() for one in message}
    digests = {key: hashlib.blake2b(one, digest_size=16).digest() for key, one in every.items()}
    for rank, message in messages.items():
        hasher.update(f"\0{rank}\0".encode() + b"".join(digests[id(one)] for one in message))
    return hasher.digest()
