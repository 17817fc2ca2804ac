"""Reports of a refit's preparation: its costs, and the methods by which tensors move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.system import peak_bytes
from reshard.torch.refitting.methods import TensorMethod


@dataclass(frozen=True, slots=True)
class PlanningReport:
    """The costs of a refit's preparation on this rank.

    Attributes:
        planning: `local` or `centralized`.
        gathered_bytes: the size of other ranks' manifests received.
        scattered_bytes: the size of all parts, on the rank that plans; on others, of its own part.
        planned_ranks: the number of ranks whose parts this rank computed, without parts that were
            reused.
        peak_memory_bytes: the increase of this process's peak memory during the preparation.
        planning_s: seconds, including those spent waiting for others.
        made_at_source: tensors with a part on this rank that transforms create before sending.
        made_at_target: tensors with a part on this rank that transforms create from received
            elements, and why.
        programs: tensors with a part on this rank that move by a program of collectives, with its
            steps and why.
        exchanged: tensors with a part on this rank that move in the exchange though programs were
            considered, and why.
        staged: tensors with a part on this rank that cross into each host once, and why.
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
    """Reasons by tensor name: for programs, for the exchange, and for stages."""

    programs: dict[str, str]
    exchanged: dict[str, str]
    staged: dict[str, str]


def report_methods(chosen: Iterable[tuple[str, TensorMethod]]) -> ReportedMethods:
    """Return the methods of tensors by name."""
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
    """Return the peak memory of this process, or 0 if the system does not report it."""
    return peak_bytes()
