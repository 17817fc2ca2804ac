"""transformers' own loading code: the layouts of its ranks, and the tensors that its classes load.

transformers shards a model by plans in its configs (`base_model_tp_plan`, `base_model_ep_plan`),
and combines tensors of a checkpoint if its modules are fused or stacked. Both are traced through
its own code (`layouts`)::

    config.json --> a rank's model on `meta`, sharded by its plans as DTensors
    checkpoint's names and shapes --> conversions and shardings, traced --> the rank's layout

1. This process pretends to be each rank in turn (`fake_rank`).
2. The model is built and distributed as in `from_pretrained(distributed_config=...)`.
3. Its loading is traced (`trace_loading`): the source elements of every local tensor.

The tensors that a class loads (`find_class_differences`) follow from the class on the meta device,
without memory. Its own conversions map names in files to its parameters, so experts may be stacked
in memory and separate in files; its lists of ignored tensors and its tied weights apply as in
`from_pretrained`. Names include their numbers here: transformers stacks experts in the order of
their names and does not notice a missing number. Code next to a checkpoint (`auto_map`) never runs.

Source: transformers 5.24, `distributed`, `core_model_loading` and `PreTrainedModel`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from reshard._validation import check_int
from reshard.checkpoint.architectures.records import Shape, TensorDifferences
from reshard.checkpoint.formats.opening import open_checkpoint
from reshard.dtypes import dtype as as_dtype
from reshard.errors import MissingExtraError, RunError, UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.engine_layouts import EngineLayout, RankLayout, SourceTensor
from reshard.torch.loaders.fake_ranks import fake_rank
from reshard.torch.loaders.tracing import trace_loading

# If this variable is set, transformers loads tensors sequentially, in the same thread.
_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
_AXES = ("pp", "dp", "fsdp", "tp")
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")


def layouts(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    tp: int = 1,
    ep: int = 1,
    fsdp: int = 1,
    dp: int = 1,
    pp: int = 1,
    sources: Mapping[str, Any] | None = None,
) -> EngineLayout:
    """Return the parts of a model on every rank of transformers, as its own code loads them.

    No GPU and no weights are needed: models are built on the meta device, and loaded from names and
    shapes.

    Args:
        config: a folder with `config.json` and the checkpoint, whose headers are read; or the
            content of a config.json.
        tp, ep, fsdp, dp, pp: sizes of its `DistributedConfig`: `tp_size`, `ep_size` (which is over
            the ranks of `fsdp` and `tp`), `fsdp_size`, `dp_replicate_size`, `pp_size`.
        sources: the checkpoint's tensors, `{name: (dtype, shape)}`; by default those in the folder,
            or what transformers would save.

    Returns:
        A layout over a mesh of those axes `pp`, `dp`, `fsdp`, `tp` that are larger than 1.

    Raises:
        UsageError: invalid sizes, or a quantized model.
        MissingExtraError: transformers is not installed.
        CheckpointError: no checkpoint in the folder.
        RunError: transformers rejects the model or the parallelism; the message has its reason.
    """
    requested = {"pp": pp, "dp": dp, "fsdp": fsdp, "tp": tp}
    sizes = {axis: check_int(requested[axis], axis, UsageError, minimum=1) for axis in _AXES}
    ep = check_int(ep, "ep", UsageError, minimum=1)
    engine = _import_transformers()
    with explain_errors("read the config"):
        parsed = _read_config(engine, config)
    if getattr(parsed, "quantization_config", None) is not None:
        raise UsageError(
            "a quantised model: what transformers holds of it depends on the device it runs on; "
            "take `quantization_config` out of config.json to trace the weights it is made of"
        )
    if sources is None and not isinstance(config, Mapping):
        tensors = open_checkpoint(config).tensors
        sources = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    ranks = sizes["pp"] * sizes["dp"] * sizes["fsdp"] * sizes["tp"]
    rank_layouts = []
    with silence(engine):
        if sources is None:
            with explain_errors("build the model"):
                sources = _list_saved(engine, _build_whole(engine, parsed))
        for rank in range(ranks):
            with fake_rank(rank, ranks):
                rank_layouts.append(_trace_rank(engine, parsed, sizes, ep, rank, sources))
    cut = {axis: size for axis, size in sizes.items() if size > 1} or {"tp": 1}
    mesh = DeviceMesh("transformers", list(cut.values()), list(cut))
    kinds = {name: _as_source(source) for name, source in sources.items()}
    return EngineLayout("transformers", engine.__version__, mesh, kinds, tuple(rank_layouts))


def module_tensors(
    config: Any, dtype: torch.dtype | None = None, *, as_saved: bool = False
) -> dict[str, SourceTensor]:
    """Return the tensors of transformers' module of a config: types and shapes by name.

    Args:
        config: a `PretrainedConfig`.
        dtype: of the module; the config's when None.
        as_saved: whether to use the names and shapes of saved files, rather than those of
            `state_dict()`, in which experts are stacked if the module stacks them. Either way,
            tied tensors have a single entry.

    Raises:
        MissingExtraError: transformers is not installed.
        RunError: transformers has no such module; the message has its reason.
    """
    engine = import_module_code()
    with explain_errors("build the model"):
        model = _build_whole(engine, config, dtype)
        if as_saved:
            return _list_saved(engine, model)
        return {name: _as_source(tensor) for name, tensor in _list_untied(model).items()}


def save_form(config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers saves of a module, for example with separate experts.

    Args:
        config: a `PretrainedConfig`.
        tensors: by the names of `module_tensors`, or some of them.

    Raises:
        MissingExtraError: transformers is not installed.
        RunError: transformers has no such module; the message has its reason.
    """
    engine = import_module_code()
    with explain_errors("build the model"):
        model = _build_whole(engine, config)
    saved: dict[str, torch.Tensor] = engine.core_model_loading.revert_weight_conversion(
        model, dict(tensors)
    )
    return saved


