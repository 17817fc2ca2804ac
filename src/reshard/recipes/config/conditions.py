"""Conditions: when a rule counts, by a model's config.json.

::

    tie_word_embeddings                     true, a number but 0, a text or list that is not empty
    !attention_bias                         false, 0, empty, null or absent
    text_config.is_tied|is_tied             of the first key that is there
    model_type=gemma3_text                  a text, a number, `true` or `false`
    layer_types[layer]!=linear_attention    the entry of a list for this layer
    num_experts & !is_dense                 all of several

A key that is absent equals no value, so `key!=value` holds for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import RecipeError
from reshard.recipes.config.expressions import NO_NUMBERS, Config, Key, Numbers

_TERM = re.compile(r"(!?)([^=!]+?)\s*(?:(!?=)\s*([^=]+))?")


@dataclass(frozen=True, slots=True)
class _Term:
    """One condition: a key, and the value that it is compared with, if any."""

    keys: tuple[Key, ...]
    is_negated: bool
    value: str | None

    def holds(self, config: Config | None, numbers: Numbers) -> bool:
        values = (key.find(config, numbers) for key in self.keys)
        found = next((value for value in values if value is not None), None)
        is_so = bool(found) if self.value is None else _text_of(found) == self.value
        return is_so is not self.is_negated


def _text_of(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that was read; `parse_condition` makes it."""

    text: str
    terms: tuple[_Term, ...]

    @property
    def index_names(self) -> frozenset[str]:
        """The numbers of names by which lists are asked."""
        keys = [key for term in self.terms for key in term.keys]
        return frozenset(key.index for key in keys if key.index and isinstance(key.index, str))

    def holds(self, config: Config | None, numbers: Numbers = NO_NUMBERS) -> bool:
        """Whether it holds for a config and the numbers of a name.

        >>> full = parse_condition("layer_types[layer]=full & !is_dense")
        >>> [full.holds({"layer_types": ["full", "linear"]}, {"layer": i}) for i in (0, 1)]
        [True, False]
        """
        return all(term.holds(config, numbers) for term in self.terms)


@lru_cache(maxsize=1024)
def parse_condition(text: str) -> Condition:
    """The condition that a text writes.

    Raises:
        RecipeError: text that cannot be read.
    """
    terms = []
    for word in text.split("&"):
        match = _TERM.fullmatch(word.strip())
        keys = [Key.parse(one) for one in match[2].split("|")] if match else [None]
        known = tuple(key for key in keys if key is not None)
        if match is None or len(known) < len(keys) or (match[1] and match[3]):
            raise RecipeError(
                f"cannot read the condition {text!r}; write `key` of the model's config.json, "
                "`!key`, `key=value` or `key!=value`, several joined by ` & `"
            )
        value = match[4].strip() if match[4] else None
        terms.append(_Term(known, bool(match[1]) or match[3] == "!=", value))
    return Condition(text, tuple(terms))
