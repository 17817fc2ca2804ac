"""Propagation and explicit reshards against Shardy's own passes, on random programs.

`make test` compares a sample; `tools/propagation_campaign.py` as many as are asked for.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from selection import choose
from shardy_oracle import campaign

SAMPLE = choose(60, 300)
SHARE_OF_DELIBERATE = 0.06

COMPARED_WITH = "0.10.2"


def installed() -> str:
    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return "none"


pytestmark = pytest.mark.skipif(
    installed() != COMPARED_WITH,
    reason=f"Shardy's passes are those of jaxlib {COMPARED_WITH}, not {installed()}",
)


def test_a_sample_of_random_programs_has_no_unexplained_difference() -> None:
    tally = campaign(range(SAMPLE))
    assert not tally.unexplained, "\n\n".join(tally.unexplained)
    assert tally.programs == SAMPLE
    # What is left out stays rare, and half of the programs have something to move.
    assert sum(tally.explained.values()) <= SHARE_OF_DELIBERATE * sum(tally.compared.values())
    assert tally.conflicts >= tally.compared["explicit reshards"] / 2
    # Shardy's own verifier refuses some of its explicit reshards; it never refuses a propagation.
    reshards = tally.compared.pop("explicit reshards")
    assert set(tally.compared.values()) == {SAMPLE}
    assert reshards >= 0.75 * SAMPLE
