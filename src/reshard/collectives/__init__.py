"""Collective programs: the steps, the searches, and what they find."""

from reshard.collectives.choice import Choice, choose
from reshard.collectives.division import Division, divide
from reshard.collectives.program import Program
from reshard.collectives.search.find_program import SEARCHES, STEPS, find_program
from reshard.collectives.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    JointAllToAll,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)

__all__ = [
    "SEARCHES",
    "STEPS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Choice",
    "Division",
    "Exchange",
    "JointAllToAll",
    "Permute",
    "Program",
    "ReduceScatter",
    "Slice",
    "Step",
    "choose",
    "divide",
    "find_program",
]
