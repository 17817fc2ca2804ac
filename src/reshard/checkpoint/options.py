"""Options of conversions, loads and comparisons: values that are checked when they are created.

    ConversionRequest   what to write: layouts, format, names, elements
    RunOptions          how a planned conversion is run: memory, threads, what may be replaced
    LoadOptions         how arrays are loaded: memory to fill, threads, casts
    CompareOptions      what is compared of two checkpoints: names, selected tensors
    DiffOptions         how the changes between two checkpoints are written

`convert`, `plan_conversion`, `run_conversion`, `load`, `compare` and `diff` take the fields as
keywords, or a value. A field is declared once, by `option`; `reshard.cli.options` makes the
command's options from it, and `tools/options_page.py` a page and the types of keywords.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from reshard._records import Record
from reshard._validation import MAX_RANKS, check_int, check_used
from reshard.binding import REPLICAS
from reshard.checkpoint.contents import CHECK_COPIES
from reshard.checkpoint.formats.registry import written_format, written_names
from reshard.checkpoint.naming.selection import TensorSelection
from reshard.checkpoint.storage.threads import check_stop_event
from reshard.elements import CAST_TYPES, QUANTIZATIONS, cast_type
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.overrides import ALLOWANCES, parse_allowed
from reshard.recipes.recipe import parse_options
from reshard.recipes.rules import Rule, parse_rules

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reshard.checkpoint.blocks.block_io import OpenFiles
    from reshard.checkpoint.formats.format import CheckpointFormat
    from reshard.checkpoint.naming.renaming import Names
    from reshard.checkpoint.processes import Processes
    from reshard.checkpoint.storage.local_files import SourceFile
    from reshard.checkpoint.storage.threads import ProgressFunction
    from reshard.checkpoint.training.state import TrainingStyle
    from reshard.dtypes import DType
    from reshard.recipes.engine_layouts import EngineLayout
    from reshard.recipes.recipe import Recipe

    Target = str | int | DeviceMesh
    RecipeName = str | os.PathLike[str] | Recipe
    LayoutFile = str | os.PathLike[str] | EngineLayout

DEFAULT_EXTRA_BYTES = 256 * 1024 * 1024
"""The memory that a run on checkpoints may allocate by default."""
AUTO, NO_RECIPE = "auto", "none"
"""Names of a recipe: that which fits the source's config.json, and no recipe."""


SELECTION_OPTIONS = ("include", "exclude", "strip_prefix", "rename", "select")
"""The options that take a part of the source, or change its names."""
PRETRAINED_OPTIONS = ("dtype", "adapters", "source_layout", "allow", *SELECTION_OPTIONS)
"""The options that apply to weights alone, as a model folder for transformers has them."""
COMPRESSIONS = ("zstd",)
"""The compressions of a delta."""
# PyTorch's long names are accepted too, and not listed in the help.
SHORT_CAST_TYPES = [name for name in CAST_TYPES if len(name) < 5]

# The options of a conversion that exclude others, in the words of errors.
_EXCLUDED = {
    "an engine's layout": (
        *("rules", "a recipe", "a strategy", "names of other programs", "training"),
    ),
    "dequantize": ("names of other programs",),
    "quantize": ("names of other programs",),
}
_NOT_WITH_ADAPTERS = (
    *("names of other programs in the target", "dequantize", "quantize", "an engine's layout"),
)

# The number of bytes written between two journal entries: a crash loses at most this much work.
SYNC_BYTES = 512 * 1024 * 1024

Value = TypeVar("Value")


def option(
    default: Value,
    text: str,
    *,
    unset: str | None = None,
    python: str = "",
    flag: str | None = "",
    metavar: str | None = None,
    choices: Iterable[str] | Callable[[], Iterable[str]] | None = None,
    is_loaded: bool = True,
    recorded: str = "given",
) -> Value:
    """Declare a field as an option. All other descriptions of the option are made from this one.

    These are the option of the command, the docstring of the class, the page of options, the
    keywords that type checkers know, and the entry in journals.

    Args:
        default: the value without the option: () for an option that can be repeated, False for an
            option without a value.
        text: its effect. `{name}` stands for another option, `{choices}` for all values.
        unset: the effect without the option, if the default does not show it.
        python: a further text, about Python alone.
        flag: the option's name in the command; made from the field's name if empty, and None if
            only Python has the option.
        metavar: the placeholder of its value in the command's help.
        choices: all its values; a function if they depend on plug-ins.
        is_loaded: whether `load` uses the option too; `load` returns elements as they are stored.
        recorded: when a journal has an entry for the option: `always`, `given`, or `never`, for an
            option that does not change the result. A run continues only a run of equal entries.
    """
    metadata = {
        "text": text,
        "unset": unset,
        "python": python,
        "flag": flag,
        "metavar": metavar,
        "choices": choices,
        "is_loaded": is_loaded,
        "recorded": recorded,
    }
    return dataclasses.field(default=default, metadata=metadata)


