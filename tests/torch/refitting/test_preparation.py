"""What preparing a refit spares: garbage collection meanwhile, and plans that are known."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch")

from reshard.torch import Cast
from reshard.torch.refitting.planning import RefitPlanner
from reshard.torch.refitting.preparation import KnownPlans


class Planned:
    """A plan."""


def test_plans_are_known_as_long_as_somebody_has_them_and_the_last_one_longer() -> None:
    known = KnownPlans[Planned]()
    kept, dropped = Planned(), Planned()
    known.keep(b"kept", kept)
    known.keep(b"dropped", dropped)
    del dropped
    # It is the last one.
    assert known.find(b"dropped") is not None
    assert known.find(b"kept") is kept
    gc.collect()
    assert known.find(b"dropped") is None


def test_transforms_are_code_so_their_plans_are_not_known() -> None:
    assert RefitPlanner({}, False, True, {"x": Cast("int8")}, 0).options is None
    known = KnownPlans[Planned]()
    known.keep(None, Planned())
    assert known.find(None) is None
    plain = [RefitPlanner({}, cast, True, {}, 0).options for cast in (False, {"x": "int8"}, True)]
    assert len(set(map(repr, plain))) == 3
