"""Preparation of many refits: reuse plans of equal inputs.

A trainer prepares a refit for each engine, and most engines are alike. A plan follows from the
options and from all ranks' descriptions of their models, so a rank with a plan for the same inputs
reuses it. Each rank decides this by itself: ranks that plan anew find the same plan.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Generic, TypeVar

Plan = TypeVar("Plan")


class KnownPlans(Generic[Plan]):
    """A cache of plans by their inputs: all plans that are in use, and the last plan used.

    If the only engine leaves and another engine like it arrives, its plan is still in the cache.

    >>> known = KnownPlans[frozenset[str]]()
    >>> known.keep(b"a", frozenset({"up"}))
    >>> known.find(b"a"), known.find(b"b")
    (frozenset({'up'}), None)
    """

    def __init__(self) -> None:
        self._plans: weakref.WeakValueDictionary[bytes, Plan] = weakref.WeakValueDictionary()
        self._last: Plan | None = None

    def keep(self, key: bytes | None, plan: Plan) -> None:
        """Cache a plan, unless its key is None."""
        if key is not None:
            self._plans[key] = self._last = plan

    def find(self, key: bytes | None) -> Plan | None:
        """Return the plan of a key, or None if it is not in the cache."""
        found = None if key is None else self._plans.get(key)
        if found is not None:
            self._last = found
        return found


def make_key(options: object | None, messages: Mapping[int, tuple[bytes, ...]]) -> bytes | None:
    """Return a digest of a plan's inputs: options and all ranks' messages; None without options.

    >>> make_key((True, 3), {0: (b"a",)}) == make_key((True, 3), {0: (b"b",)}), make_key(None, {})
    (False, None)
    """
    if options is None:
        return None
    hasher = hashlib.blake2b(repr(options).encode(), digest_size=16)
    # Ranks with equal messages share an object, so each is hashed once.
    every = {id(one): one for message in messages.values() for one in message}
    digests = {key: hashlib.blake2b(one, digest_size=16).digest() for key, one in every.items()}
    for rank, message in messages.items():
        hasher.update(f"\0{rank}\0".encode() + b"".join(digests[id(one)] for one in message))
    return hasher.digest()