class Options(Record):
    """A set of options, checked when it is created. Its docstring describes the fields."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__doc__ = _OptionsDocstring(cls.__doc__ or "")  # type: ignore[assignment]

    @classmethod
    def of(cls, options: object, keywords: Mapping[str, Any]) -> Self:
        """Return the options that a caller gave: as a value, by keywords, or the defaults.

        Raises:
            UsageError: both a value and keywords, or a value of another type.
        """
        if options is None:
            return cls(**keywords)
        if not isinstance(options, cls):
            raise UsageError(f"options {options!r}; expected a {cls.__name__}, or its keywords")
        if keywords:
            raise UsageError(
                f"a {cls.__name__}, and the keyword {next(iter(keywords))!r} too; put it into the "
                f"{cls.__name__}"
            )
        return options

    def check_choices(self, *names: str) -> None:
        """Raise UsageError for a value of these options that is not one of their choices."""
        for name in names:
            value, choices = getattr(self, name), self.declared_fields[name].metadata["choices"]
            if value is not None and value not in choices:
                raise UsageError(f"{name} {value!r}; expected one of {', '.join(choices)}")


def find_options(options: type[Options]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a class that are options, by name.

    >>> [*find_options(RunOptions)][:3]
    ['extra_bytes', 'threads', 'overwrite']
    """
    fields = {field.name: field for field in dataclasses.fields(options)}
    return {name: field for name, field in fields.items() if "text" in field.metadata}


class _OptionsDocstring:
    """A docstring with a list of the options, which is made when it is read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, cls: type[Options]) -> str:
        import textwrap

        summary, gap, rest = self._text.partition("\n\n")
        lines = [f"{summary}\n", "    Attributes:"]
        for name, field in find_options(cls).items():
            text = f"{name}: {describe_option(field, '`{}`'.format)}"
            described = textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False)
            lines += [f"{' ' * (12 if at else 8)}{line}" for at, line in enumerate(described)]
        return "\n".join(lines) + gap + rest


def describe_option(
    field: dataclasses.Field[Any],
    refer: Callable[[str], str],
    parts: Iterable[str] = ("text", "python", "unset"),
) -> str:
    """Return what is written about an option.

    Args:
        field: the field, declared by `option`.
        refer: returns the text for a reference to another option.
        parts: the arguments of `option` to write.

    >>> describe_option(find_options(RunOptions)["discard_others"], "--{}".format)
    'With --overwrite: delete also files that are no part of the checkpoint at the target.'
    """
    described = {part: field.metadata[part] for part in parts if field.metadata[part]}
    if "unset" in described and len(described) > 1:
        described["unset"] = f"[default: {described['unset']}]"

    def resolve(match: re.Match[str]) -> str:
        return ", ".join(list_choices(field) or ()) if match[1] == "choices" else refer(match[1])

    return re.sub(r"\{([a-z_]+)\}", resolve, " ".join(described.values()))


def list_choices(field: dataclasses.Field[Any]) -> list[str] | None:
    """Return all values of an option, or None if any value of its type may be given."""
    choices = field.metadata["choices"]
    if choices is None:
        return None
    return [*(choices() if callable(choices) else choices)]


def _list_training_styles() -> Iterable[str]:
    from reshard.checkpoint.training.state import STYLES

    return STYLES


class RunOptions(Options):
    """How a planned conversion is run; the keywords of `run_conversion`.

    Raises:
        UsageError: values that cannot be, or that contradict each other.

    >>> RunOptions(threads=0)
    Traceback (most recent call last):
    reshard.errors.UsageError: threads=0; expected a whole number from 1
    """

    extra_bytes: int = option(
        DEFAULT_EXTRA_BYTES,
        "Limit on the memory that the run allocates for buffers.",
        flag="--memory",
        metavar="SIZE",
    )
    threads: int | None = option(
        None,
        "At most N threads per process.",
        python="Fewer run if {extra_bytes} does not suffice, or if processes share a machine.",
        unset="4 for local files, 16 for a URL",
        metavar="N",
    )
    overwrite: bool = option(
        False, "Replace the checkpoint at the target, once the new one is complete."
    )
    discard_others: bool = option(
        False,
        "With {overwrite}: delete also files that are no part of the checkpoint at the target.",
    )
    restart: bool = option(False, "Discard what an interrupted run left, and start over.")
    progress: ProgressFunction | None = option(
        None, "A function that is called with a `Progress` after every block.", flag=None
    )
    sync_bytes: int = option(
        SYNC_BYTES, "The bytes written between two entries in the journal.", flag=None
    )
    processes: Processes | None = option(
        None,
        "The processes that share the work, each of which runs the same conversion (see "
        "`reshard.checkpoint.running_processes`).",
        unset="this process alone",
        flag=None,
    )
    stop: threading.Event | None = option(
        None,
        "An event that ends the run when it is set, as ctrl-C does; the same call continues.",
        flag=None,
    )
    staging: str | os.PathLike[str] | None = option(
        None,
        "The local folder for files that are to be uploaded. A target on a disk has its staging "
        "folder next to it.",
        unset="in the user's cache",
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        check_limits(self.extra_bytes, self.threads)
        check_stop_event(self.stop)
        if self.discard_others and not self.overwrite:
            raise UsageError(
                "discard_others without overwrite, which alone replaces a target; give both"
            )


def check_limits(extra_bytes: int, threads: int | None) -> None:
    """Raise UsageError for an invalid memory limit or number of threads."""
    # Not `isinstance`: True is an int to Python.
    if type(extra_bytes) is not int or extra_bytes < 0:
        raise UsageError(f"extra_bytes={extra_bytes!r}; expected a whole number from 0")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise UsageError(f"threads={threads!r}; expected a whole number from 1")


def check_mapping(name: str, value: object) -> None:
    """Raise UsageError unless a value is a mapping."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} of {type(value).__name__}; give a dict by tensor name")


