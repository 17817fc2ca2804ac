"""Seconds for collectives and messages on a topology, and the topologies of known machines."""

from reshard.cost.collective import collective_cost
from reshard.cost.copies import Copies
from reshard.cost.estimate import Estimate, Part
from reshard.cost.formulas import FORMULAS, LIBRARIES, Formula, fastest_formula
from reshard.cost.links import slowest_link
from reshard.cost.messages import message_cost
from reshard.cost.preset import Preset
from reshard.cost.preset_file import load_preset, preset_text, shipped_presets

__all__ = [
    "FORMULAS",
    "LIBRARIES",
    "Copies",
    "Estimate",
    "Formula",
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
