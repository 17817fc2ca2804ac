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
        "reshard.cost.estimate": [
            "collective_cost",
            "Estimate",
            "LocalCopies",
            "message_cost",
            "Part",
        ],
        "reshard.cost.formulas": [
            "check_library",
            "fastest_formula",
            "Formula",
            "FORMULAS",
            "LIBRARIES",
        ],
        "reshard.cost.preset": ["load_preset", "Preset", "preset_text", "shipped_presets"],
        "reshard.topology": ["slowest_link"],
    },
)