class LoadOptions(Options):
    """How arrays are loaded; the keywords of `load` other than those of a `ConversionRequest`.

    Raises:
        UsageError: values that cannot be, or that contradict each other.
    """

    out: Mapping[str, NDArray[Any]] | None = option(
        None,
        "Arrays to fill instead of new ones, by name, of the local shape and the tensor's dtype.",
        flag=None,
    )
    threads: int | None = option(
        None, "The number of threads that read.", unset="4, and 16 from a URL", flag=None
    )
    files: OpenFiles[SourceFile] | None = option(
        None,
        "The open files of the checkpoint (`open_sources`), for a caller that counts the bytes "
        "read, and that closes them.",
        flag=None,
    )
    dtype: str | None = option(
        None,
        "The dtype of floating-point tensors of 16 bits or more: bf16, fp16 or fp32.",
        unset="that of each tensor",
        flag=None,
    )
    readers_on_host: int = option(
        1,
        "How many processes of this host load from the checkpoint at the same time, each its own "
        "rank's part: from a URL, bytes that several of them need are requested once, and shared "
        "in at most 256 MiB of memory for all of them. Each waits up to 10 s for the others. Files "
        "of this machine are shared by the page cache.",
        flag=None,
    )
    count_read: Callable[[int], None] | None = option(
        None,
        "A function that is called at the end with the number of bytes requested of the files, if "
        "they were opened here.",
        flag=None,
    )
    progress: ProgressFunction | None = option(
        None,
        "A function that is called with a `Progress` after every piece that was read.",
        flag=None,
    )
    stop: threading.Event | None = option(
        None, "An event that ends the work when it is set.", flag=None
    )

    def __post_init__(self) -> None:
        if self.out is not None:
            check_mapping("out", self.out)
        check_stop_event(self.stop)
        from reshard.checkpoint.storage.shared_read_cache import check_readers

        if check_readers(self.readers_on_host) > 1 and self.files is not None:
            raise UsageError(
                f"files, and readers_on_host={self.readers_on_host} too; files that are open "
                "already are not shared, leave one of them out"
            )
        # Raises for a type to which elements cannot be cast.
        _ = self.cast

    @property
    def cast(self) -> DType | None:
        """The dtype to cast to, or None."""
        return None if self.dtype is None else cast_type(self.dtype)


def split_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], RunOptions]:
    """Return the keywords of a request, and the options of a run.

    Raises:
        UsageError: as `RunOptions`.

    >>> request, run = split_arguments({"to": "tp=2", "threads": 1})
    >>> request, run.threads
    ({'to': 'tp=2'}, 1)
    """
    request = dict(arguments)
    run = [name for name in RunOptions.field_names if name in arguments]
    return request, RunOptions(**{name: request.pop(name) for name in run})


