"""Every error a user of reshard can cause.

::

    ReshardError
    ├── UsageError             an argument that is not valid: unknown option, bad number
    │   └── MissingExtraError  a feature whose optional dependency is not installed
    ├── LayoutError            an invalid description of a layout
    │   ├── MeshError          an invalid device mesh: sizes, names, devices, sub-axes
    │   ├── RuleError          a cut rule that does not fit the length of a dimension
    │   ├── SpecError          an invalid sharding: axes used twice, wrong number of dimensions
    │   └── NotationError      text that is not a sharding, a mesh or a saved plan
    ├── PlanError              two layouts that cannot be planned, or a wrong plan
    ├── ShardError             arrays that do not match their layout
    ├── ArrayIndexError        an index outside an array
    ├── RecipeError            a recipe or rule that cannot be applied
    │   ├── UncomputableError  a sharding that ranks cannot compute with
    │   └── UnmatchedError     tensors that match no rule
    ├── CheckpointError        a checkpoint on disk that cannot be used
    │   ├── FormatError        a file that violates its format
    │   ├── CoverageError      shards that overlap, disagree or omit part of a tensor
    │   └── DigestError        bytes that differ from those written
    └── RunError               a failure while running; earlier results are untouched
        ├── LinkError          jobs that cannot connect, or lose each other
        ├── SourceChangedError a source that changed during the run
        └── InterruptedRunError  stopped by the user

The first line of every message names the offending value; the rest states the expected value and a
remedy.
"""

from __future__ import annotations


class ReshardError(Exception):
    """The base class of all errors that this package raises on purpose."""


class UsageError(ReshardError, ValueError):
    """An invalid argument."""


class MissingExtraError(UsageError, ImportError):
    """An optional dependency that is needed but not installed."""


class LayoutError(ReshardError, ValueError):
    """An invalid description of a layout."""


class MeshError(LayoutError):
    """An invalid device mesh: sizes, names, devices or sub-axes."""


class RuleError(LayoutError):
    """A cut rule that does not fit the length or the number of parts."""


class SpecError(LayoutError):
    """An invalid sharding: an axis used twice, a wrong number of dimensions."""


class NotationError(LayoutError):
    """Text that is not a sharding, a rule, a mesh or a saved plan."""


class PlanError(ReshardError, ValueError):
    """Two layouts that cannot be planned, or a plan whose transfers are wrong."""


class ShardError(ReshardError, ValueError):
    """Arrays that do not match their layout."""


class ArrayIndexError(ReshardError, IndexError):
    """An index outside an array. It also ends iteration, as for any sequence."""


class RecipeError(ReshardError, ValueError):
    """A recipe or a rule that cannot be applied to these tensors."""


class UncomputableError(RecipeError):
    """A sharding that ranks cannot compute with: heads that are not divisible, parts
    that differ.
    """


class UnmatchedError(RecipeError):
    """Tensors that match no rule or recipe."""


class CheckpointError(ReshardError):
    """A checkpoint on disk that cannot be used."""


class FormatError(CheckpointError, ValueError):
    """A file that violates its format."""


class UnreadableTensorError(FormatError):
    """A tensor of an unreadable kind, in a checkpoint whose other tensors are readable."""


class CoverageError(CheckpointError, ValueError):
    """Shards of a tensor that overlap, disagree, or omit part of it."""


class DigestError(CheckpointError):
    """Bytes that differ from the written bytes."""


class RunError(ReshardError):
    """A failure while running. The source and any earlier target are untouched."""


class SourceChangedError(RunError):
    """A source file that changed after the run began."""


class LinkError(RunError):
    """Jobs that cannot connect, or lose each other."""


class InterruptedRunError(RunError):
    """Stopped by the user; the same command resumes the run."""
