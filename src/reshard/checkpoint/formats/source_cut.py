"""How the tensors of a source are cut, where its files do not say: by a mesh and rules.

Files of ranks with plain tensors are such sources. A mesh of the ranks that wrote them, and rules
or a recipe, say which part of a tensor each rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import UsageError
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import assign
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.sharding import ShardingSpec


@dataclass(frozen=True)
class SourceCut:
    """A mesh of the source's ranks, and rules or a recipe for its tensors.

    Attributes:
        mesh: of the ranks that wrote the files.
        rules: by hand; they come before the recipe's.
        recipe: of the model, or None.
        config: the model's config.json, for a recipe.

    Raises:
        UsageError: a mesh without rules and recipe.
    """

    mesh: DeviceMesh
    rules: tuple[Rule, ...] = ()
    recipe: Recipe | None = None
    config: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.rules and self.recipe is None:
            raise UsageError(
                f"a source's mesh {self.mesh.text} without rules; give some, such as '*=tp, -', or "
                "a recipe"
            )

    def __str__(self) -> str:
        rules = "; ".join(map(str, self.rules))
        recipe = "" if self.recipe is None else f" by the recipe {self.recipe.name}"
        return f"{self.mesh.text}: {rules}{recipe}"

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh | str,
        rules: Iterable[Rule | str] = (),
        recipe: Recipe | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> SourceCut:
        """The same from texts.

        >>> print(SourceCut.of("tp=2", ["*=tp, ..."]).find_shardings({"w": (8, 4)})["w"])
        tp, -
        """
        if isinstance(rules, str):
            raise UsageError(f"rules {rules!r}; give a list of them")
        parsed = tuple(rule if isinstance(rule, Rule) else Rule.parse(rule) for rule in rules)
        found = mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.parse(mesh)
        return cls(found, parsed, recipe, config)

    def find_shardings(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ShardingSpec]:
        """The sharding of each tensor of these shapes.

        Raises:
            RecipeError: rules that do not fit, or match not all of them.
        """
        found = assign(
            shapes, self.mesh, self.rules, self.recipe, self.config, allow=["uncomputable"]
        )
        return {name: found.specs[name] for name in shapes}
