"""Rules: a pattern of tensor names, and the sharding of the tensors that match it.

A rule is a pattern over whole tensor names and the native text of a sharding. The first rule
whose pattern matches a tensor decides it::

    *.attention.self.query.weight=tp@heads{num_attention_heads}, -
    *.output.dense.weight=-, tp
    *=...                              every other tensor, of any rank, is not cut

A number in a name can be given a name in the pattern, `*layers.{layer}.mlp.up_proj.weight`. The
recipe says what it numbers, and that chooses where on the mesh the tensor lives (see
`reshard.recipes.shardings.numbering`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import RecipeError, UsageError
from reshard.recipes.config.conditions import Condition, parse_condition
from reshard.recipes.config.expressions import NO_NUMBERS, Config, Numbers
from reshard.recipes.config.variables import variables

ENDS = ("first", "last")
_NUMBER = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """The sharding of the tensors whose names match a pattern.

    Args:
        pattern: a glob on the whole name, case included: `*` stands for any characters (dots
            too, so it crosses levels of a name), `?` for one, `[0-3]` for one of a set, and
            `{layer}` for a number.
        spec: the native text of a sharding (see `reshard.sharding_text`). `...` stands for the
            missing `-`, and expressions of the model's config.json in braces for their numbers
            (see `reshard.recipes.config.expressions`).
        at: with which of what a recipe numbers the tensor lives, where its name has no number:
            `(("layer", ("first", "last")),)`.
        when: a condition on the model's config.json under which alone the rule counts (see
            `reshard.recipes.config.conditions`).
        note: what a user should know where this rule decides a tensor.

    Raises:
        RecipeError: an empty pattern or spec, braces that cannot be read, a number twice.

    >>> rule = Rule("model.layers.{layer}.mlp.up_proj.weight", "tp, -")
    >>> rule.numbers_in("model.layers.12.mlp.up_proj.weight")
    {'layer': 12}
    >>> print(rule)
    model.layers.{layer}.mlp.up_proj.weight=tp, -
    """

    pattern: str
    spec: str
    at: tuple[tuple[str, tuple[str, ...]], ...] = ()
    when: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for part, text, remedy in (
            ("pattern", self.pattern, "write a glob on tensor names, `*` for all"),
            ("spec", self.spec, "write one item a dimension, `...` for a tensor that is not cut"),
        ):
            if not text.strip():
                raise RecipeError(f"the rule {str(self)!r} has an empty {part}; {remedy}")
        asked = {name for variable in variables(self.spec) for name in variable.index_names}
        if self.when is not None:
            asked |= parse_condition(self.when).index_names
        names = self.numbers
        for name in sorted(asked - set(names)):
            raise RecipeError(
                f"the rule {str(self)!r} asks for the entry of [{name}] in config.json, and its "
                f"pattern has no such number; write {{{name}}} into the pattern"
            )
        for name in names:
            if not name.isidentifier() or names.count(name) > 1:
                raise RecipeError(
                    f"cannot read {{{name}}} in the pattern {self.pattern!r}; write a name for a "
                    "number in braces, such as {layer}, each once"
                )
        for number, ends in self.at:
            if number in names or not ends or not set(ends) <= set(ENDS):
                raise RecipeError(
                    f"the rule {str(self)!r} is at {number} {', '.join(ends)}; write `first`, "
                    "`last` or both, for a number that its pattern has not"
                )

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The rule that `pattern=spec` writes.

        The `=` that divides it is the last outside of parentheses: `only(pp=0)` has its own.

        Raises:
            RecipeError: text without `=`, or with nothing on one side of it.

        >>> Rule.parse("*.weight = tp, - | only(pp=0)").spec
        'tp, - | only(pp=0)'
        """
        at = _find_divider(text)
        if at is None:
            raise RecipeError(
                f"cannot read the rule {text!r}; write pattern=spec, such as '*.weight=tp, -'"
            )
        return cls(text[:at].strip(), text[at + 1 :].strip())

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers in its pattern."""
        return tuple(_NUMBER.findall(self.pattern))

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the whole of a tensor's name."""
        return _compile_pattern(self.pattern).match(name) is not None

    def numbers_in(self, name: str) -> dict[str, int] | None:
        """The numbers of a tensor's name; None where the pattern does not match it."""
        match = _compile_pattern(self.pattern).match(name)
        return None if match is None else {key: int(n) for key, n in match.groupdict().items()}

    def with_numbers(self, name: str, numbers: Mapping[str, int]) -> str:
        """The name of a tensor that the pattern matches, with other numbers in it.

        >>> rule = Rule("*layers.{layer}.up", "tp")
        >>> rule.with_numbers("model.layers.12.up", {"layer": 0})
        'model.layers.0.up'
        """
        match = _compile_pattern(self.pattern).match(name)
        if match is None:
            return name
        spans = {match.span(what): number for what, number in numbers.items()}
        # From the back, so that earlier spans stay where they are.
        for (begin, end), number in sorted(spans.items(), reverse=True):
            name = f"{name[:begin]}{number}{name[end:]}"
        return name

    @property
    def condition(self) -> Condition | None:
        """What `when` says."""
        return None if self.when is None else parse_condition(self.when)

    def counts(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> bool:
        """Whether the rule counts for a model and the numbers of a name, by its `when`."""
        condition = self.condition
        return condition is None or condition.holds(config, numbers)

    def __str__(self) -> str:
        return f"{self.pattern}={self.spec}"


def parse_rules(rules: Iterable[str | Rule]) -> tuple[Rule, ...]:
    """Rules, some or all of them as texts.

    Raises:
        UsageError: what is no list of rules.
        RecipeError: a text that cannot be read.

    >>> [rule.spec for rule in parse_rules(["*.weight=tp, -", Rule("*", "...")])]
    ['tp, -', '...']
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise UsageError(f"rules {rules!r}; give a list of them, such as ['*.weight=tp, -']")
    parsed = []
    for rule in rules:
        if not isinstance(rule, str | Rule):
            raise UsageError(f"the rule {rule!r}; expected a text pattern=spec, or a Rule")
        parsed.append(rule if isinstance(rule, Rule) else Rule.parse(rule))
    return tuple(parsed)


def _find_divider(text: str) -> int | None:
    """The place of the last `=` outside of parentheses and braces."""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth = max(0, depth + (text[at] in ")}") - (text[at] in "({"))
        if text[at] == "=" and not depth:
            return at
    return None


@lru_cache(maxsize=4096)
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern: globs, with a group for each number."""
    parts = _NUMBER.split(pattern)
    pieces = [
        _translate_glob(part) if i % 2 == 0 else _translate_number(part)
        for i, part in enumerate(parts)
    ]
    return re.compile(rf"(?s:{''.join(pieces)})\Z")


def _translate_number(name: str) -> str:
    # Beside a `*`, a number is all of its digits.
    return rf"(?<!\d)(?P<{name}>\d+)(?!\d)"


def _translate_glob(pattern: str) -> str:
    # What fnmatch wraps around its pattern, `(?s:` and `)` with an anchor, is taken off.
    translated = fnmatch.translate(pattern)
    return translated[translated.index(":") + 1 : translated.rindex(")")]