def import_module_code() -> Any:
    # Packages that transformers imports log missing packages, which do not concern users here.
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers
            import transformers.core_model_loading
            import transformers.modeling_utils
    except ImportError as error:
        raise MissingExtraError(f"names of a module need transformers 5: {error}") from error
    finally:
        logging.disable(level)
    return transformers


def _import_transformers() -> Any:
    try:
        import transformers
        import transformers.core_model_loading
        import transformers.distributed.mixin
    except ImportError as error:
        raise MissingExtraError(
            f"layouts by transformers need transformers 5.20 or later: {error}; run this in an "
            "environment that has it"
        ) from error
    return transformers


@contextmanager
def silence(engine: Any) -> Iterator[None]:
    """Disable its progress bars, its warnings about meshes, and its threads."""
    # Loading on other threads cannot be traced.
    threads = os.environ.get(_ASYNC)
    os.environ[_ASYNC] = "1"
    level = engine.logging.get_verbosity()
    bars = engine.logging.is_progress_bar_enabled()
    engine.logging.set_verbosity_error()
    engine.logging.disable_progress_bar()
    try:
        yield
    finally:
        if threads is None:
            del os.environ[_ASYNC]
        else:
            os.environ[_ASYNC] = threads
        engine.logging.set_verbosity(level)
        if bars:
            engine.logging.enable_progress_bar()


@contextmanager
def explain_errors(what: str) -> Iterator[None]:
    """Add the current operation to errors of transformers."""
    try:
        yield
    except (UsageError, MissingExtraError):
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        raise RunError(f"transformers cannot {what}: {type(error).__name__}: {text}") from error


def _read_config(engine: Any, config: str | os.PathLike[str] | Mapping[str, Any]) -> Any:
    if isinstance(config, Mapping):
        content = dict(config)
        kind = content.pop("model_type", None)
        if not isinstance(kind, str):
            raise UsageError(f"a config with model_type {kind!r}; give the whole of config.json")
        return engine.AutoConfig.for_model(kind, **content)
    folder = Path(config)
    # `config.json` itself may be given, as well as its folder.
    return engine.AutoConfig.from_pretrained(folder.parent if folder.is_file() else folder)


def _find_class(engine: Any, config: Any) -> Any:
    """Return the model class that a config names, or the class for text generation of its type."""
    model_class = _look_up_class(engine, config, config.architectures or ())
    if model_class is None:
        raise UsageError(
            f"transformers has no model for {type(config).__name__}; name a class of its own in "
            "`architectures` of config.json"
        )
    return model_class


