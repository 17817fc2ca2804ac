"""Tensors that a model class of transformers loads, according to its own loading code.

The class is built on the meta device, without memory. Its own conversions map names in files to its
parameters, so experts may be stacked in memory and separate in files; its lists of ignored tensors
and its tied weights apply as in `from_pretrained`. Names include their numbers here: transformers
stacks experts in the order of their names and does not notice a missing number. Code next to a
checkpoint (`auto_map`) never runs.

Source: transformers 5.24, `PreTrainedModel.from_pretrained` and `core_model_loading`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from reshard.checkpoint.architectures.records import Shape, TensorDifferences
from reshard.torch.transformers import explain_errors, import_module_code, silence

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")


def find_class_differences(
    config: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> TensorDifferences | None:
    """Compare tensors with those that transformers' class of a config.json loads.

    Args:
        config: the content of config.json.
        shapes: of the tensors, by their names in the files.

    Returns:
        The differences, or None if transformers has no such class.

    Raises:
        MissingExtraError: transformers 5 is not installed.
        RunError: the class cannot be built from the config; the message has transformers' reason.
    """
    engine = import_module_code()
    known = engine.models.auto.configuration_auto.CONFIG_MAPPING
    if config.get("model_type") not in known:
        return None
    content = {key: value for key, value in config.items() if key != "quantization_config"}
    with silence(engine):
        with explain_errors("read the config"):
            made = known[content["model_type"]].from_dict(content)
        model_class = _find_class(engine, made, content)
        if model_class is None:
            return None
        with explain_errors(f"build {model_class.__name__} from the config"):
            own = _ClassTensors(engine, model_class, made)
        found = min((own.compare(form, shapes) for form in own.forms), key=_count)
        elsewhere = _find_elsewhere(engine, model_class, made, found.unknown)
    return dataclasses.replace(
        found,
        unknown=tuple(name for name in found.unknown if name not in elsewhere),
        ignored=(*found.ignored, *sorted(elsewhere)),
    )


def _count(found: TensorDifferences) -> int:
    return len(found.missing) + len(found.unknown) + len(found.misshapen)


class _Key(NamedTuple):
    """The result of applying the loading code to a tensor's name.

    Attributes:
        parameter: into which the tensor is loaded, the first if there are several.
        pattern: of the conversion that applies; None if the tensor is loaded unchanged.
        numbers: in the name, if a conversion applies: the index of the tensor in a stack.
    """

    parameter: str
    pattern: str | None
    numbers: tuple[str, ...]


class _ClassTensors:
    """The tensors of a class and a config, by the possible names in files.

    `forms` are the names that the class saves, and the names in its module.
    """

    def __init__(self, engine: Any, model_class: Any, config: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        with torch.device("meta"):
            self._model = model_class._from_config(config, dtype=torch.float32)
        loading = engine.core_model_loading
        given = get_model_conversion_mapping(self._model) or []
        self._rename = loading.rename_source_key
        self._renamings = [one for one in given if isinstance(one, loading.WeightRenaming)]
        self._converters = [one for one in given if isinstance(one, loading.WeightConverter)]
        self._held = self._model.state_dict()
        self._judge = f"{model_class.__name__} of transformers {engine.__version__}"
        saved = loading.revert_weight_conversion(self._model, dict(self._held))
        self.forms = [
            {self.key(name): (name, tuple(one.shape)) for name, one in form.items()}
            for form in (saved, self._held)
        ]

    def key(self, name: str) -> _Key:
        """Return the parameter that a tensor of a file is loaded into."""
        held, prefix = self._held, self._model.base_model_prefix
        parameter, pattern = self._rename(name, self._renamings, self._converters, prefix, held)
        if parameter not in held and name in held:
            parameter, pattern = self._rename(name, [], [], prefix, held)
        numbers = _NUMBER.findall(name) if pattern is not None else ()
        return _Key(parameter, pattern, tuple(numbers))

    def compare(
        self, form: Mapping[_Key, tuple[str, Shape]], shapes: Mapping[str, Shape]
    ) -> TensorDifferences:
        """Compare tensors with the tensors of a form."""
        given = {self.key(name): name for name in shapes}
        missing = {key for key in form if key not in given}
        unknown = {key for key in given if key not in form}
        there = {key.parameter for key in given if key in form}
        for target, source in (self._model.all_tied_weights_keys or {}).items():
            # A tied weight may have any of its names.
            if target in there or source in there:
                there |= {target, source}
        tied = {*(self._model.all_tied_weights_keys or {})}
        missing = {
            key for key in missing if key.parameter not in tied and not self._is_tied_to(key, there)
        }
        # The lists of the class, and the loading code's rules for all classes.
        left = SimpleNamespace(
            missing_keys={key.parameter for key in missing},
            unexpected_keys={key.parameter for key in unknown},
        )
        self._model._adjust_missing_and_unexpected_keys(left)
        buffers = {name for name, _ in self._model.named_buffers()}
        ignored = {
            key
            for key in unknown
            if key.parameter not in left.unexpected_keys or key.parameter in buffers
        }
        return TensorDifferences(
            self._judge,
            tuple(sorted(form[key] for key in missing if key.parameter in left.missing_keys)),
            tuple(sorted(given[key] for key in unknown - ignored)),
            tuple(
                sorted(
                    (name, shapes[name], form[key][1])
                    for key, name in given.items()
                    if key in form and shapes[name] != form[key][1]
                )
            ),
            tuple(sorted(given[key] for key in ignored)),
        )

    def _is_tied_to(self, key: _Key, there: set[str]) -> bool:
        """Return whether a parameter is tied to another parameter that is present."""
        ties = (self._model.all_tied_weights_keys or {}).items()
        return any(source == key.parameter and target in there for target, source in ties)


def _find_class(engine: Any, made: Any, content: Mapping[str, Any]) -> Any:
    """Return the class that config.json names, or that of its model type; None if unknown."""
    named = [one for one in content.get("architectures") or () if isinstance(one, str)]
    for name in named:
        found = getattr(engine, name, None)
        if _is_model(engine, found):
            return found
    if named and content.get("auto_map"):
        # The class is code next to the checkpoint.
        return None
    for auto in _AUTO_CLASSES:
        mapping = getattr(engine, auto)._model_mapping
        if type(made) in mapping:
            found = mapping[type(made)]
            return found[0] if isinstance(found, tuple) else found
    return None


def _is_model(engine: Any, found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, engine.PreTrainedModel)


def _find_elsewhere(
    engine: Any, model_class: Any, config: Any, names: tuple[str, ...]
) -> frozenset[str]:
    """Return the names that another class of the same model type has, such as names of a head."""
    left = {*names}
    for other in _list_classes(engine, model_class) if names else ():
        try:
            tensors = _ClassTensors(engine, other, config)
        except Exception:  # Some classes are for other values of the config.
            continue
        known = {key for form in tensors.forms for key in form}
        left -= {name for name in left if tensors.key(name) in known}
        if not left:
            break
    return frozenset({*names} - left)


def _list_classes(engine: Any, model_class: Any) -> Iterator[Any]:
    """Yield the other public classes of a model class's file, for the same config."""
    module = sys.modules[model_class.__module__]
    for name in getattr(module, "__all__", ()):
        found = getattr(module, name)
        if (
            _is_model(engine, found)
            and found.config_class is model_class.config_class
            and found is not model_class
            and not name.endswith("PreTrainedModel")
        ):
            yield found