class ConversionRequest(Options):
    """The contents of a conversion's target: layouts, format, names and elements.

    Raises:
        UsageError: arguments that cannot be, or that contradict each other.
        RecipeError: rules that cannot be read; no such strategy; a file without a layout.

    >>> ConversionRequest(to="tp=2", rules=["*.weight=tp, -"]).target_format.name
    'sharded-safetensors'
    """

    to: Target | None = option(
        None,
        "The target: a mesh (tp=2,dp=2), a number of ranks (3), or `full` for whole tensors.",
        unset="layouts, format and number of files stay",
        metavar="MESH",
        recorded="always",
    )
    mesh_order: str | Sequence[str] | None = option(
        None,
        "The axes of {to}, from the one along which ranks are consecutive to the slowest "
        "(tp,pp,dp), or `text` for the order of {to}, the last one fastest.",
        python="A `DeviceMesh` has its own order.",
        unset="tp, cp, ep, fsdp, dp, pp, then others",
        metavar="AXES",
        # `to` is recorded in this order.
        recorded="never",
    )
    rules: Iterable[str | Rule] = option(
        (),
        "How to shard the tensors whose names match a glob, in the native notation "
        "('*.weight=tp, -'). The first rule that matches applies.",
        flag="--rule",
        metavar="PATTERN=SPEC",
        recorded="always",
    )
    recipe: RecipeName | None = option(
        None,
        "Rules for a model family, which come after {rules}: a shipped recipe, a TOML file, `auto` "
        "(by config.json), or `none`.",
        unset="auto for a mesh without {rules}, {strategy} and {layout}",
        metavar="NAME|FILE|auto|none",
        recorded="always",
    )
    options: Mapping[str, str] | Iterable[str] = option(
        (),
        "Set an option of the recipe: how to shard (vocabulary=pad128, layer=bytes), or the mesh "
        "axes for one of its axes ('ep=dp tp'). See `reshard recipe show NAME`.",
        python="A dict by name, or texts `name=value`.",
        flag="--option",
        metavar="NAME=VALUE",
        recorded="always",
    )
    strategy: str | None = option(
        None,
        "Instead of rules, place tensors by a policy: simple (whole, in turn), balanced "
        "(whole, by bytes), sharded (rows over all ranks), recipe (by config.json).",
        unset="simple for a number of ranks",
        metavar="NAME",
        recorded="always",
    )
    format: str | None = option(
        None,
        "The target's format: {choices}.",
        python="Or one that was registered.",
        unset="safetensors for `full`, else sharded-safetensors",
        metavar="FORMAT",
        choices=written_names,
        is_loaded=False,
        # The plan of the files has an entry of its own.
        recorded="never",
    )
    replicas: str | None = option(
        None,
        "Store equal shards once, or a copy for every rank, so that a rank's file is enough "
        "for that rank.",
        unset="every for sharded-safetensors, else once",
        choices=REPLICAS,
        is_loaded=False,
        recorded="always",
    )
    most_file_bytes: int | None = option(
        None,
        "The largest size of a file, where tensors are whole.",
        flag="--max-file",
        metavar="SIZE",
        is_loaded=False,
        recorded="always",
    )
    source_names: Names | None = option(
        None,
        "The naming convention of the source, with its fused tensors: one of the recipe, such "
        "as megatron.",
        python="Or a table, as `Recipe.naming` gives it. Rules match the recipe's names.",
        unset="the recipe's own, Hugging Face's",
        metavar="NAME",
        recorded="always",
    )
    target_names: Names | None = option(
        None,
        "The naming convention of the target: megatron, vllm.",
        python="Or a table.",
        metavar="NAME",
        recorded="always",
    )
    dtype: str | None = option(
        None,
        "Cast floating-point tensors, except those of quantised weights and the float32 tensors "
        "of a 16-bit model.",
        python="PyTorch's names (bfloat16) are accepted too.",
        choices=SHORT_CAST_TYPES,
        is_loaded=False,
    )
    dequantize: bool = option(
        False, "Dequantize weights, to {dtype} or to the type in config.json.", is_loaded=False
    )
    quantize: str | None = option(
        None,
        "Quantize the layers' matrices to float8, with a scale per block of 128 by 128.",
        choices=QUANTIZATIONS,
        is_loaded=False,
    )
    layout: LayoutFile | None = option(
        None,
        "Instead of {to}: shard as an engine's own loader reads weights, by a layout file of "
        "`reshard recipe derive`.",
        metavar="FILE",
    )
    allow: Iterable[str] = option(
        (),
        "Accept an error: shards that ranks cannot compute with (uncomputable), tensors that no "
        "rule matches or the architecture lacks (unknown), missing tensors of the architecture "
        "(incomplete), copies that differ, of which the lowest rank's are read (differing-copies), "
        "quantized weights without their scales, which stay as they are (unscaled), a mesh axis "
        "that shards nothing (replicas), parameters in groups that have no optimizer state, as "
        "frozen ones, for DeepSpeed (stateless).",
        choices=ALLOWANCES,
        recorded="never",
    )
    include: Iterable[str] = option(
        (), "Take only tensors and values whose names match ('model.*').", metavar="GLOB"
    )
    exclude: Iterable[str] = option(
        (), "Leave out tensors and values whose names match.", metavar="GLOB"
    )
    strip_prefix: Iterable[str] = option(
        (),
        "Remove a prefix from the names that have it (model.); several are applied in order.",
        metavar="PREFIX",
    )
    rename: Iterable[str] = option(
        (),
        "Rename: each `*` stands for the same text on both sides "
        "('layers.*.w1=model.layers.*.gate'); use {1} and {2} to change their order. The first "
        "pattern that matches applies.",
        metavar="PATTERN=NAME",
    )
    select: str | None = option(
        None,
        "If there are several models in one checkpoint, take the one under this prefix "
        "(ema_state_dict), and remove the prefix from its names. Applied before {include}.",
        metavar="PREFIX",
    )
    training: str | None = option(
        None,
        "Convert training state to that of another program: names, 32-bit weights, steps, "
        "groups. fsdp2: for torch.distributed.checkpoint.",
        unset="the format's, or the source's",
        choices=_list_training_styles,
        is_loaded=False,
    )
    adapters: Iterable[str | os.PathLike[str]] = option(
        (),
        "Merge a PEFT adapter into the weights: a folder with adapter_config.json. Several are "
        "merged in order.",
        flag="--adapter",
        metavar="PATH",
        is_loaded=False,
    )
    source_layout: LayoutFile | None = option(
        None,
        "Convert an engine's parameters (sharded_state) back to the model's tensors, by a layout "
        "file of `reshard recipe derive`.",
        unset="the file next to the source, for a target of another format",
        metavar="FILE",
        is_loaded=False,
    )
    check_copies: str | None = option(
        None,
        "How parts that several ranks of the source hold are compared: {choices}.",
        unset="as the source was opened",
        choices=CHECK_COPIES,
        # Commands open the source themselves, with an option of this name.
        flag=None,
        is_loaded=False,
        recorded="never",
    )
    # The mesh, number of ranks or "full" of the source if `to` is None, once the source is known.
    kept: Target | None = None

    def __post_init__(self) -> None:
        # First, since the mesh of an engine's layout becomes `to`, on which later checks depend.
        self._read_layouts()
        self._read_adapters()
        # Rules are parsed only once, since they may be an iterator.
        object.__setattr__(self, "rules", parse_rules(self.rules))
        object.__setattr__(self, "options", parse_options(self.options))
        object.__setattr__(self, "allow", tuple(sorted(parse_allowed(self.allow))))
        _read_selection(self)
        most = self.most_file_bytes
        if most is not None and (type(most) is not int or most < 1):
            raise UsageError(f"files of at most {most!r} bytes; give a whole number from 1")
        self.check_choices("replicas", "quantize", "check_copies")
        if self.dtype is not None:
            cast_type(self.dtype)
            # A `torch.dtype` is accepted too: its text is the name after "torch.".
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        self._check_exclusive()
        # Raises for an unknown form of training state.
        _ = self.training_style
        if self.to is None:
            self._check_kept()
        if self.to is not None or self.kept is not None:
            self._check_format()
            self._check_placement()

    def list_recorded(self) -> dict[str, Any]:
        """Return the options that the journal of a run has; engines' layouts as digests."""
        recorded = {}
        for name, field in self.declared_fields.items():
            when, value = field.metadata.get("recorded"), getattr(self, name)
            if when == "always" or (when == "given" and value != field.default):
                recorded[name] = value
        for name in ("layout", "source_layout"):
            if name in recorded:
                import hashlib

                from reshard.plans.serialization import to_json

                text = to_json(recorded[name]).encode()
                recorded[name] = hashlib.blake2b(text, digest_size=16).hexdigest()
        return recorded

    def _check_exclusive(self) -> None:
        """Refuse options that exclude each other whatever the target is."""
        if self.dequantize and self.quantize is not None:
            raise UsageError("dequantize and quantize exclude each other; convert in two steps")
        present = {
            "rules": bool(self.rules),
            "a recipe": self.has_recipe,
            "a strategy": self.strategy is not None,
            "names of other programs": self.source_names is not None
            or self.target_names is not None,
            "names of other programs in the target": self.target_names is not None,
            "training": self.training is not None,
            "an engine's layout": self.layout is not None,
            "dequantize": self.dequantize,
            "quantize": self.quantize is not None,
        }
        for option, others in _EXCLUDED.items():
            for other in others if present[option] else ():
                _refuse(present[other], other, option)
        for other in _NOT_WITH_ADAPTERS if self.adapters else ():
            if present[other]:
                raise UsageError(
                    f"adapters cannot go together with {other}; convert twice, with the adapters "
                    "first"
                )

    def _check_kept(self) -> None:
        """Refuse options that need a mesh if the request lacks a mesh."""
        present = {
            "rules": bool(self.rules),
            "a recipe": self.has_recipe and not self.has_conventions,
            "a strategy": self.strategy is not None,
        }
        for what, is_given in present.items():
            if is_given:
                raise UsageError(
                    f"{what} without `to`, the mesh to shard over; give `to`, such as tp=2. "
                    "Without it, layouts stay as in the source"
                )

    def _read_adapters(self) -> None:
        paths = self.adapters
        if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
            raise UsageError(f"adapters {paths!r}; give a list of paths")
        paths = list(paths)
        if not all(isinstance(value, str | os.PathLike) for value in paths):
            raise UsageError(f"adapters {paths!r}; give a list of paths")
        object.__setattr__(self, "adapters", tuple(os.fspath(value) for value in paths))

    def _read_layouts(self) -> None:
        """Read the layouts of engines. The target's determines its mesh."""
        for name in ("layout", "source_layout"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _read_layout(getattr(self, name)))
        if self.engine_layout is None:
            return
        mesh = self.engine_layout.mesh
        if self.to is not None and not _is_alike(self.to, mesh):
            raise UsageError(
                f"to {self.to!r} with a layout for {mesh.text}; leave `to` out, or derive a layout "
                "for it"
            )
        object.__setattr__(self, "to", mesh)

    @cached_property
    def selection(self) -> TensorSelection:
        """The selected part of the source, and its names."""
        return TensorSelection(*(getattr(self, name) for name in SELECTION_OPTIONS))

    @property
    def training_style(self) -> TrainingStyle | None:
        """The form of the target's training state, or None if the source's form stays."""
        from reshard.checkpoint.training.state import training_style

        name = self.training or self.target_format.training
        return None if name is None else training_style(name)

    @property
    def engine_layout(self) -> EngineLayout | None:
        """The layout of the engine by which the target is sharded, or None."""
        return cast("EngineLayout | None", self.layout)

    @property
    def source_engine_layout(self) -> EngineLayout | None:
        """The layout of the engine whose ranks hold the source, if given."""
        return cast("EngineLayout | None", self.source_layout)

    def _check_format(self) -> None:
        from reshard.checkpoint.formats.format import Capability

        holds = self.target_format.capabilities
        to = f"to {self.to_text!r}"
        form = Capability.WHOLE if self.is_whole else Capability.SHARDS
        program = self.target_format.written_for
        if form not in holds and program is not None:
            raise UsageError(
                f"the format {self.format} with {to}: it has what the loader of {program} gives "
                f"each rank; use --for {program} (reshard.checkpoint.engines.conversion in Python)"
            )
        _refuse(form not in holds, to, f"the format {self.format}")
        by = to if self.format is None else f"the format {self.format}"
        is_every = self.replicas == "every"
        _refuse(is_every and Capability.REPLICAS not in holds, f"replicas {self.replicas!r}", by)
        is_limited = self.most_file_bytes is not None
        _refuse(is_limited and Capability.FILE_LIMIT not in holds, "a limit for files", by)

    def _check_placement(self) -> None:
        _refuse(
            self.is_by_recipe and self.has_recipe,
            "a recipe",
            f"the strategy {self.strategy!r}",
        )
        if (not self.is_whole and self.is_by_rules) or self.layout is not None:
            return
        placed_by = f"the strategy {self.strategy or 'simple'!r}"
        if self.is_whole:
            placed_by = "to 'full'"
            _refuse(self.strategy is not None, placed_by, "a strategy")
        _refuse(bool(self.rules), placed_by, "rules")
        _refuse(self.has_recipe and not self.has_conventions, placed_by, "a recipe")

    @cached_property
    def _parsed_target(self) -> tuple[DeviceMesh | None, int | None]:
        from reshard.recipes.rank_order import order_axes

        target = self.kept if self.to is None else self.to
        mesh, ranks = _parse_target("full" if target is None else target)
        if mesh is None or isinstance(target, DeviceMesh):
            check_used(
                f"mesh_order={self.mesh_order!r}",
                self.mesh_order is None,
                "axes are put in order where `to` is the text of a mesh, such as 'tp=2,pp=2'",
            )
            return mesh, ranks
        return order_axes(mesh, self.mesh_order), ranks

    @property
    def mesh(self) -> DeviceMesh | None:
        """The target mesh; None for whole tensors, and for a number of ranks."""
        mesh, ranks = self._parsed_target
        if mesh is None and ranks is not None and self.is_by_recipe:
            return DeviceMesh.of(tp=ranks)
        return mesh

    @property
    def ranks(self) -> int:
        """The number of target ranks; 1 for whole tensors."""
        mesh, ranks = self._parsed_target
        return mesh.size if mesh is not None else ranks or 1

    @property
    def is_whole(self) -> bool:
        """Whether the tensors of the target are whole."""
        return self._parsed_target == (None, None)

    @property
    def is_by_recipe(self) -> bool:
        """Whether the strategy is the recipe of the source's config.json."""
        if self.strategy is None:
            return False
        from reshard.recipes.strategies import by_recipe, strategy

        return strategy(self.strategy).function is by_recipe

    @property
    def has_recipe(self) -> bool:
        """Whether a recipe is named."""
        return self.recipe is not None and self.recipe != NO_RECIPE

    @property
    def has_conventions(self) -> bool:
        """Whether names are a recipe's conventions; a table supplies its own names."""
        return any(isinstance(names, str) for names in (self.source_names, self.target_names))

    @property
    def keeps_layouts(self) -> bool:
        """Whether the target keeps the source's layouts."""
        return self.to is None and not self.is_whole

    @property
    def is_by_rules(self) -> bool:
        """Whether rules and a recipe shard the tensors, and no other strategy."""
        is_by_engine = self.layout is not None
        return (
            self.mesh is not None
            and not is_by_engine
            and not self.keeps_layouts
            and (self.strategy is None or self.is_by_recipe)
        )

    @property
    def changes_elements(self) -> bool:
        """Whether elements of the target differ from those of the source."""
        changes = self.dtype is not None or self.dequantize or self.quantize is not None
        return changes or bool(self.adapters)

    @property
    def to_text(self) -> str:
        """The target mesh, number of ranks or `full`, as text."""
        mesh, ranks = self._parsed_target
        return mesh.text if mesh is not None else "full" if ranks is None else str(ranks)

    @cached_property
    def target_format(self) -> CheckpointFormat:
        """The format of the new checkpoint."""
        return written_format(self.format, to_whole=self.is_whole)

    @property
    def stored_replicas(self) -> str:
        """How the new checkpoint stores equal shards: as requested, or by its format's default.

        >>> ConversionRequest(to="tp=2").stored_replicas
        'every'
        >>> ConversionRequest(to="tp=2", format="torch-dcp").stored_replicas
        'once'
        """
        if self.replicas is not None:
            return self.replicas
        from reshard.checkpoint.formats.format import Capability

        return "every" if Capability.REPLICAS in self.target_format.capabilities else "once"

    @property
    def parsed_rules(self) -> tuple[Rule, ...]:
        """The rules, which were parsed when the request was created."""
        return cast("tuple[Rule, ...]", self.rules)

    @property
    def recipe_options(self) -> dict[str, str]:
        """The options of the recipe by name, which were parsed when the request was created."""
        return cast("dict[str, str]", self.options)