def _look_up_class(
    engine: Any, config: Any, names: Sequence[object], *, needs_name: bool = False
) -> Any:
    """Return the first of the named model classes, else the class of the config's type, or None.

    With `needs_name`, a class that is not named does not count.
    """
    for name in names:
        candidate = getattr(engine, name, None) if isinstance(name, str) else None
        if _is_model(engine, candidate):
            return candidate
    for auto in () if needs_name else _AUTO_CLASSES:
        mapping = getattr(engine, auto)._model_mapping
        if type(config) in mapping:
            candidate = mapping[type(config)]
            # Several classes of a type are in order of preference.
            return candidate[0] if isinstance(candidate, tuple) else candidate
    return None


def _is_model(engine: Any, candidate: Any) -> bool:
    return inspect.isclass(candidate) and issubclass(candidate, engine.PreTrainedModel)


def _build_whole(engine: Any, config: Any, dtype: torch.dtype | None = None) -> Any:
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return _find_class(engine, config)._from_config(config, **options)


def _list_saved(engine: Any, model: Any) -> dict[str, SourceTensor]:
    """Return the tensors that transformers saves of a model: types and shapes by name."""
    saved = engine.core_model_loading.revert_weight_conversion(model, _list_untied(model))
    return {name: _as_source(tensor) for name, tensor in saved.items()}


def _list_untied(model: Any) -> dict[str, torch.Tensor]:
    """Return a module's tensors, with a single entry for tied tensors."""
    tied = set(model.all_tied_weights_keys or {})
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _as_source(source: Any) -> SourceTensor:
    kind, shape = source if isinstance(source, tuple) else (source.dtype, source.shape)
    return SourceTensor(as_dtype(kind), tuple(shape))


def _trace_rank(
    engine: Any,
    config: Any,
    sizes: Mapping[str, int],
    ep: int,
    rank: int,
    sources: Mapping[str, Any],
) -> RankLayout:
    """Return the layout of the rank that this process simulates."""
    targets: dict[str, torch.Tensor] = {}

    def load(weights: dict[str, torch.Tensor]) -> None:
        with explain_errors(f"load rank {rank} of {dict(sizes)}, ep={ep}"):
            device = next(iter(weights.values())).device
            targets.update(_load_rank(engine, config, sizes, ep, weights, device))

    # The names and shapes to fill are those of the model before loading.
    with explain_errors(f"build the model of rank {rank} of {dict(sizes)}, ep={ep}"):
        targets.update(_list_locals(_build_rank(engine, config, sizes, ep)[0]))
    return trace_loading(load, sources, targets, rank=rank, form="dict")


def _build_rank(engine: Any, config: Any, sizes: Mapping[str, int], ep: int) -> tuple[Any, Any]:
    """Return a rank's model without memory, and the conversions of its tensors for loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.distributed import DistributedConfig

    cls = _find_class(engine, config)
    distributed_config, _, mesh = cls.prepare_distribute_model(
        DistributedConfig(
            tp_size=sizes["tp"],
            ep_size=ep,
            fsdp_size=sizes["fsdp"],
            dp_replicate_size=sizes["dp"],
            pp_size=sizes["pp"],
        )
    )
    with ExitStack() as stack:
        # As in `from_pretrained`: without memory; parameters are tied when they are loaded.
        for context in cls.get_init_context(config.dtype or torch.float32, False, False, None):
            stack.enter_context(context)
        # A model changes its config, which the models of all ranks are built from.
        model = cls(copy.deepcopy(config))
    conversions = get_model_conversion_mapping(model)
    return cls.maybe_distribute_model(model, distributed_config, mesh), conversions


def _load_rank(
    engine: Any,
    config: Any,
    sizes: Mapping[str, int],
    ep: int,
    weights: dict[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return a rank's local tensors after transformers loaded them."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model, conversions = _build_rank(engine, config, sizes, ep)
    loading = LoadStateDictConfig(
        device_map={"": str(device)},
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=conversions,
    )
    info, _ = convert_and_load_state_dict_in_model(model, weights, loading)
    if info.mismatched_keys or info.conversion_errors or info.error_msgs:
        wrong = [*info.mismatched_keys, *info.conversion_errors.items(), *info.error_msgs]
        raise RunError(
            f"transformers cannot load the checkpoint: {str(wrong[0])[:300]}; does config.json "
            "belong to it?"
        )
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    return _list_locals(model)


def _list_locals(model: Any) -> dict[str, torch.Tensor]:
    """Return the rank's part of every parameter and persistent buffer."""
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in model.state_dict().items()
    }


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


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
    config_classes = engine.models.auto.configuration_auto.CONFIG_MAPPING
    if config.get("model_type") not in config_classes:
        return None
    content = {key: value for key, value in config.items() if key != "quantization_config"}
    with silence(engine):
        with explain_errors("read the config"):
            parsed = config_classes[content["model_type"]].from_dict(content)
        named = content.get("architectures") or ()
        # The class is code next to the checkpoint if `auto_map` is there and has none of the names.
        is_foreign = any(isinstance(name, str) for name in named) and bool(content.get("auto_map"))
        model_class = _look_up_class(engine, parsed, named, needs_name=is_foreign)
        if model_class is None:
            return None
        with explain_errors(f"build {model_class.__name__} from the config"):
            class_tensors = _ClassTensors(engine, model_class, parsed)
        differences = min(
            (class_tensors.compare(form, shapes) for form in class_tensors.forms), key=_count
        )
        elsewhere = _find_elsewhere(engine, model_class, parsed, differences.unknown)
    return dataclasses.replace(
        differences,
        unknown=tuple(name for name in differences.unknown if name not in elsewhere),
        ignored=(*differences.ignored, *sorted(elsewhere)),
    )


