"""The problem of a search over whole axes, not their prime parts: small for a large mesh.

A mesh of 8x8x4 has three axes and eight prime parts; of the parts there are so many shardings
that a search may have to give up. Of the axes, or the parts of them that the source and the target
use, there are few. The cheapest program over these is one over the parts too, not always the
cheapest one::

    prime mesh x=8  ->  0: x:(1)2   1: x:(2)2   2: x:(4)2         y=4  ->  3, 4
    whole      x=8  ->  0: x                                      y=4  ->  1
"""

from __future__ import annotations

from reshard.collectives.search.prime_axes import PrimeMesh
from reshard.collectives.search.problems import Problem
from reshard.collectives.search.states import Cut, Space, State

Unit = tuple[int, ...]


class AxisProblem:
    """A problem over whole axes, and the way back to the parts.

    >>> from reshard.collectives.search.problems import problem_of
    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.sharding import spec
    >>> mesh = DeviceMesh.of(x=8, y=4)
    >>> fine = problem_of(spec(mesh, "x, y"), spec(mesh, "y, x"), (64, 64), None, "classical")
    >>> whole = AxisProblem(fine)
    >>> fine.source.cuts, whole.problem.source.cuts
    ((((0, 1, 2),), ((3, 4),)), (((0,),), ((1,),)))
    >>> whole.parts(whole.problem.source) == fine.source
    True
    """

    def __init__(self, problem: Problem) -> None:
        prime_meshes: list[PrimeMesh] = []
        self._prime: dict[int, int] = {}
        self._units: dict[int, Unit] = {}
        for fine in problem.space.prime_meshes:
            # Axes of all meshes are numbered one after another, as prime axes are.
            first = sum(len(prime_mesh.primes) for prime_mesh in prime_meshes)
            prime_meshes.append(PrimeMesh(fine.mesh, fine.boundaries, first, has_whole_axes=True))
            for prime, unit in zip(prime_meshes[-1].primes, fine.units, strict=True):
                self._prime |= dict.fromkeys(unit, prime)
                self._units[prime] = unit
        self.problem = Problem(
            Space(prime_meshes, problem.space.shape),
            self._join_primes(problem.source),
            self._join_primes(problem.target),
            problem.live_shard,
            problem.steps,
        )

    def _join_primes(self, state: State) -> State:
        cuts = tuple(
            # A level of a sharding is made of whole axes: each stands at its first part.
            tuple(tuple(dict.fromkeys(self._prime[prime] for prime in level)) for level in cut)
            for cut in state.cuts
        )
        return State(
            state.prime_mesh, cuts, frozenset(self._prime[prime] for prime in state.pending)
        )

    def parts(self, state: State) -> State:
        """A state over whole axes as one over their parts."""

        def cut_of(cut: Cut) -> Cut:
            return tuple(tuple(a for prime in level for a in self._units[prime]) for level in cut)

        pending = frozenset(a for prime in state.pending for a in self._units[prime])
        return State(state.prime_mesh, tuple(map(cut_of, state.cuts)), pending)
