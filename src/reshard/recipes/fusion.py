"""Fused parameters: which slices of one are which other tensors.

Frameworks keep tensors that are multiplied by the same input in one parameter. A `Fusion` says
which, and how they lie in it: one dimension is made of equal groups, and in each group the members
have their shares one behind the other::

    queries, keys and values by group      gate above up            queries, keys, values in blocks
    shares 4, 2, 2   groups 2              shares 1, 1   groups 1   shares 4, 2, 2   groups 1

    | q q k v | q q k v |                  | g g g | u u u |        | q q q q | k k | v v |

A stack has a dimension more in front, with the members of one number at each of its indices, and a
member can be stored with its last two dimensions swapped::

    gate_up_proj[e, :, :] is  experts.e.gate_proj.weight above experts.e.up_proj.weight
    shares 1, 1   stacked 4   or, transposed, beside it

So a fused parameter is one more cut of its members: a slice of it is a slice of one of them, and
converting between fused and separate tensors is the same copy as any other change of layout.

Sources: `linear_qkv` and `linear_fc1` of Megatron-core, `qkv_proj`, `gate_up_proj` and `w13_weight`
of vLLM, `experts.gate_up_proj` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.errors import RecipeError
from reshard.recipes.config.conditions import parse_condition
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
        members: their names, or patterns of them where the fused parameter's name is one. In a
            stack, `{}` stands for the number.
        shares: how the members share the dimension, as any numbers in the same proportion, such
            as their heads; equally when empty. A text is an expression of config.json.
        groups: how many times the members follow one another; every group has all of them.
        dimension: that is shared, of a member.
        stacked: how many of each member are stacked in front; 0 where they are not.
        transposed: whether the last two dimensions are swapped, after stacking and sharing.
        when: a condition of config.json on which there is such a parameter.

    Raises:
        RecipeError: one member that is neither stacked nor transposed, one twice, members whose
            `{}` does not fit, or numbers that are not whole, too small, or no expression.

    >>> Fusion(("q", "k", "v"), shares=(4, 2, 2), groups=2).member_slices(8)[2:4]
    (MemberSlice(member='v', member_start=0, start=3, stop=4),
    MemberSlice(member='q', member_start=2, start=4, stop=6))
    >>> Fusion(("experts.{}.down",), stacked=3).tensors
    ('experts.0.down', 'experts.1.down', 'experts.2.down')
    """

    members: tuple[str, ...]
    shares: tuple[Number, ...] = ()
    groups: Number = 1
    dimension: int = 0
    stacked: Number = 0
    transposed: bool = False
    when: str = ""

    def __post_init__(self) -> None:
        for given in (self.members, self.shares):
            # A text would pass for a tuple of letters.
            if not isinstance(given, list | tuple):
                raise RecipeError(f"members or shares {given!r}; give a tuple of them")
        members = tuple(self.members)
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "shares", tuple(self.shares) or (1,) * len(members))
        is_one_enough = bool(self.stacked) or self.transposed
        if len(members) < 2 - is_one_enough or len(set(members)) != len(members):
            raise RecipeError(
                f"a parameter fused from {list(members)}; give two members or more, each once"
            )
        places = {member.count("{}") for member in members}
        if places != {int(bool(self.stacked))}:
            raise RecipeError(
                f"members {list(members)}, stacked {self.stacked!r}; a stack's members have {{}} "
                "where their number is, once each, and others have none"
            )
        if not isinstance(self.transposed, bool):
            raise RecipeError(f"transposed is {self.transposed!r}; it is true or false")
        if len(self.shares) != len(members):
            raise RecipeError(
                f"{len(self.shares)} shares for the {len(members)} members {list(members)}; give "
                "one for each"
            )
        if self.when:
            parse_condition(self.when)
        least = (
            ("a share", 1, self.shares),
            ("groups", 1, (self.groups,)),
            ("stacked", 0, (self.stacked,)),
        )
        for what, fewest, numbers in (*least, ("dimension", 0, (self.dimension,))):
            for number in numbers:
                if isinstance(number, str) and what != "dimension":
                    parse_expression(number)
                    continue
                if isinstance(number, bool) or not isinstance(number, int) or number < fewest:
                    raise RecipeError(
                        f"{what} of {number!r}; it is a whole number of at least {fewest}"
                    )

    def counts(self, config: Mapping[str, object] | None) -> bool:
        """Whether a model has such a parameter, by its `when`.

        >>> Fusion(("q", "kv"), when="q_rank").counts({"q_rank": None})
        False
        """
        return not self.when or parse_condition(self.when).holds(config)

    def filled_in(self, config: Mapping[str, object] | None) -> Fusion:
        """The fusion with the numbers of `config`. Raises RecipeError for one that is not there.

        >>> found = Fusion(("q", "k"), ("heads", "kv|heads"), "kv|heads").filled_in({"heads": 8})
        >>> found.shares, found.groups
        ((8, 8), 8)
        """

        def number(given: Number) -> int:
            return parse_expression(given).value(config) if isinstance(given, str) else given

        return replace(
            self,
            shares=tuple(map(number, self.shares)),
            groups=number(self.groups),
            stacked=number(self.stacked),
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that are in it: of a stack, those of each number in turn.

        Raises RecipeError for a stack whose size only a config knows.
        """
        if not self.stacked:
            return self.members
        if not isinstance(self.stacked, int):
            raise RecipeError(f"{self} needs numbers of a config.json; give them (`filled_in`)")
        numbers = map(str, range(self.stacked))
        return tuple(member.replace("{}", n) for n in numbers for member in self.members)

    def shape_of_members(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that members have together, all of one number, in a parameter of `shape`.

        Raises RecipeError for a shape that has too few dimensions, or another number of them
        stacked.

        >>> Fusion(("e.{}.down",), stacked=3, transposed=True).shape_of_members((3, 4, 8))
        (8, 4)
        """
        own = list(shape[1:] if self.stacked else shape)
        if self.stacked and (not shape or shape[0] != self.stacked):
            raise RecipeError(f"shape {list(shape)}, in which {self.stacked} are stacked")
        if self.transposed and len(own) < 2:
            raise RecipeError(f"shape {list(shape)}, in which members are transposed")
        if self.dimension >= len(own):
            raise RecipeError(f"shape {list(shape)}, and is fused along dimension {self.dimension}")
        if self.transposed:
            own[-2:] = own[:-3:-1]
        return tuple(own)

    def shape_with(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the parameter in which members of one number have `shape` together.

        >>> Fusion(("e.{}.down",), stacked=3, transposed=True).shape_with((8, 4))
        (3, 4, 8)
        """
        own = list(shape)
        if self.transposed:
            own[-2:] = own[:-3:-1]
        return (self.stacked, *own) if isinstance(self.stacked, int) and self.stacked else (*own,)

    def shares_of_group(self, length: int) -> tuple[int, ...]:
        """How much of each member a group of a fused dimension of `length` has.

        Raises RecipeError for a length that groups and shares do not divide, and for numbers that
        only a config knows.

        >>> Fusion(("q", "k", "v"), shares=(4, 2, 2), groups=2).shares_of_group(32)
        (8, 4, 4)
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
        return tuple(length // groups * share // total for share in shares)

    def member_slices(self, length: int) -> tuple[MemberSlice, ...]:
        """The slices of a fused dimension of `length` that are members', in order.

        Raises RecipeError as `shares_of_group`.
        """
        found = []
        # Groups follow one another; in each, every member has its next piece.
        sizes = self.shares_of_group(length)
        start = 0
        for group in range(self.groups if isinstance(self.groups, int) else 0):
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
