"""Seconds of collectives, messages and copies on a topology, and known machines.

formulas  the cost of a collective in a group, by its algorithm
estimate  the seconds of collectives, of messages sent at once, and of local copies; start here
preset    known machines, and their TOML files
fitting   links and overheads from measurements
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._lazy import attach

if TYPE_CHECKING:
    from reshard.cost.estimate import Estimate, LocalCopies, Part, collective_cost, message_cost
    from reshard.cost.formulas import FORMULAS, LIBRARIES, Formula, check_library, fastest_formula
    from reshard.cost.preset import Preset, load_preset, preset_text, shipped_presets
    from reshard.topology import slowest_link

__all__ = [
    "FORMULAS",
    "LIBRARIES",
    "Estimate",
    "Formula",
    "LocalCopies",
    "Part",
    "Preset",
    "check_library",
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
        "check_library": "reshard.cost.formulas",
        "Estimate": "reshard.cost.estimate",
        "FORMULAS": "reshard.cost.formulas",
        "Formula": "reshard.cost.formulas",
        "LIBRARIES": "reshard.cost.formulas",
        "LocalCopies": "reshard.cost.estimate",
        "Part": "reshard.cost.estimate",
        "Preset": "reshard.cost.preset",
        "collective_cost": "reshard.cost.estimate",
        "fastest_formula": "reshard.cost.formulas",
        "load_preset": "reshard.cost.preset",
        "message_cost": "reshard.cost.estimate",
        "preset_text": "reshard.cost.preset",
        "shipped_presets": "reshard.cost.preset",
        "slowest_link": "reshard.topology",
    },
)
