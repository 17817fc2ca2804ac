"""Recipe files: the TOML form of a recipe.

::

    name = "my-moe"
    description = "What it is for"      # optional
    model_types = ["my_moe"]            # optional: `model_type` of the models it is for
    extends = "llama"                   # optional: a shipped recipe, or the path of a file
    axes = ["tp", "fsdp", "etp", "pp"]  # the axes its rules may name
    storage = ["fsdp", "dp"]            # optional: those that only divide storage
    replicas = ["dp", "cp"]             # optional: those whose ranks may hold copies of all

    [cuts]                              # optional: cut rules that users may replace
    vocabulary = "ceil"

    [stand_ins]                         # optional: in place of an axis that the mesh lacks
    etp = "tp"

    [numbers.layer]                     # optional: what {layer} in a pattern counts
    axis = "pp"                         # the axis that deals the layers out,
    count = "num_hidden_layers"         # how many there are, by config.json,
    cut = "balanced"                    # optional: by which rule ("ceil"), or "bytes"
    beyond_last = true                  # optional: later ones live with the last (false)
    behind = ["mtp.*"]                  # optional: names whose tensors all live with the last

    [coupled.heads]                     # optional: what an operator needs cut together,
    query = "num_attention_heads"       # the unit first: how many there are, by config.json,
    key_value = "num_key_value_heads"   # for rules with tp@{heads.query} (see
                                        # `reshard.recipes.coupling`)

    [sizes]                             # optional: expressions that several rules use
    inner = "num_heads * head_dim"

    [[rules]]                           # the first that matches a tensor decides it
    pattern = "*embed_tokens.weight"
    spec = "tp@{vocabulary}, -"
    at = { layer = ["first", "last"] }  # optional: where it lives, with no number in its name
    when = "tie_word_embeddings"        # optional: a condition on config.json
    note = "tied with the output layer" # optional: what users should know

    [names.megatron]                    # optional: what names elsewhere are here
    "output_layer.weight" = "lm_head.weight"
    "decoder.layers.*.mlp.linear_fc1.weight" = { members = [
        "model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"] }

A recipe that extends another has its own rules first and then the other's, and so its names; its
cuts, stand-ins, numbers, sizes and members of couplings come over those of the same name, and its
axes, storage axes and replica axes, if it has any, replace the other's.

A table of fused members may have `shares`, `groups`, `dimension`, `stacked`, `transposed`
and `when` (`reshard.recipes.naming`). Counts, shares, groups and stacked are expressions of
config.json (`reshard.recipes.expressions`), all but counts also numbers; conditions are of
`reshard.recipes.expressions`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from reshard.errors import RecipeError
from reshard.recipes.coupling import Coupling
from reshard.recipes.layer_placement import Numbering
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import REPLICA_AXES, STORAGE_AXES, Recipe
from reshard.recipes.rules import Rule

_REQUIRED_KEYS = ("name", "axes", "rules")
_OPTIONAL_KEYS = (
    *("description", "model_types", "extends", "storage", "replicas", "cuts", "stand_ins"),
    *("numbers", "coupled", "sizes", "names"),
)
_RULE_KEYS = (("pattern", "spec"), ("at", "when", "note"))
_NUMBER_KEYS = (("axis", "count"), ("cut", "beyond_last", "behind"))
_FUSION_KEYS = (("members",), ("shares", "groups", "dimension", "stacked", "transposed", "when"))


class _ReadableFile(Protocol):
    def read_bytes(self) -> bytes: ...


def read_recipe(file: _ReadableFile, where: str, load: Callable[[str], Recipe]) -> Recipe:
    """The recipe in `file`.

    Args:
        file: to read.
        where: what to call it in errors.
        load: finds the recipe that this one extends.

    Raises:
        RecipeError: a file that cannot be read, is not TOML, has keys that are unknown, missing
            or of the wrong type, or describes a recipe that cannot be.
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
    return _TableReader(where).recipe(table, load)


class _TableReader:
    """Turns tables into values; `where` names the file in errors."""

    def __init__(self, where: str) -> None:
        self._where = where

    def recipe(self, table: dict[str, Any], load: Callable[[str], Recipe]) -> Recipe:
        extends = "extends" in table
        # What it extends has axes and rules already.
        required = ("name",) if extends else _REQUIRED_KEYS
        optional = (*_OPTIONAL_KEYS, "axes", "rules") if extends else _OPTIONAL_KEYS
        self._check_keys(table, required, optional)
        base = load(self._expect_text(table["extends"], "extends")) if extends else None
        rules = self._read_rules(table.get("rules", []))
        try:
            return Recipe(
                self._expect_text(table["name"], "name"),
                self._expect_text(table.get("description", ""), "description"),
                self._expect_texts(table.get("model_types", []), "model_types"),
                self._expect_texts(table["axes"], "axes")
                if "axes" in table or not base
                else base.axes,
                rules + (base.rules if base else ()),
                dict(base.cuts if base else {}) | self._expect_text_table(table, "cuts"),
                dict(base.numbers if base else {}) | self._read_numbers(table),
                dict(base.stand_ins if base else {}) | self._expect_text_table(table, "stand_ins"),
                names=self._read_names(table, base.names if base else {}),
                coupled=self._read_couplings(table, base.coupled if base else {}),
                sizes=dict(base.sizes if base else {}) | self._expect_text_table(table, "sizes"),
                storage=self._expect_texts(table["storage"], "storage")
                if "storage" in table
                else (base.storage if base else STORAGE_AXES),
                replicas=self._expect_texts(table["replicas"], "replicas")
                if "replicas" in table
                else (base.replicas if base else REPLICA_AXES),
            )
        except RecipeError as error:
            if self._where in str(error):
                raise
            raise RecipeError(f"recipe file {self._where}: {error}") from error

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
        """Couplings; own members over those of the recipe that is extended."""
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
        """The names of every convention; own ones before those of the recipe that is extended."""
        found = dict(base)
        for convention, given in self._expect_table(table.get("names", {}), "names").items():
            key = f"names.{convention}"
            own = {
                theirs: self._read_fusion(value, f"{key}.{theirs}")
                if isinstance(value, dict)
                else self._expect_text(value, f"{key}.{theirs}")
                for theirs, value in self._expect_table(given, key).items()
            }
            # Own names first, for patterns are tried in order.
            found[convention] = own | {
                n: v for n, v in found.get(convention, {}).items() if n not in own
            }
        return found

    def _read_fusion(self, table: dict[str, Any], key: str) -> Fusion:
        self._check_keys(table, *_FUSION_KEYS, f"{key}.")
        shares, groups = table.get("shares", []), table.get("groups", 1)
        dimension, stacked = table.get("dimension", 0), table.get("stacked", 0)
        transposed = table.get("transposed", False)
        if not isinstance(shares, list):
            raise self._make_error(
                f"{key}.shares", shares, "a list of numbers or expressions of config.json"
            )
        for what, value, kinds in (
            *(("shares", share, int | str) for share in shares),
            ("groups", groups, int | str),
            ("stacked", stacked, int | str),
            ("dimension", dimension, int),
        ):
            # `true` is an int of Python.
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise self._make_error(f"{key}.{what}", value, "a number, or text in quotes")
        if not isinstance(transposed, bool):
            raise self._make_error(f"{key}.transposed", transposed, "true or false")
        try:
            members = self._expect_texts(table["members"], key)
            when = self._expect_text(table.get("when", ""), f"{key}.when")
            return Fusion(members, tuple(shares), groups, dimension, stacked, transposed, when)
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
