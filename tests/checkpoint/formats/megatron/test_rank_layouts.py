"""The places of Megatron's ranks."""

import itertools

import pytest

from reshard.checkpoint.formats.megatron.common_state import PARALLELISM
from reshard.checkpoint.formats.megatron.rank_layouts import Parallelism
from reshard.errors import FormatError


def test_a_folder_for_each_pair_of_indices_that_a_rank_has():
    for tp, ep, etp in itertools.product((1, 2, 3, 4, 6), repeat=3):
        ranks = {(n // etp % ep, n % tp) for n in range(tp * ep * etp)}
        places = Parallelism(tp=tp, ep=ep, etp=etp).places()
        assert [(place.ep, place.tp) for place in places] == sorted(ranks)


def test_damaged_sizes_are_refused_before_their_ranks_are_listed():
    sizes = {PARALLELISM[axis]: 1 << 16 for axis in ("tp", "pp", "ep")}
    with pytest.raises(FormatError, match=r"args: tp 65536, .* are more than 1,048,576 ranks"):
        Parallelism.of_arguments(sizes, "args")
