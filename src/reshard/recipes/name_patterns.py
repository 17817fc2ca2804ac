"""Names of other programs: what a name is in a recipe's names, by a table of patterns, and back.

A table maps names of one convention to those of a recipe: `*` in a pattern stands for any text,
which then stands for the same `*` in the entry. An entry is a name, or a `Fusion` of names, in
which `{}` is the number of a stack's member::

    "decoder.layers.*.mlp.linear_fc2.weight"  is  "model.layers.*.mlp.down_proj.weight"
    "decoder.layers.*.mlp.linear_fc1.weight"  is fused of gate_proj and up_proj of "model.layers.*"
    "layers.*.experts.down_proj"              is stacked of "layers.*.experts.{}.down_proj.weight"

Read backwards, the first entry that gives a name is what it is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import UsageError
from reshard.recipes.fusion import Fusion

Meaning = str | Fusion


class ForeignName(NamedTuple):
    """A name elsewhere: of the tensor itself, or of the fused parameter of these members."""

    name: str
    fusion: Fusion | None = None


def find_by_pattern(name: str, table: Mapping[str, str] | Mapping[str, Meaning]) -> Meaning:
    """The entry of the first pattern that a name fits, filled in; the name where none fits.

    >>> find_by_pattern("layers.3.up", {"layers.*": "decoder.*"})
    'decoder.3.up'
    """
    for pattern, entry in table.items():
        if "*" not in pattern:
            continue
        found = compile_pattern(pattern).fullmatch(name)
        if found and isinstance(entry, str):
            return _fill_in(entry, found.groups())
        if found and isinstance(entry, Fusion):
            return _fill_in_fusion(entry, found.groups())
    return name


def find_foreign_name(name: str, table: Mapping[str, Meaning]) -> ForeignName | None:
    """The name that a table's convention has for one of a recipe; None where it has none.

    >>> table = {"*.fc1": Fusion(("*.gate", "*.up")), "*.fc2": "*.down"}
    >>> find_foreign_name("layers.3.down", table).name
    'layers.3.fc2'
    >>> find_foreign_name("layers.3.up", table).fusion.members
    ('layers.3.gate', 'layers.3.up')
    """
    for theirs, own in table.items():
        for member in own.members if isinstance(own, Fusion) else (own,):
            found = compile_pattern(member).fullmatch(name)
            if found is None:
                continue
            fusion = _fill_in_fusion(own, found.groups()) if isinstance(own, Fusion) else None
            return ForeignName(_fill_in(theirs, found.groups()), fusion)
    return None


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern, with a group for what each `*` stands for.

    `{}` is the number of a stack's member, which no group has.
    """
    parts = [r"\d+".join(map(re.escape, part.split("{}"))) for part in pattern.split("*")]
    return re.compile("(.*?)".join(parts))


def _fill_in_fusion(fusion: Fusion, found: tuple[str, ...]) -> Fusion:
    return replace(fusion, members=tuple(_fill_in(member, found) for member in fusion.members))


def _fill_in(entry: str, found: tuple[str, ...]) -> str:
    first, *others = entry.split("*")
    if len(others) > len(found):
        raise UsageError(f"{entry!r} has more `*` than the pattern it stands for, {len(found)}")
    return first + "".join(f"{text}{rest}" for text, rest in zip(found, others, strict=False))
