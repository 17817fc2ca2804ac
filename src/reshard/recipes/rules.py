"""Which tensors does a line of a recipe speak of, and how does it cut them?

A rule is a pattern over whole tensor names and the native text of a sharding. The first rule
whose pattern matches a tensor decides it::

    *.attention.self.query.weight=tp@heads{num_attention_heads}, -
    *.output.dense.weight=-, tp
    *=...                              every other tensor, of any rank, is not cut
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from reshard.errors import RecipeError
from reshard.recipes.variables import variables


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tensors whose names match a pattern are cut.

    Args:
        pattern: a glob on the whole name, case included: `*` stands for any characters (dots
            too, so it crosses levels of a name), `?` for one, `[0-3]` for one of a set.
        spec: the native text of a sharding (see `reshard.sharding_text`). `...` stands for the
            missing `-`, and keys of the model's config.json in braces for their numbers.

    Raises:
        RecipeError: an empty pattern or spec, or braces that cannot be read.

    >>> rule = Rule("*.mlp.up_proj.weight", "tp, -")
    >>> rule.matches("model.layers.0.mlp.up_proj.weight")
    True
    >>> print(rule)
    *.mlp.up_proj.weight=tp, -
    """

    pattern: str
    spec: str

    def __post_init__(self) -> None:
        for part, text, remedy in (
            ("pattern", self.pattern, "write a glob on tensor names, `*` for all"),
            ("spec", self.spec, "write one item a dimension, `...` for a tensor that is not cut"),
        ):
            if not text.strip():
                raise RecipeError(f"the rule {str(self)!r} has an empty {part}; {remedy}")
        variables(self.spec)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """The rule that `pattern=spec` writes; the last `=` divides it.

        Raises:
            RecipeError: text without `=`, or with nothing on one side of it.

        >>> Rule.parse("*.weight = tp, -")
        Rule(pattern='*.weight', spec='tp, -')
        """
        pattern, equals, spec = text.rpartition("=")
        if not equals:
            raise RecipeError(
                f"cannot read the rule {text!r}; write pattern=spec, such as '*.weight=tp, -'"
            )
        return cls(pattern.strip(), spec.strip())

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the whole of a tensor's name."""
        return fnmatchcase(name, self.pattern)

    def __str__(self) -> str:
        return f"{self.pattern}={self.spec}"
