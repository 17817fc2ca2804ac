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
from typing import Any, TypeVar

from reshard.errors import RecipeError
from reshard.recipes.coupling import Coupling
from reshard.recipes.layer_placement import Numbering
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule

Value = TypeVar("Value")

# The keys of each table with the types of their values: required and optional keys.
_TEXT, _TEXTS, _TABLE, _ANY = "text in quotes", 'a list of texts such as ["tp"]', "a table", ""
_FLAG, _RULES = "true or false", "tables, each beginning with [[rules]]"
_RECIPE_KEYS = (
    {"name": _TEXT, "axes": _TEXTS, "rules": _RULES},
    {
        "description": _TEXT,
        "model_types": _TEXTS,
        "extends": _TEXT,
        "storage": _TEXTS,
        "replicas": _TEXTS,
        "cuts": _TABLE,
        "stand_ins": _TABLE,
        "numbers": _TABLE,
        "coupled": _TABLE,
        "sizes": _TABLE,
        "names": _TABLE,
    },
)
_RULE_KEYS = ({"pattern": _TEXT, "spec": _TEXT}, {"at": _TABLE, "when": _TEXT, "note": _TEXT})
_NUMBER_KEYS = (
    {"axis": _TEXT, "count": _TEXT},
    {"cut": _TEXT, "beyond_last": _FLAG, "behind": _TEXTS},
)
# `Fusion` checks the values of the other keys.
_FUSION_KEYS = (
    {"members": _TEXTS},
    {
        **dict.fromkeys(("shares", "groups", "dimension", "stacked", "transposed"), _ANY),
        "when": _TEXT,
    },
)


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
        required, optional = _RECIPE_KEYS
        if "extends" in table:
            # The extended recipe has axes and rules already.
            required, optional = {"name": _TEXT}, {**optional, **required}
        own = self._read(table, required, optional)
        base = load(own.pop("extends")) if "extends" in own else None
        fields: dict[str, Any] = {"description": "", "model_types": ()}
        if base is not None:
            fields |= {name: getattr(base, name) for name in ("axes", "storage", "replicas")}
        # Own values replace those of the extended recipe, or come before them.
        for name in ("cuts", "stand_ins", "sizes"):
            texts = self._read_texts(own.pop(name, {}), f"{name}.")
            fields[name] = {**getattr(base, name, {}), **texts}
        fields["rules"] = self._read_rules(own.pop("rules", [])) + getattr(base, "rules", ())
        numbers = self._read_numbers(own.pop("numbers", {}))
        fields["numbers"] = {**getattr(base, "numbers", {}), **numbers}
        fields["coupled"] = self._read_couplings(
            own.pop("coupled", {}), getattr(base, "coupled", {})
        )
        fields["names"] = self._read_names(own.pop("names", {}), getattr(base, "names", {}))
        try:
            return Recipe(**fields | own)
        except RecipeError as error:
            # The error of an extended recipe's rule names the file already.
            if self._where in str(error):
                raise
            raise RecipeError(f"recipe file {self._where}: {error}") from error

    def _read_rules(self, tables: list[Any]) -> tuple[Rule, ...]:
        rules = []
        for number, table in enumerate(tables, start=1):
            key = f"rules[{number}]"
            if not isinstance(table, dict):
                raise self._make_error(key, table, "a table with `pattern` and `spec`")
            fields = self._read(table, *_RULE_KEYS, f"{key}.")
            ends = fields.get("at", {}).items()
            fields["at"] = tuple(
                (name, self._expect(value, _TEXTS, f"{key}.at.{name}")) for name, value in ends
            )
            rules.append(self._make(Rule, fields, key))
        return tuple(rules)

    def _read_numbers(self, tables: dict[str, Any]) -> dict[str, Numbering]:
        numbers = {}
        for name, table in tables.items():
            key = f"numbers.{name}"
            fields = self._read(self._expect(table, _TABLE, key), *_NUMBER_KEYS, f"{key}.")
            numbers[name] = self._make(Numbering, fields, key)
        return numbers

    def _read_couplings(
        self, tables: dict[str, Any], base: Mapping[str, Coupling]
    ) -> dict[str, Coupling]:
        """Read couplings; their members override those of the extended recipe."""
        couplings = dict(base)
        for name, table in tables.items():
            key = f"coupled.{name}"
            own = self._read_texts(self._expect(table, _TABLE, key), f"{key}.")
            members = (dict(base[name].members) if name in base else {}) | own
            if not name.isidentifier():
                raise self._make_error(key, members, "a name of letters, digits and _")
            fields = {"members": tuple(members.items())}
            couplings[name] = self._make(Coupling, fields, key)
        return couplings

    def _read_names(
        self, tables: dict[str, Any], base: Mapping[str, Mapping[str, str | Fusion]]
    ) -> dict[str, Mapping[str, str | Fusion]]:
        """Read the names of all conventions, before those of the extended recipe."""
        result = dict(base)
        for convention, table in tables.items():
            key = f"names.{convention}"
            own: dict[str, str | Fusion] = {}
            for theirs, value in self._expect(table, _TABLE, key).items():
                inside = f"{key}.{theirs}"
                if isinstance(value, dict):
                    fields = self._read(value, *_FUSION_KEYS, f"{inside}.")
                    own[theirs] = self._make(Fusion, fields, inside)
                else:
                    own[theirs] = self._expect(value, _TEXT, inside)
            # Patterns are tried in order, so own names come first.
            result[convention] = own | {
                n: v for n, v in result.get(convention, {}).items() if n not in own
            }
        return result

    def _make(self, kind: Callable[..., Value], fields: dict[str, Any], key: str) -> Value:
        try:
            return kind(**fields)
        except RecipeError as error:
            raise RecipeError(f"recipe file {self._where}, {key}: {error}") from error

    def _read(
        self,
        table: dict[str, Any],
        required: Mapping[str, str],
        optional: Mapping[str, str],
        prefix: str = "",
    ) -> dict[str, Any]:
        """Return the values of a table by key, each of the expected type."""
        types = {**required, **optional}
        for key in table:
            if key not in types:
                raise RecipeError(
                    f"recipe file {self._where}: unknown key `{prefix}{key}`; the keys are "
                    f"{', '.join(types)}"
                )
        for key in required:
            if key not in table:
                raise RecipeError(
                    f"recipe file {self._where}: the key `{prefix}{key}` is missing; add it"
                )
        return {
            key: self._expect(value, types[key], f"{prefix}{key}") for key, value in table.items()
        }

    def _read_texts(self, table: dict[str, Any], prefix: str) -> dict[str, str]:
        return {name: self._expect(value, _TEXT, prefix + name) for name, value in table.items()}

    def _expect(self, value: Any, expected: str, key: str) -> Any:
        """Return a value of the expected type, lists of texts as tuples."""
        types = {_TEXT: str, _TEXTS: list, _TABLE: dict, _FLAG: bool, _RULES: list}
        is_fitting = isinstance(value, types.get(expected, object))
        if expected == _TEXTS and is_fitting:
            is_fitting = all(isinstance(item, str) for item in value)
            value = tuple(value) if is_fitting else value
        if not is_fitting:
            raise self._make_error(key, value, expected)
        return value

    def _make_error(self, key: str, value: object, expected: str) -> RecipeError:
        return RecipeError(
            f"recipe file {self._where}: `{key}` is {value!r}, {expected} was expected"
        )
