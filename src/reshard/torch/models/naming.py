"""Names of tensors in two models, and how they correspond.

Two models are matched by common names:

1. each side's own names become common names, by a table or a function; every rank applies its own,
   so ranks that count their layers from 0 may each define their offset;
2. a fused parameter keeps its name, and its members have their names (`reshard.recipes.naming`);
3. tied names denote the same tensor: any of them that the source has fills all
   (`reshard.megatron.names`);
4. a stacked tensor, such as the weights of all experts, has a name for each of its members::

       "layers.3.experts.up"  -->  "layers.3.experts.0.up", "layers.3.experts.1.up", ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from reshard.errors import UsageError
from reshard.recipes.naming import Fusion, Meaning, compile_pattern, find_by_pattern

Naming = Mapping[str, str] | Mapping[str, Meaning] | Callable[[str], Meaning]
Value = TypeVar("Value")


def renamed(name: str, naming: Naming | None) -> str:
    """Return the common name of `name`, see `resolve_name`. A fused parameter keeps its name.

    >>> table = {"lm_head.weight": "output.weight", "model.layers.*": "decoder.layers.*"}
    >>> [renamed(name, table) for name in ("lm_head.weight", "model.layers.3.norm", "bias")]
    ['output.weight', 'decoder.layers.3.norm', 'bias']
    """
    resolved = resolve_name(name, naming)
    return name if isinstance(resolved, Fusion) else resolved


def resolve_name(name: str, naming: Naming | None) -> Meaning:
    """Return the common name of `name`, or the fusion of names that it stands for.

    Args:
        name: a side's own name.
        naming: a function, or a table whose keys are names or patterns. The match of a `*` replaces
            the same `*` in the entry. The first matching key counts; other names stay unchanged.

    Raises UsageError for invalid results of a table or a function, and other kinds of naming.

    >>> resolve_name("layers.3.fc1", {"*.fc1": Fusion(("*.gate", "*.up"))}).members
    ('layers.3.gate', 'layers.3.up')
    """
    if naming is None:
        return name
    resolved: object = name
    if isinstance(naming, Mapping):
        resolved = naming[name] if name in naming else find_by_pattern(name, naming)
    elif callable(naming):
        resolved = naming(name)
    else:
        raise UsageError(f"names by {naming!r}; give a table or a function")
    if not isinstance(resolved, str | Fusion):
        raise UsageError(f"the name {name!r} became {resolved!r}; names are matched to names")
    return resolved


def member_pattern(name: str, stacks: Mapping[str, str] | None) -> str | None:
    """Return the pattern of a stacked tensor's members, with `{}` for their numbers, or None.

    Args:
        name: the common name of a tensor.
        stacks: patterns of stacked tensors, with those of their members.

    Raises UsageError for members without a placeholder for their numbers.

    >>> member_pattern("layers.3.experts.up", {"*.experts.up": "*.experts.{}.up"})
    'layers.3.experts.{}.up'
    """
    if not stacks:
        return None
    pattern = stacks[name] if name in stacks else find_by_pattern(name, stacks)
    if pattern == name:
        return None
    if not isinstance(pattern, str):
        raise UsageError(f"members {pattern!r} of the stacked tensor {name!r}; give their pattern")
    if pattern.count("{}") != 1:
        raise UsageError(
            f"members {pattern!r} of the stacked tensor {name!r}; write {{}} where their number is"
        )
    return pattern


def find_entry(name: str, table: Mapping[str, Value]) -> Value | None:
    """Return a name's entry, or that of the first matching pattern, or None.

    >>> find_entry("layers.3.up", {"bias": 1, "*.up": 2})
    2
    """
    if name in table:
        return table[name]
    patterns = (pattern for pattern in table if "*" in pattern)
    return next(
        (table[pattern] for pattern in patterns if compile_pattern(pattern).fullmatch(name)), None
    )
