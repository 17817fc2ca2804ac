"""The keywords of a refit, as types know them."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("torch")

from reshard.torch.redistribution import RedistributionOptions, redistribute
from reshard.torch.refitting.options import RefitOptions
from reshard.torch.refitting.refit import Refit


def test_the_options_of_a_refit_are_those_of_its_preparation() -> None:
    parameters = inspect.signature(Refit.prepare).parameters.values()
    keywords = {one.name: one.annotation for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert keywords == {k: v.__forward_arg__ for k, v in RefitOptions.__annotations__.items()}


def test_the_options_of_partitioned_tensors_are_those_of_a_redistribution() -> None:
    parameters = inspect.signature(redistribute).parameters
    for name, annotation in RedistributionOptions.__annotations__.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].annotation == annotation.__forward_arg__
