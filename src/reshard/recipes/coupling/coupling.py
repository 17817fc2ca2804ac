"""Couplings: cuts of several tensors that one operator needs together.

Attention multiplies each query head with one key/value head, and the output layer has columns for
each query head. So query, key, value and output are cut by the same heads, whatever the tensors'
lengths are. A coupling names what is counted, the unit first::

    [coupled.heads]
    query = "num_attention_heads"                           8: each on exactly one rank
    key_value = "num_key_value_heads|num_attention_heads"   2: each with the queries that use it

    over 4 ranks     query        0 1 | 2 3 | 4 5 | 6 7
                     key_value    0   | 0   | 1   | 1

1. A rule says `tp@{heads.query}` for a dimension that is made of so many equal heads; that is the
   cut rule `heads8` (`reshard.cut_rules.Heads`).
2. A member that counts fewer than the unit is shared: unit `u` of `U` uses `u * count // U`.
3. A member that counts more is part of the unit: unit `u` has its `count / U` of them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import RecipeError
from reshard.recipes.config.expressions import NO_NUMBERS, Config, Numbers, parse_expression


@dataclass(frozen=True, slots=True)
class Coupling:
    """What an operator needs cut together.

    Args:
        members: what is counted, and the expression of config.json that says how many there are
            (see `reshard.recipes.config.expressions`); the first is the unit.

    Raises:
        RecipeError: no members, a name that is no identifier or there twice, a count that is no
            expression.

    >>> heads = Coupling((("query", "heads"), ("key_value", "groups|heads")))
    >>> heads.unit, heads.words("heads")
    ('query', {'heads.query': 'heads{heads}', 'heads.key_value': 'heads{groups|heads}'})
    """

    members: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise RecipeError(
                "a coupling without members; name what is counted, the unit first, such as "
                'query = "num_attention_heads"'
            )
        names = [name for name, _ in self.members]
        for name, count in self.members:
            if not name.isidentifier() or names.count(name) > 1:
                raise RecipeError(
                    f"the member {name!r} of a coupling; give each a name of letters, digits and _"
                )
            parse_expression(count)

    @property
    def unit(self) -> str:
        """The member that the others follow: each is on exactly one rank."""
        return self.members[0][0]

    def words(self, name: str) -> dict[str, str]:
        """The cut rules that rules name as `name.member`, with expressions in braces."""
        return {f"{name}.{member}": f"heads{{{count}}}" for member, count in self.members}

    def counts(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> Mapping[str, int]:
        """How many there are of each member, for a config and the numbers of a name.

        Raises:
            RecipeError: a count that the config has not, of 0, or one that neither divides the
                unit's nor is a multiple of it.

        >>> Coupling((("query", "q"), ("key_value", "k"))).counts({"q": 8, "k": 3})
        Traceback (most recent call last):
            ...
        reshard.errors.RecipeError: 3 of key_value (`k`) for 8 of query (`q`): one must be a
        multiple of the other; correct config.json
        """
        found = {}
        for member, text in self.members:
            count = found[member] = parse_expression(text).value(config, numbers)
            units = found[self.unit]
            if not count or (units % count and count % units):
                raise RecipeError(
                    f"{count} of {member} (`{text}`) for {units} of {self.unit} "
                    f"(`{self.members[0][1]}`): one must be a multiple of the other; correct "
                    "config.json"
                )
        return found
