"""Fused parameters: which slices of one are which other tensors.

Frameworks keep tensors that are multiplied by the same input in one parameter. A `Fusion` says
which, and how they lie in it: one dimension is made of equal groups, and in each group the members
have their shares one behind the other::

    queries, keys and values by group      gate above up            queries, keys, values in blocks
    shares 4, 2, 2   groups 2              shares 1, 1   groups 1   shares 4, 2, 2   groups 1

    | q q k v | q q k v |                  | g g g | u u u |        | q q q q | k k | v v |

So a fused parameter is one more cut of its members: a slice of it is a slice of one of them, and
converting between fused and separate tensors is the same copy as any other change of layout.

Sources: `linear_qkv` and `linear_fc1` of Megatron-core, `qkv_proj` and `gate_up_proj` of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.errors import RecipeError
from reshard.recipes.config.expressions import parse_expression

# A number, or an expression of a config.json (`reshard.recipes.config.expressions`).
Number = int | str


class MemberSlice(NamedTuple):
    """Indices `start:stop` of the fused dimension, which begin at `member_start` of `member`."""

    member: str
    member_start: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fusion:
    """The places of members in a fused parameter.

    Args:
        members: their names, or patterns of them where the fused parameter's name is one.
        shares: how the members share the dimension, as any numbers in the same proportion, such
            as their heads; equally when empty. A text is an expression of config.json.
        groups: how many times the members follow one another; every group has all of them.
        dimension: that is shared.

    Raises:
        RecipeError: fewer than two members, one twice, or shares and groups that are no whole
            numbers of at least 1, or no expression.

    >>> Fusion(("q", "k", "v"), shares=(4, 2, 2), groups=2).member_slices(8)[2:4]
    (MemberSlice(member='v', member_start=0, start=3, stop=4),
    MemberSlice(member='q', member_start=2, start=4, stop=6))
    """

    members: tuple[str, ...]
    shares: tuple[Number, ...] = ()
    groups: Number = 1
    dimension: int = 0

    def __post_init__(self) -> None:
        for given in (self.members, self.shares):
            # A text would pass for a tuple of letters.
            if not isinstance(given, list | tuple):
                raise RecipeError(f"members or shares {given!r}; give a tuple of them")
        members = tuple(self.members)
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "shares", tuple(self.shares) or (1,) * len(members))
        if len(members) < 2 or len(set(members)) != len(members):
            raise RecipeError(
                f"a parameter fused from {list(members)}; give two members or more, each once"
            )
        if len(self.shares) != len(members):
            raise RecipeError(
                f"{len(self.shares)} shares for the {len(members)} members {list(members)}; give "
                "one for each"
            )
        least = (("a share", 1, self.shares), ("groups", 1, (self.groups,)))
        for what, fewest, numbers in (*least, ("dimension", 0, (self.dimension,))):
            for number in numbers:
                if isinstance(number, str) and what != "dimension":
                    parse_expression(number)
                    continue
                if isinstance(number, bool) or not isinstance(number, int) or number < fewest:
                    raise RecipeError(
                        f"{what} of {number!r}; it is a whole number of at least {fewest}"
                    )

    def filled_in(self, config: Mapping[str, object] | None) -> Fusion:
        """The fusion with the numbers of `config`. Raises RecipeError for one that is not there.

        >>> Fusion(("q", "k"), ("heads", "groups|heads"), "groups|heads").filled_in({"heads": 8})
        Fusion(members=('q', 'k'), shares=(8, 8), groups=8, dimension=0)
        """

        def number(given: Number) -> int:
            return parse_expression(given).value(config) if isinstance(given, str) else given

        return replace(self, shares=tuple(map(number, self.shares)), groups=number(self.groups))

    def member_slices(self, length: int) -> tuple[MemberSlice, ...]:
        """The slices of a fused dimension of `length` that are members', in order.

        Raises RecipeError for a length that groups and shares do not divide, and for numbers that
        only a config knows.
        """
        shares = [share for share in self.shares if isinstance(share, int)]
        groups = self.groups
        if not isinstance(groups, int) or len(shares) != len(self.shares):
            raise RecipeError(f"{self} needs numbers of a config.json; give them (`filled_in`)")
        total = sum(shares)
        if length % groups or any(length // groups * share % total for share in shares):
            raise RecipeError(
                f"length {length} cannot be cut into {groups} groups, each in the proportion "
                f"{':'.join(map(str, shares))}; correct the heads or sizes that are given"
            )
        found = []
        # Groups follow one another; in each, every member has its next piece.
        sizes = [length // groups * share // total for share in shares]
        start = 0
        for group in range(groups):
            for member, size in zip(self.members, sizes, strict=True):
                found.append(MemberSlice(member, group * size, start, start + size))
                start += size
        return tuple(found)

    def sizes(self, length: int) -> tuple[int, ...]:
        """The length of each member in a fused dimension of `length`. Raises RecipeError as above.

        >>> Fusion(("gate", "up")).sizes(6)
        (3, 3)
        """
        found = dict.fromkeys(self.members, 0)
        for one in self.member_slices(length):
            found[one.member] += one.stop - one.start
        return tuple(found.values())
