"""Seconds for collectives and messages on a topology, and the topologies of known machines.

formulas, collective  what a collective takes in one group, by its algorithm
messages, copies      what messages sent at once take, and copies beside them
estimate              seconds as a table: latency, bytes under way, copies
links                 the link between two ranks
preset, preset_file   known machines, and their files
fitting               links and overheads from measurements
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
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

__getattr__, __dir__ = attach(
    __name__,
    {
        "Estimate": "reshard.cost.estimate",
        "FORMULAS": "reshard.cost.formulas",
        "Formula": "reshard.cost.formulas",
        "LIBRARIES": "reshard.cost.formulas",
        "LocalCopies": "reshard.cost.copies",
        "Part": "reshard.cost.estimate",
        "Preset": "reshard.cost.preset",
        "collective_cost": "reshard.cost.collective",
        "fastest_formula": "reshard.cost.formulas",
        "load_preset": "reshard.cost.preset_file",
        "message_cost": "reshard.cost.messages",
        "preset_text": "reshard.cost.preset_file",
        "shipped_presets": "reshard.cost.preset_file",
        "slowest_link": "reshard.cost.links",
    },
)
