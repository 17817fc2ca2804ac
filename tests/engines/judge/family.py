"""Families: what the judge must know of a kind of model, and cannot read from its recipe.

A family is one entry of a file in `families/`, which ends with a list `FAMILIES` of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DENSE = (
    "tp=1",
    "tp=2",
    "tp=3",
    "tp=4",
    "tp=5",
    "pp=2",
    "fsdp=3",
    "tp=2,fsdp=2",
    "tp=2,pp=2,fsdp=2",
    "dp=2,tp=3,fsdp=2",
)
EXPERTS = (
    *DENSE,
    "ep=2",
    "ep=3",
    "ep=2,tp=2",
    "ep=3,tp=2,fsdp=2",
    "ep=2,tp=2,pp=2,fsdp=2",
    "tp=3 | ep=tp etp=",
)


def make_tokens(config: Any, generator: Any) -> dict[str, Any]:
    """Two sentences of seven tokens."""
    import torch

    config = config.get_text_config()
    return {"input_ids": torch.randint(0, config.vocab_size, (2, 7), generator=generator)}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, as the judge needs it.

    Args:
        name: of the record.
        config: of a tiny model, as in config.json, with `model_type`.
        variants: other values of its keys (dotted where nested); each is judged like the first.
        local: the keys of the config that a rank has a share of (dotted where nested), and the
            parameter (a glob; its first match counts) and dimension that say how large: where a
            rank has a third of the parameter's rows, its config has a third of the number. Or a
            function of the rank's parameters by name and the whole config, for the value itself.
        auto: the class that makes the model from a config: an Auto class of transformers, or
            the model's own.
        parallelisms: meshes as in `--to`, with the recipe's options behind a `|`.
        inputs: of a forward pass, from the whole model's config and a generator of numbers.
        outputs: what is compared, from the result of a forward pass.
        gathered: globs of the layers whose rows are cut and whose output the next layer wants
            whole, besides the output layer.
        summed: globs of modules, no linear layers, whose outputs are parts of a sum, and the
            axes over which it runs.
        sized_by_shard: globs of parameters that no key of the config makes smaller; they take the
            shard's length in the dimensions that are cut.
        whole: globs of modules that have the whole model's number of a local key, by that key:
            routers, which choose among all experts.
        wide_norms: globs of norms over the whole of a cut width.
        stacks: globs of modules that begin at the first stage again: a decoder behind an encoder.
        read: globs of modules that never run: the module around them reads their parameters.
        own: globs of modules whose cut output the rank uses itself, as it is.
        prepare: what else must be done to a rank's module; see `modules.RankModule`.
        dense: what must be done to the whole model before all.
        differs: for a parameter (glob) whose cut differs from transformers' own plan, why.
    """

    name: str
    config: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...] = ()
    local: Mapping[str, tuple[str, int] | Callable[..., Any]] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    parallelisms: tuple[str, ...] = DENSE
    inputs: Callable[[Any, Any], dict[str, Any]] = make_tokens
    outputs: Callable[[Any], Any] = lambda found: found.logits
    gathered: tuple[str, ...] = ()
    summed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sized_by_shard: tuple[str, ...] = ()
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wide_norms: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    prepare: Callable[[Any], None] = lambda rank: None
    dense: Callable[[Any], None] = lambda model: None
    differs: Mapping[str, str] = field(default_factory=dict)

    def configs(self) -> list[dict[str, Any]]:
        """The config of each case: the first, then the variants."""
        return [with_keys(self.config, change) for change in ({}, *self.variants)]


def with_keys(config: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values, of dotted keys where it is nested."""
    found = dict(config)
    for key, value in change.items():
        outer, dot, inner = key.partition(".")
        found[outer] = with_keys(found[outer], {inner: value}) if dot else value
    return found


def load_families() -> dict[str, Family]:
    """All families by name."""
    from . import families

    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        listed = importlib.import_module(f"{families.__name__}.{module.name}").FAMILIES
        for family in listed:
            assert family.name not in found, family.name
            found[family.name] = family
    return found
