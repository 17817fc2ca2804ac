"""Which tensors each class of a model type has, in the modules and in the checkpoints it saves.

Every class of transformers that takes the configuration (`XModel`, `XForSequenceClassification`...)
is built on the meta device, without memory; the names and shapes of its state dict are written to
`tests/golden/engines/names`, and those that `save_pretrained` would write where they differ. The
records are replayed by `tests/recipes/test_model_classes.py`, which needs no transformers.

    PYTHONPATH=src:tests .engines/transformers/bin/python -m engines.names.harvest bert t5
    ...all model types of the shipped recipes without arguments; `--check` writes nothing, and says
    which names no rule of a recipe matches
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engines.names.configurations import FEWER, variants
from engines.names.replay import RECORDS, describe_unmatched
from reshard.recipes.library import load_recipe, shipped_recipes

Record = dict[str, Any]


def harvest(model_type: str) -> list[Record]:
    """A record for each variant: its config.json, its classes, and the shapes of all tensors."""
    return [_harvest_variant(model_type, changes) for changes in variants(model_type)]


def _harvest_variant(model_type: str, changes: Mapping[str, Any]) -> Record:
    config = _configure(model_type, changes)
    tensors: dict[str, set[tuple[int, ...]]] = {}
    classes: dict[str, int | str] = {}
    for model_class in _find_classes(type(config)):
        try:
            with torch.device("meta"):
                model = model_class(config)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            # Some classes are for other values of the configuration.
            classes[model_class.__name__] = f"not built: {error}"
            continue
        held = model.state_dict()
        classes[model_class.__name__] = len(held)
        for found in (held, revert_weight_conversion(model, dict(held))):
            for name, tensor in found.items():
                tensors.setdefault(name, set()).add(tuple(tensor.shape))
    return {
        "transformers": transformers.__version__,
        "config": json.loads(config.to_json_string()),
        "classes": classes,
        "tensors": _write_tensors(tensors),
    }


def _write_tensors(tensors: Mapping[str, set[tuple[int, ...]]]) -> dict[str, list[str]]:
    """The shapes of tensors by name; of names that differ by numbers only, the first and last."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, shapes in tensors.items():
        texts = tuple(sorted("x".join(map(str, shape)) for shape in shapes))
        alike.setdefault((re.sub(r"\d+", "#", name), texts), []).append(name)
    kept = {name: [*texts] for (_, texts), names in alike.items() for name in (names[0], names[-1])}
    return {name: kept[name] for name in sorted(kept)}


def _configure(model_type: str, changes: Mapping[str, Any]) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    config = config_class()
    nested = [part for key in config_class.sub_configs if (part := getattr(config, key, None))]
    for part in (config, *nested):
        for key, fewer in FEWER.items():
            value = part.to_dict().get(key)
            if isinstance(value, int) and value > fewer:
                setattr(part, key, fewer)
        _shorten_layer_lists(part)
    for path, value in changes.items():
        *parents, key = path.split(".")
        part = config
        for parent in parents:
            part = getattr(part, parent)
        setattr(part, key, value)
    return config


def _shorten_layer_lists(config: Any) -> None:
    """Lists with an entry for each layer get as many entries as there are layers."""
    for key, value in config.to_dict().items():
        if key.endswith(("layer_types", "_layout")) and isinstance(value, list):
            count = getattr(config, "num_hidden_layers", len(value))
            setattr(config, key, value[:count])


def _find_classes(config_class: type) -> Iterator[type]:
    """The public model classes of the configuration's own file."""
    place = config_class.__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(place)
    public = getattr(module, "__all__", ())
    for _, found in inspect.getmembers(module, inspect.isclass):
        if (
            issubclass(found, transformers.PreTrainedModel)
            and found.__module__ == place
            and found.config_class is config_class
            # What a user can make and save: no stacks inside, no base classes.
            and found.__name__ in public
            and not found.__name__.lower().endswith("pretrainedmodel")
        ):
            yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    shipped = {kind for name in shipped_recipes() for kind in load_recipe(name).model_types}
    wrong = 0
    for model_type in given.model_types or sorted(shipped & {*CONFIG_MAPPING}):
        records = harvest(model_type)
        problems = [text for record in records for text in describe_unmatched(record)]
        lines = (f"{model_type}: {len(problems)} names that no rule matches", *problems)
        sys.stdout.write("\n    ".join(lines) + "\n")
        wrong += bool(problems)
        # A record that a recipe does not match would fail in every run of the tests.
        if not given.check and not problems:
            _write(RECORDS / f"{model_type}.json", records)
    return min(wrong, 1)


def _write(path: Path, records: list[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