def _repeat(options: type[Options], name: str) -> Any:
    """Declare the option of another class for a further class."""
    return options.declared_fields[name]


class CompareOptions(Options):
    """The tensors that `compare` compares of two checkpoints, and how it does.

    By default, tensors of the same name are compared. With `left_names`, `right_names` or `recipe`,
    tensors are compared under the recipe's own names, and fused tensors by their members. Other
    options apply to the left side, as in the conversion that made the right side from it;
    `include` and `exclude` select from both sides if no option changes names.

    Raises:
        UsageError: values that cannot be.
    """

    left_names: Names | None = option(
        None,
        "The naming convention of the left side, such as megatron.",
        metavar="NAME",
    )
    right_names: Names | None = option(
        None, "The naming convention of the right side.", metavar="NAME"
    )
    recipe: RecipeName | None = option(
        None,
        "The recipe of the naming conventions.",
        unset="auto, by config.json",
        metavar="NAME|FILE|auto",
    )
    dtype: str | None = _repeat(ConversionRequest, "dtype")
    adapters: Iterable[str | os.PathLike[str]] = _repeat(ConversionRequest, "adapters")
    source_layout: LayoutFile | None = _repeat(ConversionRequest, "source_layout")
    include: Iterable[str] = _repeat(ConversionRequest, "include")
    exclude: Iterable[str] = _repeat(ConversionRequest, "exclude")
    strip_prefix: Iterable[str] = _repeat(ConversionRequest, "strip_prefix")
    rename: Iterable[str] = _repeat(ConversionRequest, "rename")
    select: str | None = _repeat(ConversionRequest, "select")
    threads: int | None = option(
        None, "At most N threads.", unset="4 for local files, 16 for a URL", metavar="N"
    )
    progress: ProgressFunction | None = _repeat(RunOptions, "progress")

    def __post_init__(self) -> None:
        if self.threads is not None:
            check_int(self.threads, "threads", minimum=1)
        _read_selection(self)

    @cached_property
    def selection(self) -> TensorSelection:
        """The selected part of the left side, and its names."""
        return TensorSelection(*(getattr(self, name) for name in SELECTION_OPTIONS))

    @property
    def changes(self) -> dict[str, Any]:
        """The options of a conversion that changes the left side before it is compared."""
        names = ("dtype", "adapters", "source_layout")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def is_by_recipe(self) -> bool:
        """Whether tensors are compared under the names of a recipe."""
        return any(item is not None for item in (self.left_names, self.right_names, self.recipe))


