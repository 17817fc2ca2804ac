"""Numbers of parameters in an optimizer's state become names."""

from __future__ import annotations

import pytest

from reshard.checkpoint.formats.optimizer_states import find_state_names

PARAMETERS = [("a", (2,)), ("b", (3,))]
GROUPS = [{"params": [0, 1]}]


def test_state_of_one_element_has_any_shape() -> None:
    """As a step that is counted in a vector of length 1."""
    state = {"optimizer.state.1.step": (1,), "optimizer.state.1.exp_avg": (3,)}
    assert find_state_names(PARAMETERS, state, GROUPS) == (
        {
            "optimizer.state.1.step": "optimizer.state.b.step",
            "optimizer.state.1.exp_avg": "optimizer.state.b.exp_avg",
        },
        None,
    )


@pytest.mark.parametrize(
    ("state", "groups", "reason"),
    [
        ({"optimizer.state.0.exp_avg": (3,)}, GROUPS, r"exp_avg of parameter 0 is [3], and 'a'"),
        ({"optimizer.state.2.exp_avg": (3,)}, GROUPS, "state of parameter 2, and there are 2"),
        ({"optimizer.state.0.exp_avg": (2,)}, [{"params": [0]}], "its 1 parameters have numbers"),
        ({"optimizer.state.0.exp_avg": (2,)}, GROUPS * 2, "numbers in several groups"),
    ],
)
def test_numbers_that_do_not_fit_stay(
    state: dict[str, tuple[int, ...]], groups: list[dict[str, list[int]]], reason: str
) -> None:
    names, problem = find_state_names(PARAMETERS, state, groups)
    assert names == {}
    assert problem is not None and reason in problem
