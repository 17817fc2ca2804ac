"""Requests of conversions: what to cut for, by which rules, and into which files.

`convert`, `plan_conversion` and the command take the same keywords; they make a
`ConversionRequest`, which is refused where they contradict each other. What runs, such as
`convert`, takes those of a run beside them: `RunArguments`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict, cast

from reshard._validation import MAX_RANKS, check_used
from reshard.binding import REPLICAS
from reshard.checkpoint.conversion.processes import Processes
from reshard.checkpoint.copy_checks import parse_check
from reshard.checkpoint.files.progress import ProgressFunction
from reshard.checkpoint.formats.format import Capability, CheckpointFormat
from reshard.checkpoint.formats.registry import written_format
from reshard.checkpoint.naming.renaming import Names
from reshard.checkpoint.naming.selection import TensorSelection
from reshard.checkpoint.training.styles import TrainingStyle, training_style
from reshard.elements import cast_type
from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.engine_layouts import EngineLayout
from reshard.recipes.engine_layouts.document import read_layout_file
from reshard.recipes.overrides import parse_allowed
from reshard.recipes.rank_order import describe_order, order_axes
from reshard.recipes.recipe import Recipe, parse_options
from reshard.recipes.rules import Rule, parse_rules
from reshard.recipes.strategies import by_recipe, strategy

Target = str | int | DeviceMesh
RecipeName = str | os.PathLike[str] | Recipe
LayoutFile = str | os.PathLike[str] | EngineLayout

AUTO, NO_RECIPE = "auto", "none"
"""Names of a recipe: that which fits the source's config.json, and no recipe."""


class CutArguments(TypedDict, total=False):
    """The keywords of a `ConversionRequest` that say what ranks hold, as `load` takes them."""

    to: Target | None
    mesh_order: str | Sequence[str] | None
    rules: Iterable[str | Rule]
    recipe: RecipeName | None
    options: Mapping[str, str] | Iterable[str]
    strategy: str | None
    source_names: Names | None
    target_names: Names | None
    layout: LayoutFile | None
    allow: Iterable[str]
    include: Iterable[str]
    exclude: Iterable[str]
    strip_prefix: Iterable[str]
    rename: Iterable[str]
    select: str | None


class RequestArguments(CutArguments, total=False):
    """All keywords of a `ConversionRequest`, as `convert` takes them."""

    format: str | None
    replicas: str | None
    most_file_bytes: int | None
    dtype: str | None
    dequantize: bool
    quantize: str | None
    training: str | None
    adapters: Iterable[str | os.PathLike[str]]
    source_layout: LayoutFile | None
    check_copies: str | None


class RunArguments(TypedDict, total=False):
    """The keywords that say how a conversion is run (see `run_conversion`)."""

    extra_bytes: int
    threads: int | None
    overwrite: bool
    discard_others: bool
    restart: bool
    progress: ProgressFunction | None
    processes: Processes | None
    stop: threading.Event | None
    staging: str | os.PathLike[str] | None


class ConvertArguments(RequestArguments, RunArguments, total=False):
    """The keywords of what plans a conversion and runs it."""


def split_arguments(arguments: ConvertArguments) -> tuple[RequestArguments, RunArguments]:
    """The keywords of a request, and those of a run.

    >>> split_arguments({"to": "tp=2", "threads": 1})
    ({'to': 'tp=2'}, {'threads': 1})
    """
    asked: dict[str, object] = {**arguments}
    running = {name: asked.pop(name) for name in RunArguments.__annotations__ if name in asked}
    return cast(RequestArguments, asked), cast(RunArguments, running)


