"""The keywords of a refit, as types know them."""

from __future__ import annotations

import inspect
import re

import pytest

pytest.importorskip("torch")

from reshard.torch.redistribution import RedistributionOptions, redistribute
from reshard.torch.refitting.options import RefitOptions, RefitSettings
from reshard.torch.refitting.refit import Refit


def test_the_options_of_a_refit_are_those_of_its_preparation() -> None:
    declared = {k: v.__forward_arg__ for k, v in RefitOptions.__annotations__.items()}
    assert declared.pop("group") == "dist.ProcessGroup | None"
    assert {k: RefitSettings.__annotations__[k] for k in RefitSettings.field_names} == declared
    # Every option is described where it is given.
    described = inspect.getdoc(Refit.prepare) or ""
    assert [name for name in declared if not re.search(rf"\b{name}\b.*: ", described)] == []


def test_the_options_of_partitioned_tensors_are_those_of_a_redistribution() -> None:
    parameters = inspect.signature(redistribute).parameters
    for name, annotation in RedistributionOptions.__annotations__.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].annotation == annotation.__forward_arg__
