"""Every error a user of reshard can cause.

::

    ReshardError
    ├── UsageError             an argument that is not valid: unknown option, bad number
    │   └── MissingExtraError  a feature whose optional dependency is not installed
    ├── LayoutError            a description of a layout that cannot be
    │   ├── MeshError          a device mesh: sizes, names, devices, sub-axes
    │   ├── RuleError          a cut rule that does not fit the length it is given
    │   ├── SpecError          a sharding: axes used twice, wrong number of dimensions
    │   └── NotationError      text that is not a sharding, a mesh or a saved plan
    ├── PlanError              two layouts that cannot be planned, or a plan that is wrong
    ├── ShardError             arrays that do not fit their layout
    ├── ArrayIndexError        an index that an array has no elements at
    ├── RecipeError            a recipe or rule that cannot be applied
    │   ├── UncomputableError  a cut that ranks cannot compute with
    │   └── UnmatchedError     tensors that no rule decides
    ├── CheckpointError        a checkpoint on disk that cannot be used
    │   ├── FormatError        a file whose bytes are not what its format promises
    │   ├── CoverageError      shards that overlap, disagree or leave part of a tensor out
    │   └── DigestError        bytes that are not the bytes that were written
    └── RunError               a failure while running; what was there before is untouched
        ├── LinkError          jobs that cannot meet, or lose each other
        ├── SourceChangedError a source that changed under the run
        └── InterruptedRunError  stopped by the user

The first line of every message names the offending value; the rest says what was
expected and what to do.
"""

from __future__ import annotations


class ReshardError(Exception):
    """The root of every error this package raises on purpose."""


class UsageError(ReshardError, ValueError):
    """An argument that is not valid."""


class MissingExtraError(UsageError, ImportError):
    """An optional dependency is needed and not installed."""


class LayoutError(ReshardError, ValueError):
    """A description of a layout that cannot be."""


class MeshError(LayoutError):
    """A device mesh that cannot be: sizes, names, devices or sub-axes."""


class RuleError(LayoutError):
    """A cut rule that does not fit the length or the number of parts it is given."""


class SpecError(LayoutError):
    """A sharding that cannot be: an axis used twice, a wrong number of dimensions."""


class NotationError(LayoutError):
    """Text that is not a sharding, a rule, a mesh or a saved plan."""


class PlanError(ReshardError, ValueError):
    """Two layouts that cannot be planned, or a plan that does not do what it says."""


class ShardError(ReshardError, ValueError):
    """Arrays that do not fit their layout."""


class ArrayIndexError(ReshardError, IndexError):
    """An index that an array has no elements at. Iteration ends by it, as for any sequence."""


class RecipeError(ReshardError, ValueError):
    """A recipe or a rule that cannot be applied to these tensors."""


class UncomputableError(RecipeError):
    """A cut that ranks could not compute with: heads that do not go, parts that do not fit."""


class UnmatchedError(RecipeError):
    """Tensors that no rule or recipe decides."""


class CheckpointError(ReshardError):
    """A checkpoint on disk that cannot be used."""


class FormatError(CheckpointError, ValueError):
    """A file whose bytes are not what its format promises."""


class UnreadableTensorError(FormatError):
    """A tensor of a kind that cannot be read, in a checkpoint whose other tensors can be."""


class CoverageError(CheckpointError, ValueError):
    """Shards of one tensor that overlap, disagree, or leave part of it out."""


class DigestError(CheckpointError):
    """Bytes that are not the bytes that were written."""


class RunError(ReshardError):
    """A failure while running. The source and any earlier target are untouched."""


class SourceChangedError(RunError):
    """A source file that is not what it was when the run began."""


class LinkError(RunError):
    """Jobs that cannot meet, or lose each other."""


class InterruptedRunError(RunError):
    """Stopped by the user; the same command continues where it stopped."""
