"""Options of a refit: their types, and the value that is checked and compared between ranks.

A rank that raised an error alone would leave others waiting, so all ranks' agreement reports
problems, and options that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypedDict

import torch.distributed as dist

from reshard._records import Record
from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, UsageError
from reshard.megatron.names import resolve_tie
from reshard.topology import Topology
from reshard.torch.exchange.agreement import CallSignature
from reshard.torch.exchange.changes import UNITS, ChangedOnly
from reshard.torch.exchange.exchange import DEFAULT_EXTRA_BYTES
from reshard.torch.models.naming import Naming
from reshard.torch.programs.methods import METHODS, topology_problem
from reshard.torch.refitting.transforms import QUANTIZATIONS, BlockQuantized, Transform

CastOption = bool | str | Mapping[str, str]
Planning = Literal["local", "centralized"]
RefitMethod = Literal["auto", "exchange", "program", "stages"]
# The maximum bytes of a bucket, or the bucket of each source tensor; a single bucket when None.
Buckets = int | Literal["auto"] | Mapping[str, int] | None
# Options that ranks may give differently: their own names and first ranks.
_RANKS_OWN = ("source_names", "target_names", "source_offset", "target_offset")
# Tables in which order is irrelevant. In `transforms` and `stacks` the first pattern counts.
_UNORDERED = ("ties", "cast", "buckets")


class RefitOptions(TypedDict, total=False):
    """The keyword arguments of `refit`, which are those of `Refit.prepare`; see there."""

    source_names: Naming | None
    target_names: Naming | None
    ties: Mapping[str, str] | None
    stacks: Mapping[str, str] | None
    num_experts: int | None
    cast: CastOption
    strict: bool
    source_offset: int | None
    target_offset: int | None
    transforms: Mapping[str, Transform] | None
    quantize: str | None
    planning: Planning
    method: RefitMethod
    topology: Topology | None
    extra_bytes: int
    check_replicas: bool
    buckets: Buckets
    changed_only: ChangedOnly
    group: dist.ProcessGroup | None


class RefitSettings(Record):
    """The options of a refit, with their defaults; see `Refit.prepare`.

    >>> RefitSettings(buckets={"up": 0}, cast={"up": "bfloat16", "down": False}).find_problem()
    >>> RefitSettings(quantize="fp8").find_problem()
    "quantize='fp8'; it is one of 'fp8-block128', or None"
    >>> RefitSettings(cast="bfloat").find_problem()
    "cast='bfloat'; give True, False, or a type such as 'bfloat16', for all or in a table by name"
    """

    planning: Planning = "local"
    method: RefitMethod = "auto"
    topology: Topology | None = None
    extra_bytes: int = DEFAULT_EXTRA_BYTES
    ties: Mapping[str, str] | None = None
    stacks: Mapping[str, str] | None = None
    num_experts: int | None = None
    cast: CastOption = False
    strict: bool = True
    check_replicas: bool = True
    buckets: Buckets = None
    changed_only: ChangedOnly = False
    transforms: Mapping[str, Transform] | None = None
    quantize: str | None = None
    source_names: Naming | None = None
    target_names: Naming | None = None
    source_offset: int | None = None
    target_offset: int | None = None

    @property
    def quantized(self) -> BlockQuantized | None:
        """The transform of float8 targets with scales, if the source has neither."""
        return QUANTIZATIONS.get(self.quantize or "")

    def find_problem(self) -> str | None:
        """Return why an option is invalid, or None."""
        return next(self._list_problems(), None)

    def sign(self, problem: str | None, notes: tuple[int, ...]) -> CallSignature:
        """Return this rank's call, by the options that have to be equal on all ranks."""
        shown = {
            name: repr(_canonical(name, getattr(self, name)))
            for name in self.field_names
            if name not in _RANKS_OWN
        }
        parts = {name: text.encode() for name, text in shown.items()}
        return CallSignature(parts, problem, notes=notes, show=lambda: shown)

    def plan_key(self, hosts: Topology | None) -> object | None:
        """Return the options that determine a plan; None with transforms, which are code.

        >>> keys = [RefitSettings(cast=cast).plan_key(None) for cast in (False, True)]
        >>> keys[0] == keys[1], RefitSettings(transforms={"x": Transform()}).plan_key(None)
        (False, None)
        """
        if self.transforms:
            return None
        tables = (
            list(table.items()) if isinstance(table, Mapping) else table
            for table in (self.ties, self.cast, self.buckets)
        )
        links = [topology and topology.interning_key() for topology in (self.topology, hosts)]
        others = self.strict, self.extra_bytes, self.method, bool(self.changed_only), self.quantize
        return (*tables, *links, *others)

    def _list_problems(self) -> Iterator[str]:
        check_replicas: object = self.check_replicas
        if not isinstance(check_replicas, bool):
            yield f"check_replicas={check_replicas!r}; it is True or False"
        ties: Any = self.ties or {}
        transforms: Any = self.transforms or {}
        if not isinstance(ties, Mapping) or not isinstance(transforms, Mapping):
            yield f"ties={ties!r}, transforms={transforms!r}; give tables by name"
        for name, transform in transforms.items():
            if not isinstance(transform, Transform):
                yield (
                    f"transforms={{{name!r}: {transform!r}}}; give a Transform, such as "
                    "Cast('int8')"
                )
        if isinstance(self.extra_bytes, bool) or not isinstance(self.extra_bytes, int):
            yield f"extra_bytes={self.extra_bytes!r}; give a whole number of bytes"
        try:
            for name in ties:
                resolve_tie(name, ties)
        except UsageError as error:
            yield str(error)
        stacks: Any = self.stacks or {}
        if not isinstance(stacks, Mapping) or not all(isinstance(name, str) for name in stacks):
            yield f"stacks={stacks!r}; give a table of names, such as {{'*.up': '*.{{}}.up'}}"
        for offset in (self.source_offset, self.target_offset):
            is_whole = isinstance(offset, int) and not isinstance(offset, bool)
            if offset is not None and not (is_whole and offset >= 0):
                yield (
                    f"an offset of {offset!r}; the first rank of a side is a whole number from 0 up"
                )
        if self.planning not in ("local", "centralized"):
            yield f"planning={self.planning!r}; it is 'local' or 'centralized'"
        if self.method not in METHODS:
            yield f"method={self.method!r}; it is one of {', '.join(map(repr, METHODS))}"
        if (problem := topology_problem(self.topology)) is not None:
            yield problem
        yield from self._list_bucket_problems()
        changed_only = self.changed_only
        if not (isinstance(changed_only, bool) or changed_only in UNITS):
            yield f"changed_only={changed_only!r}; it is True, False, 'elements' or 'blocks'"
        quantize = self.quantize
        if not (quantize is None or (isinstance(quantize, str) and quantize in QUANTIZATIONS)):
            names = ", ".join(map(repr, QUANTIZATIONS))
            yield f"quantize={quantize!r}; it is one of {names}, or None"
        cast = self.cast
        try:
            for dtype in cast.values() if isinstance(cast, Mapping) else [cast]:
                if not isinstance(dtype, bool):
                    as_dtype(dtype)
        except ReshardError:
            yield (
                f"cast={cast!r}; give True, False, or a type such as 'bfloat16', for all or in a "
                "table by name"
            )

    def _list_bucket_problems(self) -> Iterator[str]:
        buckets = self.buckets
        numbers = buckets.values() if isinstance(buckets, Mapping) else [buckets]
        minimum = 0 if isinstance(buckets, Mapping) else 1
        if buckets not in (None, "auto") and not all(
            type(n) is int and n >= minimum for n in numbers
        ):
            yield (
                f"buckets={buckets!r}; give a number of bytes above 0, 'auto', a table of numbers, "
                "or None"
            )


def _canonical(name: str, value: Any) -> Any:
    """Return an option's value with the same text on ranks that mean the same."""
    if isinstance(value, Topology):
        return value.interning_key()
    if name in _UNORDERED and isinstance(value, Mapping):
        return sorted(value.items(), key=str)
    return value
