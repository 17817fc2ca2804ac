"""Seconds for collectives and messages on a topology, and the topologies of known machines.

formulas, collective  what a collective takes in one group, by its algorithm
messages, copies      what messages sent at once take, and copies beside them
estimate              seconds as a table: latency, bytes under way, copies
links                 the link between two ranks
preset, preset_file   known machines, and their files
fitting               links and overheads from measurements
"""

from reshard.cost.collective import collective_cost
from reshard.cost.copies import LocalCopies
from reshard.cost.estimate import Estimate, Part
from reshard.cost.formulas import FORMULAS, LIBRARIES, Formula, fastest_formula
from reshard.cost.links import slowest_link
from reshard.cost.messages import message_cost
from reshard.cost.preset import Preset
from reshard.cost.preset_file import load_preset, preset_text, shipped_presets

__all__ = [
    "FORMULAS",
    "LIBRARIES",
    "Estimate",
    "Formula",
    "LocalCopies",
    "Part",
    "Preset",
    "collective_cost",
    "fastest_formula",
    "load_preset",
    "message_cost",
    "preset_text",
    "shipped_presets",
    "slowest_link",
]
