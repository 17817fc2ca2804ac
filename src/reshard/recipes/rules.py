"""Rules: a pattern of tensor names, and the sharding of the tensors that match it.

A rule is a pattern over whole tensor names and the native text of a sharding. A tensor takes the
first rule whose pattern matches::

    *.attention.self.query.weight=tp@heads{num_attention_heads}, -
    *.output.dense.weight=-, tp
    *=...                              every other tensor, of any rank, is replicated

A pattern may name a number of a tensor's name: `*layers.{layer}.mlp.up_proj.weight`. The recipe
defines what the number counts, which determines the ranks that hold the tensor (see
`reshard.recipes.layer_placement`).
"""

from __future__ import annotations

import fnmatch
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from reshard._records import Record
from reshard.errors import RecipeError, UsageError
from reshard.recipes.expressions import (
    NO_NUMBERS,
    Condition,
    Config,
    Numbers,
    find_expressions,
    parse_condition,
)

ENDS = ("first", "last")
_NUMBER = re.compile(r"\{([^{}]*)\}")
_SET = re.compile(r"\[!?\]?[^\]]*\]")


class Rule(Record):
    """The sharding of the tensors whose names match a pattern.

    Args:
        pattern: a glob on the whole name, case included: `*` matches any characters (dots
            too, so it crosses levels of a name), `?` a single character, `[0-3]` one of a set, and
            `{layer}` a number.
        spec: the native text of a sharding (see `reshard.sharding`). `...` is replaced by the
            missing `-`, and expressions of the model's config.json in braces by their values
            (see `reshard.recipes.expressions`).
        at: for a tensor without a number in its name, the ends of the numbering that have it:
            `(("layer", ("first", "last")),)`.
        when: a condition on the model's config.json; the rule applies only if it holds (see
            `reshard.recipes.expressions`).
        note: shown to the user if this rule determines a tensor.

    Raises:
        RecipeError: an empty pattern or spec, unreadable braces, a repeated number.

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
            (
                "spec",
                self.spec,
                "write an item per dimension, `...` for a tensor that is not sharded",
            ),
        ):
            if not text.strip():
                raise RecipeError(f"the rule {str(self)!r} has an empty {part}; {remedy}")
        # The entry of a list is chosen by a number of the name, which the pattern must capture.
        asked = {name for variable in find_expressions(self.spec) for name in variable.index_names}
        if self.when is not None:
            asked |= parse_condition(self.when).index_names
        names = self.numbers
        for name in sorted(asked - set(names)):
            raise RecipeError(
                f"the rule {str(self)!r} uses the entry [{name}] of a list in config.json, and its "
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
                    "`last` or both, for a number that is missing in its pattern"
                )

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse `pattern=spec`.

        The dividing `=` is the last outside of parentheses: `only(pp=0)` contains another.

        Raises:
            RecipeError: text without `=`, or with an empty side.

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
        """Return whether the pattern matches a tensor's whole name."""
        return _compile_pattern(self.pattern).match(name) is not None

    def numbers_in(self, name: str) -> dict[str, int] | None:
        """Return the numbers of a tensor's name, or None if the pattern does not match it."""
        match = _compile_pattern(self.pattern).match(name)
        return None if match is None else {key: int(n) for key, n in match.groupdict().items()}

    def with_numbers(self, name: str, numbers: Mapping[str, int]) -> str:
        """Replace numbers in the name of a tensor that the pattern matches.

        >>> rule = Rule("*layers.{layer}.up", "tp")
        >>> rule.with_numbers("model.layers.12.up", {"layer": 0})
        'model.layers.0.up'
        """
        match = _compile_pattern(self.pattern).match(name)
        if match is None:
            return name
        spans = {match.span(counter): number for counter, number in numbers.items()}
        # From the end, so that earlier spans stay valid.
        for (begin, end), number in sorted(spans.items(), reverse=True):
            name = f"{name[:begin]}{number}{name[end:]}"
        return name

    @property
    def condition(self) -> Condition | None:
        """Return the parsed `when`, or None if absent."""
        return None if self.when is None else parse_condition(self.when)

    def applies(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> bool:
        """Return whether `when` holds for a model and the numbers of a name."""
        condition = self.condition
        return condition is None or condition.holds(config, numbers)

    def counts(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> bool:
        """Return `applies`, under its former name."""
        warnings.warn("Rule.counts is now applies", DeprecationWarning, stacklevel=2)
        return self.applies(config, numbers)

    def __str__(self) -> str:
        return f"{self.pattern}={self.spec}"


def parse_rules(rules: Iterable[str | Rule]) -> tuple[Rule, ...]:
    """Return rules, some or all of them given as texts.

    Raises:
        UsageError: an object that is not a list of rules.
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


class RuleList:
    """Rules in order, matched against many names.

    Layers and experts repeat: the rules that match a name, and the places of its numbers, are
    shared by all names that differ only in components that are numbers::

        layers.12.mlp.experts.3.up   ->   layers.0.mlp.experts.0.up, with 12 and 3

    If a pattern distinguishes such numbers (`layers.0.*`, `layers.[0-3].*`), each name is matched
    separately.
    """

    def __init__(self, rules: Iterable[Rule], config: Config | None = None) -> None:
        self.rules, self.config = tuple(rules), config
        self._are_alike = not any(_distinguishes_numbers(rule.pattern) for rule in self.rules)
        # By a name with 0 for its numbers, and the first rule to match: the matching rules, each
        # with its numbers as (index of the name's component, or -1 for a fixed number; the number).
        self._known: dict[tuple[str, int], list[tuple[int, dict[str, tuple[int, int]]]]] = {}

    def find(self, name: str, first: int = 0) -> tuple[int, dict[str, int]] | None:
        """Return the first rule from number `first` on that matches a name and applies.

        Returns:
            Its number, and the numbers of the name; None if no rule matches.

        >>> rules = RuleList([Rule("*.{layer}.up", "tp"), Rule("*", "...")])
        >>> rules.find("layers.12.up"), rules.find("layers.12.up", first=1)
        ((0, {'layer': 12}), (1, {}))
        """
        for number, numbers in self._list_matching(name, first):
            if self.rules[number].applies(self.config, numbers):
                return number, numbers
        return None

    def _list_matching(self, name: str, first: int) -> Iterator[tuple[int, dict[str, int]]]:
        if not self._are_alike:
            for number in range(first, len(self.rules)):
                numbers = self.rules[number].numbers_in(name)
                if numbers is not None:
                    yield number, numbers
            return
        # Components that are numbers; one call, since there may be very many names.
        alike = re.sub(r"(?<![^.])[0-9]+(?![^.])", "0", name)
        matching = self._known.get((alike, first))
        if matching is None:
            matching = self._known[alike, first] = list(self._match_alike(alike, first))
        for number, places in matching:
            parts = name.split(".") if places else ()
            pairs = places.items()
            yield (
                number,
                {what: int(parts[at]) if at >= 0 else fixed for what, (at, fixed) in pairs},
            )

    def _match_alike(
        self, alike: str, first: int
    ) -> Iterator[tuple[int, dict[str, tuple[int, int]]]]:
        parts = alike.split(".")
        begins = [0, *itertools.accumulate(len(part) + 1 for part in parts)]
        components = {
            (begin, begin + len(part)): index
            # The begins include the end of the last part.
            for index, (begin, part) in enumerate(zip(begins, parts, strict=False))
            if _is_number(part)
        }
        for number in range(first, len(self.rules)):
            match = _compile_pattern(self.rules[number].pattern).match(alike)
            if match is not None:
                texts = match.groupdict().items()
                yield (
                    number,
                    {what: (components.get(match.span(what), -1), int(n)) for what, n in texts},
                )


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal()


def _distinguishes_numbers(pattern: str) -> bool:
    """Return whether a pattern may match some numbers as a component, and not others.

    A digit after a letter is never in such a component.

    >>> texts = ("*.w1.{layer}.norm[12]", "*.0.w", "*.[0-3].w", "a.?")
    >>> [_distinguishes_numbers(text) for text in texts]
    [False, True, True, True]
    """

    def replace_set(match: re.Match[str]) -> str:
        has_digit = any(fnmatch.fnmatchcase(digit, match[0]) for digit in "0123456789")
        has_dot = fnmatch.fnmatchcase(".", match[0])
        return "?" if has_digit and has_dot else "1" if has_digit else "." if has_dot else "_"

    text = _SET.sub(replace_set, _NUMBER.sub("*", pattern))
    return re.search(r"\?|(?<![A-Za-z_0-9])[0-9]", text) is not None


def _find_divider(text: str) -> int | None:
    """Return the position of the last `=` outside of parentheses and braces."""
    # From the end, since a pattern cannot contain `=` but a spec can, inside parentheses or braces.
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth = max(0, depth + (text[at] in ")}") - (text[at] in "({"))
        if text[at] == "=" and not depth:
            return at
    return None


@lru_cache(maxsize=4096)
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern: globs, with a group for each number."""
    parts = _NUMBER.split(pattern)
    pieces = [
        _translate_glob(part) if i % 2 == 0 else _translate_number(part)
        for i, part in enumerate(parts)
    ]
    return re.compile(rf"(?s:{''.join(pieces)})\Z")


def _translate_number(name: str) -> str:
    # Next to a `*`, a number includes all of its digits.
    return rf"(?<!\d)(?P<{name}>\d+)(?!\d)"


def _translate_glob(pattern: str) -> str:
    # Strip the wrapping of fnmatch: `(?s:` and `)` with an anchor.
    translated = fnmatch.translate(pattern)
    return translated[translated.index(":") + 1 : translated.rindex(")")]
