"""Recipe files: the TOML form of a recipe.

::

    name = "my-moe"
    description = "What it is for"      # optional
    model_types = ["my_moe"]            # optional: `model_type` in config.json
    extends = "llama"                   # optional: a shipped recipe, or the path of a file
    axes = ["tp", "fsdp", "etp", "pp"]  # the axes its rules may name
    storage = ["fsdp", "dp"]            # optional: axes that only divide storage
    replicas = ["dp", "cp"]             # optional: axes along which everything may be replicated

    [cuts]                              # optional: cut rules that users may replace
    vocabulary = "ceil"

    [stand_ins]                         # optional: in place of an axis that the mesh lacks
    etp = "tp"

    [numbers.layer]                     # optional: the meaning of {layer} in patterns
    axis = "pp"                         # the axis over which layers are divided,
    count = "num_hidden_layers"         # their number in config.json,
    cut = "balanced"                    # optional: by which rule ("ceil"), or "bytes"
    beyond_last = true                  # optional: later ones live with the last (false)
    behind = ["mtp.*"]                  # optional: names whose tensors all live with the last

    [coupled.heads]                     # optional: what an operator needs sharded together,
    query = "num_attention_heads"       # the unit first: its count in config.json,
    key_value = "num_key_value_heads"   # for rules with tp@{heads.query} (see
                                        # `reshard.recipes.coupling`)

    [sizes]                             # optional: expressions that several rules use
    inner = "num_heads * head_dim"

    [[rules]]                           # a tensor takes the first that matches
    pattern = "*embed_tokens.weight"
    spec = "tp@{vocabulary}, -"
    at = { layer = ["first", "last"] }  # optional: where it lives if its name has no number
    when = "tie_word_embeddings"        # optional: a condition on config.json
    note = "tied with the output layer" # optional: shown to users

    [names.megatron]                    # optional: names in other programs, and their names here
    "output_layer.weight" = "lm_head.weight"
    "decoder.layers.*.mlp.linear_fc1.weight" = { members = [
        "model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"] }

A recipe that extends another has its own rules and names first, then those of the other. Its
cuts, stand-ins, numbers, sizes and members of couplings override those of the same name, and its
axes, storage axes and replica axes, if any, replace those of the other.

A table of fused members may have `shares`, `groups`, `dimension`, `stacked`, `transposed`
and `when` (`reshard.recipes.naming`). Counts, shares, groups and stacked are expressions of
config.json (`reshard.recipes.expressions`), and all but counts may be numbers; conditions are in
`reshard.recipes.expressions`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from reshard.errors import RecipeError
from reshard.recipes.coupling import Coupling
from reshard.recipes.layer_placement import Numbering
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule

_REQUIRED_KEYS = ("name", "axes", "rules")
_OPTIONAL_KEYS = (
    *("description", "model_types", "extends", "storage", "replicas", "cuts", "stand_ins"),
    *("numbers", "coupled", "sizes", "names"),
)
_RULE_KEYS = (("pattern", "spec"), ("at", "when", "note"))
_NUMBER_KEYS = (("axis", "count"), ("cut", "beyond_last", "behind"))
_FUSION_KEYS = (("members",), ("shares", "groups", "dimension", "stacked", "transposed", "when"))


def read_recipe(file: Path | Traversable, where: str, load: Callable[[str], Recipe]) -> Recipe:
    """Read the recipe in `file`.

    Args:
        file: the TOML file.
        where: its name in errors.
        load: returns the recipe that this recipe extends.

    Raises:
        RecipeError: a file that cannot be read, is not TOML, has keys that are unknown, missing or
            of the wrong type, or describes an invalid recipe.
    """
    try:
        table = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise RecipeError(
            f"cannot read the recipe file {where}: {error.strerror}; give a shipped name, see "
            "`reshard recipe show`, or the path of a TOML file"
        ) from error
    except ValueError as error:
        raise RecipeError(f"recipe file {where} is not TOML: {error}; correct it there") from error
    return _TableReader(where).read_recipe(table, load)


class _TableReader:
    """A reader of TOML tables; `where` is the name of the file in errors."""

    def __init__(self, where: str) -> None:
        self._where = where

    def read_recipe(self, table: dict[str, Any], load: Callable[[str], Recipe]) -> Recipe:
        extends = "extends" in table
        # The extended recipe has axes and rules already.
        required = ("name",) if extends else _REQUIRED_KEYS
        optional = (*_OPTIONAL_KEYS, "axes", "rules") if extends else _OPTIONAL_KEYS
        self._check_keys(table, required, optional)
        base = load(self._expect_text(table["extends"], "extends")) if extends else None
        try:
            return Recipe(**self._read_fields(table, base))
        except RecipeError as error:
            if self._where in str(error):
                raise
            raise RecipeError(f"recipe file {self._where}: {error}") from error

    def _read_fields(self, table: dict[str, Any], base: Recipe | None) -> dict[str, Any]:
        """Return the arguments of a recipe: its own values over those of the extended recipe."""
        fields: dict[str, Any] = {
            name: self._expect_text(table.get(name, ""), name) for name in ("name", "description")
        }
        fields["model_types"] = self._expect_texts(table.get("model_types", []), "model_types")
        for name in ("axes", "storage", "replicas"):
            if name in table:
                fields[name] = self._expect_texts(table[name], name)
            elif base:
                fields[name] = getattr(base, name)
        for name in ("cuts", "stand_ins", "sizes"):
            fields[name] = {**getattr(base, name, {}), **self._expect_text_table(table, name)}
        fields["rules"] = self._read_rules(table.get("rules", [])) + (base.rules if base else ())
        fields["numbers"] = {**(base.numbers if base else {}), **self._read_numbers(table)}
        fields["coupled"] = self._read_couplings(table, base.coupled if base else {})
        fields["names"] = self._read_names(table, base.names if base else {})
        return fields

    def _read_rules(self, value: object) -> tuple[Rule, ...]:
        if not isinstance(value, list):
            raise self._make_error("rules", value, "tables, each beginning with [[rules]]")
        rules = []
        for number, table in enumerate(value, start=1):
            key = f"rules[{number}]"
            if not isinstance(table, dict):
                raise self._make_error(key, table, "a table with `pattern` and `spec`")
            self._check_keys(table, *_RULE_KEYS, f"{key}.")
            texts = {
                word: self._expect_text(table[word], f"{key}.{word}")
                for word in ("pattern", "spec", "when", "note")
                if word in table
            }
            places = self._expect_table(table.get("at", {}), f"{key}.at")
            at = [
                (name, self._expect_texts(ends, f"{key}.at.{name}"))
                for name, ends in places.items()
            ]
            try:
                rules.append(Rule(at=tuple(at), **texts))
            except RecipeError as error:
                raise RecipeError(f"recipe file {self._where}, {key}: {error}") from error
        return tuple(rules)

    def _read_numbers(self, table: dict[str, Any]) -> dict[str, Numbering]:
        numbers = {}
        for name, fields in self._expect_table(table.get("numbers", {}), "numbers").items():
            key = f"numbers.{name}"
            fields = self._expect_table(fields, key)
            self._check_keys(fields, *_NUMBER_KEYS, f"{key}.")
            beyond = fields.get("beyond_last", False)
            if not isinstance(beyond, bool):
                raise self._make_error(f"{key}.beyond_last", beyond, "true or false")
            numbers[name] = Numbering(
                self._expect_text(fields["axis"], f"{key}.axis"),
                self._expect_text(fields["count"], f"{key}.count"),
                self._expect_text(fields.get("cut", "ceil"), f"{key}.cut"),
                beyond,
                self._expect_texts(fields.get("behind", []), f"{key}.behind"),
            )
        return numbers

    def _read_couplings(
        self, table: dict[str, Any], base: Mapping[str, Coupling]
    ) -> dict[str, Coupling]:
        """Read couplings; their members override those of the extended recipe."""
        couplings = dict(base)
        tables = self._expect_table(table.get("coupled", {}), "coupled")
        for name in tables:
            key = f"coupled.{name}"
            own = self._expect_text_table(tables, name, "coupled.")
            members = (dict(base[name].members) if name in base else {}) | own
            if not name.isidentifier():
                raise self._make_error(key, members, "a name of letters, digits and _")
            try:
                couplings[name] = Coupling(tuple(members.items()))
            except RecipeError as error:
                raise RecipeError(f"recipe file {self._where}, {key}: {error}") from error
        return couplings

    def _read_names(
        self, table: dict[str, Any], base: Mapping[str, Mapping[str, str | Fusion]]
    ) -> dict[str, Mapping[str, str | Fusion]]:
        """Read the names of all conventions, before those of the extended recipe."""
        found = dict(base)
        for convention, given in self._expect_table(table.get("names", {}), "names").items():
            key = f"names.{convention}"
            own = {
                theirs: self._read_fusion(value, f"{key}.{theirs}")
                if isinstance(value, dict)
                else self._expect_text(value, f"{key}.{theirs}")
                for theirs, value in self._expect_table(given, key).items()
            }
            # Patterns are tried in order, so own names come first.
            found[convention] = own | {
                n: v for n, v in found.get(convention, {}).items() if n not in own
            }
        return found

    def _read_fusion(self, table: dict[str, Any], key: str) -> Fusion:
        self._check_keys(table, *_FUSION_KEYS, f"{key}.")
        members = self._expect_texts(table["members"], key)
        when = self._expect_text(table.get("when", ""), f"{key}.when")
        try:
            return Fusion(**{**table, "members": members, "when": when})
        except RecipeError as error:
            raise RecipeError(f"recipe file {self._where}, {key}: {error}") from error

    def _check_keys(
        self,
        table: dict[str, Any],
        required: tuple[str, ...],
        optional: tuple[str, ...],
        prefix: str = "",
    ) -> None:
        known = required + optional
        for key in table:
            if key not in known:
                raise RecipeError(
                    f"recipe file {self._where}: unknown key `{prefix}{key}`; the keys are "
                    f"{', '.join(known)}"
                )
        for key in required:
            if key not in table:
                raise RecipeError(
                    f"recipe file {self._where}: the key `{prefix}{key}` is missing; add it"
                )

    def _expect_text(self, value: object, key: str) -> str:
        if not isinstance(value, str):
            raise self._make_error(key, value, "text in quotes")
        return value

    def _expect_texts(self, value: object, key: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._make_error(key, value, 'a list of texts such as ["tp"]')
        return tuple(value)

    def _expect_table(self, value: object, key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._make_error(key, value, "a table")
        return value

    def _expect_text_table(
        self, table: dict[str, Any], key: str, prefix: str = ""
    ) -> dict[str, str]:
        where = prefix + key
        items = self._expect_table(table.get(key, {}), where).items()
        return {name: self._expect_text(value, f"{where}.{name}") for name, value in items}

    def _make_error(self, key: str, value: object, expected: str) -> RecipeError:
        return RecipeError(
            f"recipe file {self._where}: `{key}` is {value!r}, {expected} was expected"
        )