class DiffOptions(Options):
    """How `diff` writes the changes between two checkpoints.

    Raises:
        UsageError: values that cannot be.
    """

    compression: str | None = option(
        None,
        "Compress the changes; effective where numbers changed a little.",
        flag="--compress",
        choices=COMPRESSIONS,
    )
    overwrite: bool = option(False, "Replace the delta if it exists, once the new one is complete.")
    trust_digests: bool = option(
        False,
        "Do not read blocks whose digests in both manifests are equal: faster, and blind to bytes "
        "that changed since.",
    )
    extra_bytes: int = _repeat(RunOptions, "extra_bytes")
    threads: int | None = _repeat(RunOptions, "threads")
    progress: ProgressFunction | None = _repeat(RunOptions, "progress")

    def __post_init__(self) -> None:
        self.check_choices("compression")
        object.__setattr__(self, "extra_bytes", check_int(self.extra_bytes, "extra_bytes"))
        if self.threads is not None:
            check_int(self.threads, "threads", minimum=1)


def _read_selection(options: ConversionRequest | CompareOptions) -> None:
    """Check the options that select and rename tensors, and make them tuples."""
    for name, value in zip(SELECTION_OPTIONS, options.selection.astuple(), strict=True):
        object.__setattr__(options, name, value)


def _read_layout(layout: LayoutFile) -> EngineLayout:
    from reshard.recipes.engine_layouts import EngineLayout
    from reshard.recipes.engine_layouts.document import read_layout_file

    return layout if isinstance(layout, EngineLayout) else read_layout_file(layout)


def _is_alike(to: Target, mesh: DeviceMesh) -> bool:
    """Return whether a target has the axes of a mesh, in any order."""
    parsed, _ = _parse_target(to)
    return parsed is not None and {*zip(parsed.axis_names, parsed.shape, strict=True)} == {
        *zip(mesh.axis_names, mesh.shape, strict=True)
    }


def _parse_target(to: Target) -> tuple[DeviceMesh | None, int | None]:
    if isinstance(to, DeviceMesh):
        return to, None
    text = str(to).strip()
    if text == "full":
        return None, None
    # Not `isdigit`, which has superscripts too, that `int` refuses.
    if text.isdecimal():
        if int(text) < 1:
            raise UsageError(f"{to} ranks; expected at least 1")
        if int(text) > MAX_RANKS:
            raise UsageError(f"{to} ranks: at most {MAX_RANKS} are supported")
        return None, int(text)
    if "=" not in text:
        raise UsageError(
            f"cannot read the target {text!r}; give a mesh such as tp=2,dp=2, a number of ranks, "
            "or `full`"
        )
    return DeviceMesh.parse(text), None


def _refuse(condition: bool, what: str, other: str) -> None:
    if condition:
        raise UsageError(f"{other} cannot go together with {what}; leave one of them out")