@dataclass(frozen=True)
class ConversionRequest:
    """What a user asks of a conversion.

    Attributes:
        to: the target mesh (`"tp=2,dp=2"`), a number of ranks, or `"full"` for whole tensors. The
            layouts, the format and the number of files stay as in the source when None.
        mesh_order: the axes of `to` from the one that counts ranks fastest to the slowest
            (`"tp,pp,dp"`), or `"text"` for the order in which they are written, the last one
            fastest; by what the axes are for when None: tp, cp, ep, fsdp, dp, pp, others
            (`reshard.recipes.rank_order`). A `DeviceMesh` has its own order.
        rules: `pattern=spec`, a glob on names and the native notation; the first match wins.
        recipe: the name of a shipped recipe, or a TOML file; its rules come behind `rules`.
            `"auto"` chooses by the source's config.json, and is the default for a mesh without
            rules, a strategy and a layout; `"none"` takes no recipe.
        options: of the recipe, by name, or as `"name=value"` (see `Recipe.with_options`).
        strategy: where the tensors go, instead of rules; `simple` for a number of ranks.
        format: `safetensors`, `sharded-safetensors`, `torch-dcp`, or one that was registered;
            one of the first two, by `to`, when None.
        replicas: `once` stores one copy of equal shards, `every` one for each rank, so that a
            rank's file is enough for that rank; `every` for `sharded-safetensors`, and `once` for
            other formats, when None (see `stored_replicas`).
        most_file_bytes: begin a new file beyond so many bytes; for whole tensors.
        source_names, target_names: what the tensors are called there, and which are fused, where
            that is not as in the recipe: a convention of it, such as `megatron`, or a table as
            `Recipe.naming` gives it. Rules are for the recipe's names.
        dtype: cast floating-point tensors to it: bf16, fp16 or fp32, or by PyTorch's names
            (bfloat16). Tensors of quantised weights
            are not cast, nor float32 ones of a model of 16 bits.
        dequantize: make values of quantised weights, of `dtype` or of config.json's.
        quantize: `fp8-block128` makes matrices of layers float8, with scales for each 128 by 128.
        layout: of an engine, or the file that has it: every rank of the target holds what that
            engine's rank reads. It stands in the place of `to`, rules, a recipe and a strategy.
        allow: what rules or a recipe may leave: `uncomputable` cuts, which ranks cannot compute
            with, `unknown` tensors, which every rank gets whole, and `replicas` along a mesh axis
            over which nothing is sharded. With `differing-copies`,
            copies in the source may differ: those of the lowest rank are read.
        include, exclude: globs on the source's names; what is taken of it, and what of that is left
            out.
        strip_prefix: prefixes that names lose, before anything else looks at them.
        rename: texts `pattern=name`; `*` of the pattern stands for the same text in the name.
        select: the prefix of a model among several, such as `ema_state_dict`: nothing else is
            taken, and names lose it before the four above look at them.
        training: whose names and kinds of training state the target has: `fsdp2`, `reshard` or
            `optax` (`reshard.checkpoint.training.styles`); the format's own, or the source's, when
            None.
        source_layout: of the engine whose ranks hold the source (`vllm-sharded-state`), or the
            file that has it: the target has the model's own tensors. By default the one that is
            beside the source, where there is one and the target is of another format.
        adapters: of PEFT, whose changes are merged into the source's weights, one after another.
        kept: the mesh, number of ranks or `"full"` of the source where `to` is None; it is set
            when the source is known.
        check_copies: how parts that several ranks of the source hold are compared: `sample`, `all`
            or `none` (see `reshard.checkpoint.copy_checks`); as it was opened when None.

    Raises:
        UsageError: arguments that cannot be, or that contradict each other.
        RecipeError: rules that cannot be read; no such strategy; a file without a layout.

    >>> ConversionRequest(to="tp=2", rules=["*.weight=tp, -"]).target_format.name
    'sharded-safetensors'
    """

    to: Target | None = None
    mesh_order: str | Sequence[str] | None = None
    rules: Iterable[str | Rule] = ()
    recipe: RecipeName | None = None
    options: Mapping[str, str] | Iterable[str] = ()
    strategy: str | None = None
    format: str | None = None
    replicas: str | None = None
    most_file_bytes: int | None = None
    source_names: Names | None = None
    target_names: Names | None = None
    dtype: str | None = None
    dequantize: bool = False
    quantize: str | None = None
    layout: LayoutFile | None = None
    allow: Iterable[str] = ()
    include: Iterable[str] = ()
    exclude: Iterable[str] = ()
    strip_prefix: Iterable[str] = ()
    rename: Iterable[str] = ()
    select: str | None = None
    training: str | None = None
    adapters: Iterable[str | os.PathLike[str]] = ()
    source_layout: LayoutFile | None = None
    check_copies: str | None = None
    kept: Target | None = None

    def __post_init__(self) -> None:
        self._read_layout()
        # Iterators can be read once.
        object.__setattr__(self, "rules", parse_rules(self.rules))
        object.__setattr__(self, "options", parse_options(self.options))
        object.__setattr__(self, "allow", tuple(sorted(parse_allowed(self.allow))))
        selection = self.selection
        for name in ("include", "exclude", "strip_prefix", "rename"):
            object.__setattr__(self, name, getattr(selection, name))
        most = self.most_file_bytes
        if most is not None and (type(most) is not int or most < 1):
            raise UsageError(f"files of at most {most!r} bytes; give a whole number from 1")
        if self.replicas not in (None, *REPLICAS):
            raise UsageError(f"replicas {self.replicas!r}; expected one of {', '.join(REPLICAS)}")
        if self.check_copies is not None:
            parse_check(self.check_copies)
        if self.dtype is not None:
            cast_type(self.dtype)
            # The object of PyTorch has the same text.
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        _refuse(self.training is not None and self.layout is not None, "training", "a layout")
        _ = self.training_style
        self._check_adapters()
        if self.source_layout is not None and not isinstance(self.source_layout, EngineLayout):
            object.__setattr__(self, "source_layout", read_layout_file(self.source_layout))
        renames = self.source_names is not None or self.target_names is not None
        _refuse(self.dequantize and renames, "other names", "dequantize")
        _refuse(self.quantize is not None and renames, "other names", "quantize")
        if self.to is None:
            self._check_kept()
        if self.to is not None or self.kept is not None:
            self._check_format()
            self._check_placement()

    def _check_kept(self) -> None:
        """Refuse what shards over a mesh, if none is given."""
        is_for_names = any(isinstance(one, str) for one in (self.source_names, self.target_names))
        given = {
            "rules": bool(self.rules),
            "a recipe": self.has_recipe and not is_for_names,
            "a strategy": self.strategy is not None,
        }
        for what, is_given in given.items():
            if is_given:
                raise UsageError(
                    f"{what} without `to`, which says what to shard over; give `to`, such as tp=2. "
                    "Without it, layouts stay as in the source"
                )

    def _check_adapters(self) -> None:
        given = self.adapters
        if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
            raise UsageError(f"adapters {given!r}; give a list of paths")
        given = list(given)
        if not all(isinstance(one, str | os.PathLike) for one in given):
            raise UsageError(f"adapters {given!r}; give a list of paths")
        paths = tuple(os.fspath(one) for one in given)
        object.__setattr__(self, "adapters", paths)
        others = {
            "names of other programs in the target": self.target_names,
            "dequantize": self.dequantize,
            "quantize": self.quantize,
            "an engine's layout": self.layout,
        }
        for what, other in others.items():
            if paths and other is not None and other is not False:
                raise UsageError(
                    f"adapters cannot go together with {what}; convert twice, with the adapters "
                    "first"
                )

    def _read_layout(self) -> None:
        if self.layout is None:
            return
        layout = self.layout
        if not isinstance(layout, EngineLayout):
            layout = read_layout_file(layout)
            object.__setattr__(self, "layout", layout)
        by_hand = {
            "rules": bool(self.rules),
            "a recipe": self.has_recipe,
            "a strategy": self.strategy is not None,
            "names of other programs": self.source_names is not None
            or self.target_names is not None,
        }
        for what, is_given in by_hand.items():
            _refuse(is_given, what, "an engine's layout")
        if self.to is not None and not _is_alike(self.to, layout.mesh):
            raise UsageError(
                f"to {self.to!r} with a layout for {layout.mesh.text}; leave `to` out, or derive a "
                "layout for it"
            )
        object.__setattr__(self, "to", layout.mesh)

    @property
    def selection(self) -> TensorSelection:
        """What is taken of the source, and by which names."""
        return TensorSelection(
            self.include, self.exclude, self.strip_prefix, self.rename, self.select
        )

    @property
    def training_style(self) -> TrainingStyle | None:
        """How the target keeps training state, where that is not as the source does."""
        name = self.training or self.target_format.training
        return None if name is None else training_style(name)

    @property
    def engine_layout(self) -> EngineLayout | None:
        """The layout of an engine, if the target is cut by one."""
        return self.layout if isinstance(self.layout, EngineLayout) else None

    def _check_format(self) -> None:
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
        every = self.replicas == "every"
        _refuse(every and Capability.REPLICAS not in holds, f"replicas {self.replicas!r}", by)
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
        # A recipe may be there for its names alone; a table has names of its own.
        is_for_names = any(isinstance(one, str) for one in (self.source_names, self.target_names))
        _refuse(self.has_recipe and not is_for_names, placed_by, "a recipe")

    @cached_property
    def _parsed_target(self) -> tuple[DeviceMesh | None, int | None]:
        mesh, ranks = _parse_target(self._target)
        if mesh is None or isinstance(self._target, DeviceMesh):
            check_used(
                f"mesh_order={self.mesh_order!r}",
                self.mesh_order is None,
                "axes are put in order where `to` is the text of a mesh, such as 'tp=2,pp=2'",
            )
            return mesh, ranks
        return order_axes(mesh, self.mesh_order), ranks

    @property
    def order_notes(self) -> tuple[str, ...]:
        """A note if the ranks are not counted in the order in which the mesh was written."""
        if self.mesh is None or not isinstance(self.to, str) or "=" not in self.to:
            return ()
        return describe_order(self.mesh, DeviceMesh.parse(self.to))

    @property
    def _target(self) -> Target:
        target = self.to if self.to is not None else self.kept
        return "full" if target is None else target

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
        return self.strategy is not None and strategy(self.strategy).function is by_recipe

    @property
    def recipe_is_for_model(self) -> bool:
        """Whether a recipe of a kind of models counts, by its names or by its rules."""
        return self.has_recipe or self.is_by_recipe or isinstance(self.target_names, str)

    @property
    def has_recipe(self) -> bool:
        """Whether a recipe is named."""
        return self.recipe is not None and self.recipe != NO_RECIPE

    @property
    def lacks_rules(self) -> bool:
        """Whether the target is a mesh, and nothing says how tensors are sharded over it."""
        is_given = self.recipe is not None or self.rules or self.strategy is not None
        # Formats of programs that shard by themselves need a recipe for its names alone.
        names = self.source_names, self.target_names
        needs_rules = not self.target_format.shards_itself or any(isinstance(n, str) for n in names)
        return self.is_by_rules and needs_rules and not is_given

    @property
    def keeps_layouts(self) -> bool:
        """Whether shards are those of the source."""
        return self.to is None and not self.is_whole

    @property
    def is_by_rules(self) -> bool:
        """Whether rules and a recipe say how tensors are cut, and no other strategy."""
        is_by_engine = self.layout is not None
        return (
            self.mesh is not None
            and not is_by_engine
            and not self.keeps_layouts
            and (self.strategy is None or self.is_by_recipe)
        )

    @property
    def changes_elements(self) -> bool:
        """Whether tensors of the target have other elements than those of the source."""
        changes = self.dtype is not None or self.dequantize or self.quantize is not None
        return changes or bool(self.adapters)

    @property
    def to_text(self) -> str:
        """The target mesh, number of ranks or `full`, as text."""
        mesh, _ = self._parsed_target
        return mesh.text if mesh is not None else str(self._target)

    @cached_property
    def target_format(self) -> CheckpointFormat:
        """The format of the new checkpoint."""
        return written_format(self.format, to_whole=self.is_whole)

    @property
    def stored_replicas(self) -> str:
        """How the new checkpoint stores equal shards: as requested, or as fits its format.

        >>> ConversionRequest(to="tp=2").stored_replicas
        'every'
        >>> ConversionRequest(to="tp=2", format="torch-dcp").stored_replicas
        'once'
        """
        if self.replicas is not None:
            return self.replicas
        return "every" if Capability.REPLICAS in self.target_format.capabilities else "once"

    @property
    def parsed_rules(self) -> tuple[Rule, ...]:
        """The rules."""
        return parse_rules(self.rules)


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
    if text.isdigit():
        if int(text) < 1:
            raise UsageError(f"{to} ranks: a checkpoint is cut for at least 1")
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
