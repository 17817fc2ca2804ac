"""Probes: what transformers' classes have for many configs of one model type.

A probe is a config.json and, for each public class of the model type, the names and shapes of its
tensors, as the class saves them and as its module has them. Configs start from the small ones of
`engines.judge.families` and from the class's defaults; each key is changed alone, and then several
at random.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engines.judge.family import load_families
from engines.names.configurations import FEWER, variants

Shapes = dict[str, tuple[int, ...]]
Config = dict[str, Any]
# Keys that change neither names nor shapes.
_IDLE = (
    *("transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "rope_theta"),
    *("initializer_range", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "rope_scaling"),
    *("rope_parameters", "attention_dropout", "hidden_act", "_name_or_path", "output_attentions"),
    *("output_hidden_states", "return_dict", "problem_type", "chunk_size_feed_forward"),
)
_IDLE_WORDS = re.compile(
    "token_id|dropout|prob$|_eps|epsilon|token_index|initializer|_coef|theta|scal(e|ing)|"
    "torch|output_|gradient|use_cache|_std|clip|seed|_loss|rope_|time_step_(min|max|floor)|softcap"
)
_MAY_BE_NONE = re.compile("first_|freq|shared|sparse|period|offset|step|nextn|per_layer")


@dataclass
class Probe:
    """A config, its flat keys with the class's defaults, and the tensors of each class's forms."""

    config: Config
    keys: dict[str, Any]
    forms: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass
class Classes:
    """The public classes of a model type."""

    model_type: str
    config_class: Any
    models: dict[str, Any]
    base_prefix: str
    defaults: dict[str, Any]
    ignored: dict[str, list[str]]


def find_classes(model_type: str) -> Classes:
    config_class = CONFIG_MAPPING[model_type]
    place = config_class.__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(place)
    models = {}
    for name in getattr(module, "__all__", ()):
        found = getattr(module, name)
        if (
            inspect.isclass(found)
            and issubclass(found, transformers.PreTrainedModel)
            and found.config_class is config_class
            and not name.endswith("PreTrainedModel")
        ):
            models[name] = found
    prefix = next((one.base_model_prefix for one in models.values()), "")
    ignored = {
        name: sorted(one._keys_to_ignore_on_load_unexpected or ()) for name, one in models.items()
    }
    return Classes(model_type, config_class, models, prefix, raw_defaults(config_class), ignored)


def raw_defaults(config_class: Any, *, is_outer: bool = True) -> dict[str, Any]:
    """The values of keys that a config.json leaves out, flat, before any is made of others."""
    found: dict[str, Any] = {"num_labels": 2} if is_outer else {}
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        value = parameter.default
        is_plain = isinstance(value, None | bool | int | str | list | tuple)
        if is_plain and not name.startswith("_"):
            found[name] = list(value) if isinstance(value, tuple) else value
    for key, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        if inspect.isclass(inner) and inner.__name__ != "AutoConfig":
            found |= {
                f"{key}.{name}": value
                for name, value in raw_defaults(inner, is_outer=False).items()
            }
    return found


def flatten(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and (key.endswith("_config")):
            found |= flatten(value, f"{before}{key}.")
        elif value is None or isinstance(value, bool | int | str | list | tuple):
            found[before + key] = list(value) if isinstance(value, tuple) else value
    return found


def probe(classes: Classes, config: Config, names: list[str] | None = None) -> Probe | None:
    """The tensors of the classes for a config; None where none can be built."""
    try:
        made = classes.config_class.from_dict(copy.deepcopy(config))
    except Exception:
        return None
    found = Probe(config, {**classes.defaults, **flatten(config)})
    for name in names or classes.models:
        try:
            with torch.device("meta"):
                model = classes.models[name]._from_config(made, dtype=torch.float32)
            held = model.state_dict()
            tied = dict(model.all_tied_weights_keys or {})
            saved = revert_weight_conversion(model, dict(held))
        except Exception:
            continue
        forms = []
        for form in (saved, held):
            shapes = {key: tuple(one.shape) for key, one in form.items() if key not in tied}
            forms.append(shapes)
        if forms[0] == forms[1]:
            forms.pop()
        found.forms[name] = (*forms, tied)
    return found if found.forms else None


def base_configs(classes: Classes) -> list[Config]:
    """Small configs to start from."""
    found = [
        dict(one)
        for family in load_families().values()
        for one in family.configs()
        if one["model_type"] == classes.model_type
    ]
    for changes in variants(classes.model_type):
        made = classes.config_class()
        for part in (made, *(getattr(made, key, None) for key in classes.config_class.sub_configs)):
            if part is None:
                continue
            for key, fewer in FEWER.items():
                value = part.to_dict().get(key)
                if isinstance(value, int) and value > fewer:
                    setattr(part, key, fewer)
            for key, value in part.to_dict().items():
                if key.endswith(("layer_types", "_layout")) and isinstance(value, list):
                    setattr(part, key, value[: getattr(part, "num_hidden_layers", len(value))])
        content = {k: v for k, v in made.to_dict().items() if k not in ("id2label", "label2id")}
        found.append(_set(content, changes))
    return found


def _set(config: Config, changes: Mapping[str, Any]) -> Config:
    found = copy.deepcopy(config)
    for path, value in changes.items():
        *parents, key = path.split(".")
        part = found
        for parent in parents:
            part = part.setdefault(parent, {})
        if value is _LEFT_OUT:
            part.pop(key, None)
        else:
            part[key] = value
    return found


_LEFT_OUT = object()


def list_changes(keys: Mapping[str, Any], config: Config) -> dict[str, list[Any]]:
    """Other values of each key that may change names or shapes."""
    found: dict[str, list[Any]] = {}
    there = flatten(config)
    for key, value in keys.items():
        leaf = key.rsplit(".", 1)[-1]
        if leaf in _IDLE or _IDLE_WORDS.search(leaf) or leaf.endswith("_config"):
            continue
        new: list[Any] = []
        if isinstance(value, bool):
            new = [not value]
        elif isinstance(value, int):
            new = [value * 2, value * 3, value + 1]
            new += [0] if _MAY_BE_NONE.search(leaf) else []
            new += [value // 2] if value > 1 else []
        elif value is None:
            is_switch = leaf.startswith(("use_", "is_", "has_")) or leaf.endswith("bias")
            new = [True] if is_switch else [2, 16]
        elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            new = [value[::-1], [value[-1]] * len(value), [value[0]] * len(value)]
        elif isinstance(value, list) and all(isinstance(one, int) for one in value):
            new = [[0], [1], [], value[::-1]]
        if key in there:
            new.append(_LEFT_OUT)
        if new:
            found[key] = new
    # Many classes read it where a config has it.
    found.setdefault("head_dim", [8])
    return found


def collect(classes: Classes, wanted: int = 48) -> list[Probe]:
    """Probes of configs with one change, and with a few random ones.

    The first class is in all of them, the others in some.
    """
    generator = random.Random(classes.model_type)
    bases = [found for one in base_configs(classes)[:3] if (found := probe(classes, one))]
    probes = list(bases)
    usable: list[list[tuple[str, Any]]] = []
    for base in bases:
        own = []
        for key, values in list_changes(base.keys, base.config).items():
            for value in generator.sample(values, min(len(values), 2)):
                names = [*base.forms][:1]
                found = probe(classes, _set(base.config, {key: value}), names)
                if found is None:
                    continue
                if found.forms[names[0]] != base.forms[names[0]]:
                    probes.append(found)
                    own.append((key, value))
                elif key in flatten(base.config) and value is _LEFT_OUT:
                    own.append((key, value))
        usable.append(own)
    for attempt in range(wanted * 2 if any(usable) else 0):
        if len(probes) >= len(bases) + sum(map(len, usable)) + wanted:
            break
        at = attempt % len(bases)
        if not usable[at]:
            continue
        count = min(len(usable[at]), generator.randint(2, 6))
        change = dict(generator.sample(usable[at], count))
        # Keys that configs often leave out, and whose value then follows from others.
        for key in flatten(bases[at].config):
            is_optional = classes.defaults.get(key, 0) is None
            if (is_optional or key.endswith(("head_dim", "value_heads"))) and (
                generator.random() < 0.4
            ):
                change[key] = _LEFT_OUT
        names = None if attempt < 16 else [*bases[at].forms][:1]
        found = probe(classes, _set(bases[at].config, change), names)
        if found is not None:
            probes.append(found)
    return probes
