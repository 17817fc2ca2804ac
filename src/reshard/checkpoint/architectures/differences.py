"""Differences between tensors and those that a model class loads."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorDifferences:
    """Differences between the tensors of a checkpoint and those that a model class loads.

    Attributes:
        judge: the class and the program, such as `LlamaForCausalLM of transformers 5.24.0`.
        missing: tensors that the class has and the checkpoint lacks, with their shapes; None for a
            shape that depends on others.
        unknown: tensors of the checkpoint that the class does not load.
        misshapen: tensors of another shape: the name, the shape, and the shape of the class.
        ignored: tensors that the class leaves out by its own lists, or that another class of the
            same model type has.
    """

    judge: str
    missing: tuple[tuple[str, Shape | None], ...] = ()
    unknown: tuple[str, ...] = ()
    misshapen: tuple[tuple[str, Shape, Shape], ...] = ()
    ignored: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unknown or self.misshapen)
