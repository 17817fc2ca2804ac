from __future__ import annotations

import pytest

from reshard.errors import UsageError
from reshard.torch.vllm.parallelism import VllmParallelism


def test_ranks_and_mesh() -> None:
    both = VllmParallelism(tp=4, pp=2, dp=2, ep=8)
    assert both.ranks == 16
    assert both.mesh.text == "dp=2,pp=2,tp=4"
    assert both.text == "tp=4,pp=2,ep=8,dp=2"
    assert VllmParallelism().mesh.text == "tp=1"


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"tp": 4, "ep": 2}, {"dp": True}])
def test_sizes_that_vllm_has_not(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        VllmParallelism(**sizes)