def _count(differences: TensorDifferences) -> int:
    return len(differences.missing) + len(differences.unknown) + len(differences.misshapen)


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
        conversions = get_model_conversion_mapping(self._model) or []
        self._rename = loading.rename_source_key
        self._renamings = [rule for rule in conversions if isinstance(rule, loading.WeightRenaming)]
        self._converters = [
            rule for rule in conversions if isinstance(rule, loading.WeightConverter)
        ]
        self._held = self._model.state_dict()
        self._judge = f"{model_class.__name__} of transformers {engine.__version__}"
        saved = loading.revert_weight_conversion(self._model, dict(self._held))
        self.forms = [
            {self.key(name): (name, tuple(tensor.shape)) for name, tensor in form.items()}
            for form in (saved, self._held)
        ]

    def key(self, name: str) -> _Key:
        """Return the parameter that a tensor of a file is loaded into."""
        held, prefix = self._held, self._model.base_model_prefix
        parameter, pattern = self._rename(name, self._renamings, self._converters, prefix, held)
        # As transformers does: a name of the module may look like a name in files.
        if parameter not in held and name in held:
            parameter, pattern = self._rename(name, [], [], prefix, held)
        numbers = _NUMBER.findall(name) if pattern is not None else ()
        return _Key(parameter, pattern, tuple(numbers))

    def compare(
        self, form: Mapping[_Key, tuple[str, Shape]], shapes: Mapping[str, Shape]
    ) -> TensorDifferences:
        """Compare tensors with the tensors of a form."""
        name_of = {self.key(name): name for name in shapes}
        missing = {key for key in form if key not in name_of}
        unknown = {key for key in name_of if key not in form}
        there = {key.parameter for key in name_of if key in form}
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
            tuple(sorted(name_of[key] for key in unknown - ignored)),
            tuple(
                sorted(
                    (name, shapes[name], form[key][1])
                    for key, name in name_of.items()
                    if key in form and shapes[name] != form[key][1]
                )
            ),
            tuple(sorted(name_of[key] for key in ignored)),
        )

    def _is_tied_to(self, key: _Key, there: set[str]) -> bool:
        """Return whether a parameter is tied to another parameter that is present."""
        ties = (self._model.all_tied_weights_keys or {}).items()
        return any(source == key.parameter and target in there for target, source in ties)


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
        keys = {key for form in tensors.forms for key in form}
        left -= {name for name in left if tensors.key(name) in keys}
        if not left:
            break
    return frozenset({*names} - left)


def _list_classes(engine: Any, model_class: Any) -> Iterator[Any]:
    """Yield the other public classes of a model class's file, for the same config."""
    module = sys.modules[model_class.__module__]
    for name in getattr(module, "__all__", ()):
        other_class = getattr(module, name)
        if (
            _is_model(engine, other_class)
            and other_class.config_class is model_class.config_class
            and other_class is not model_class
            and not name.endswith("PreTrainedModel")
        ):
            yield other_class
