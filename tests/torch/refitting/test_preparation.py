"""What preparing a refit spares: garbage collection meanwhile, and plans that are known."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch")

from reshard.torch import Cast
from reshard.torch.refitting.planning import RefitPlanner
from reshard.torch.refitting.preparation import KnownPlans, paused_collection


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


def test_it_goes_on_also_behind_an_error() -> None:
    assert gc.isenabled()

    def fail() -> None:
        with paused_collection():
            assert not gc.isenabled()
            with paused_collection():
                pass
            # The outer one is still there.
            assert not gc.isenabled()
            raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        fail()
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_counts_as_old_and_is_not_looked_through_again() -> None:
    with paused_collection():
        made = [[number] for number in range(10)]
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in old for one in made)


def test_what_others_keep_from_the_collector_stays_kept() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused_collection():
            pass
        # Some of it may have been freed meanwhile.
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
