"""Reports of what preparing a refit took, and by which methods its tensors move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.system import peak_bytes
from reshard.torch.refitting.methods import TensorMethod


@dataclass(frozen=True, slots=True)
class PlanningReport:
    """What the preparation of a refit took on this rank.

    Attributes:
        planning: `local` or `centralized`.
        gathered_bytes: received of what other ranks have.
        scattered_bytes: parts given out, on the rank that plans; on others, that of its own part.
        planned_ranks: how many ranks' parts this rank worked out; of its own none where it had
            planned the same before.
        peak_memory_bytes: by how much the most memory this process ever had grew meanwhile.
        planning_s: seconds, waiting for others included.
        made_at_source: the tensors, of those that this rank has a part in, that transforms make
            before they are sent.
        made_at_target: likewise those that they make of what has arrived, and why.
        programs: likewise those that move by a program of collectives, with its steps and why.
        exchanged: likewise why all others do not, where programs are considered.
        staged: likewise what crosses into each host once, and why.
    """

    planning: str
    gathered_bytes: int
    scattered_bytes: int
    planned_ranks: int
    peak_memory_bytes: int
    planning_s: float
    made_at_source: tuple[str, ...] = ()
    made_at_target: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    exchanged: Mapping[str, str] = field(default_factory=dict)
    staged: Mapping[str, str] = field(default_factory=dict)


class ReportedMethods(NamedTuple):
    """What moves by programs, why others do not, and what is staged and why, by name."""

    programs: dict[str, str]
    exchanged: dict[str, str]
    staged: dict[str, str]


def report_methods(chosen: Iterable[tuple[str, TensorMethod]]) -> ReportedMethods:
    """The methods of tensors by their names."""
    found = programs, exchanged, staged = ReportedMethods({}, {}, {})
    for name, method in chosen:
        if method.program is not None:
            steps = ", ".join(map(str, method.program.steps))
            programs[name] = f"{steps}: {method.why}"
        elif method.is_staged or method.is_staged_whole:
            staged[name] = method.why
        elif method.why:
            exchanged[name] = method.why
    return found


def peak_memory_bytes() -> int:
    """The most memory this process ever had; 0 where the system does not say."""
    return peak_bytes()
