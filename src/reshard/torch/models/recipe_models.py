"""Models with plain tensors, and the layouts of a recipe.

A module of an inference engine or of a trainer's pipeline stage has plain tensors. A recipe
specifies the layouts of the full tensors (`reshard.recipes.assignment`):

1. the module's own names become the recipe's (`naming`). A fused parameter concatenates its
   members' parts of this rank, as engines build it::

       qkv_proj here    | q q q q | k k | v v |    queries of this rank, keys of this rank, ...

2. if a rank counts its layers and experts from 0, they get their numbers in the full model;
3. each tensor has the recipe's layout. A tensor that is not among the shapes is replicated.

Such a model is `{name: (tensor, Layout)}`, which `refit` accepts on either side.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from reshard.errors import ReshardError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.recipes.assignment import Assignment, assign
from reshard.recipes.naming import Fusion
from reshard.recipes.recipe import Recipe
from reshard.recipes.rules import Rule
from reshard.torch.models.model_inputs import LayoutModel, tensors_of
from reshard.torch.models.naming import Naming, resolve_name


def by_recipe(
    model: torch.nn.Module | Mapping[str, torch.Tensor] | None,
    mesh: DeviceMesh,
    shapes: Mapping[str, Sequence[int]],
    recipe: Recipe | None = None,
    rules: Sequence[Rule] = (),
    config: Mapping[str, object] | None = None,
    *,
    naming: Naming | None = None,
    counts_from_zero: bool = False,
    first_rank: int = 0,
    allow: Iterable[str] = (),
) -> LayoutModel:
    """Combine the tensors of a model that has no sharding information with the layouts of a recipe.

    Args:
        model: of this rank, with the parts that the mesh assigns to it. None if it has none.
        mesh: the ranks of the model, with the axes `tp`, `fsdp`, `ep`, `etp`, `pp`, `dp`, as far as
            they exist.
        shapes: of the full tensors, by the recipe's names, for example from an unsharded module on
            the meta device.
        recipe, rules, config: see `reshard.recipes.assignment.assign`.
        naming: maps the model's names to the recipe's, such as `recipe.naming("vllm", config)`.
        counts_from_zero: whether each rank numbers its layers and experts from 0.
        first_rank: the rank of this process's job that is rank 0 of the mesh. The refit then needs
            no offset.
        allow: see `reshard.recipes.assignment.assign`.

    Returns:
        `{name: (tensor, Layout)}`. Errors, such as rules that do not match, or a fused parameter
        whose members are in groups, are in its `problems`: they may occur on one rank only, so the
        refit raises them on all ranks.
    """
    result = LayoutModel(first_rank)
    result.module = model if isinstance(model, torch.nn.Module) else None
    try:
        whole = {name: _shape(name, shape) for name, shape in shapes.items()}
        assignment = assign(whole, mesh, rules, recipe, config, allow=allow)
        rank = dist.get_rank() - first_rank
        _lay(result, model, assignment, naming, counts_from_zero, rank)
    except ReshardError as error:
        result.problems.append(str(error))
    except Exception as error:
        # Report errors of user functions, or an invalid mesh, since the other ranks wait.
        result.problems.append(f"{type(error).__name__}: {error}")
    return result


def _lay(
    result: LayoutModel,
    model: torch.nn.Module | Mapping[str, torch.Tensor] | None,
    assignment: Assignment,
    naming: Naming | None,
    counts_from_zero: bool,
    rank: int,
) -> None:
    layouts = assignment.layouts
    names: dict[str, str] = {}
    if counts_from_zero and rank >= 0:
        names = {local: name for name, local in assignment.local_names(rank).items()}
    result.update({name: (None, layout) for name, layout in layouts.items()})
    for own_name, tensor in tensors_of(model) if model is not None else ():
        for local_name, part in _parts(own_name, tensor, naming, names, layouts, rank):
            name = names.get(local_name, local_name)
            if name in layouts and local_name not in names and counts_from_zero:
                # It must not be mistaken for the tensor of this name in the full model.
                name = f"{local_name} of a rank that should have none"
            other = result.own_names.setdefault(name, own_name)
            if other != own_name:
                result.problems.append(
                    f"{name}: the name of two tensors of the model, {other!r} and {own_name!r}"
                )
            result[name] = (part, layouts[name]) if name in layouts else part


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise UsageError(f"shape {shape!r} of {name!r}; give the whole tensor's sizes, from 0 up")
    return sizes


def _parts(
    own_name: str,
    tensor: torch.Tensor,
    naming: Naming | None,
    names: Mapping[str, str],
    layouts: Mapping[str, Layout],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a tensor of the model stands for, by the recipe's names."""
    resolved = resolve_name(own_name, naming)
    if isinstance(resolved, str):
        yield resolved, tensor
        return
    sizes = list(_sizes(resolved, names, layouts, rank, own_name))
    # Split only a tensor that is as long as its members together.
    is_cut = isinstance(tensor, torch.Tensor) and tensor.ndim > resolved.dimension
    if not is_cut or sum(sizes) != tensor.shape[resolved.dimension]:
        # The refit reports the expected name and shape on all ranks.
        yield from ((member, tensor) for member in resolved.members)
        return
    yield from zip(resolved.members, tensor.split(sizes, resolved.dimension), strict=True)


def _sizes(
    fusion: Fusion,
    names: Mapping[str, str],
    layouts: Mapping[str, Layout],
    rank: int,
    own_name: str,
) -> Iterator[int]:
    """Yield the size of each member in a fused tensor of this rank."""
    if fusion.stacked or fusion.transposed:
        raise UsageError(
            f"{own_name!r} is a stack, or has transposed members, {list(fusion.members)}; a module "
            "with a recipe has neither. Give it by names that are not fused"
        )
    if fusion.groups != 1:
        raise UsageError(
            f"{own_name!r} has its members in {fusion.groups} groups; a module with a recipe has "
            "each in one piece. Give this one as MegatronModel, or with its Layout"
        )
    for member in fusion.members:
        layout = layouts.get(names.get(member, member))
        shape = None if layout is None or not 0 <= rank < layout.slots else layout.local_shape(rank)
        yield shape[fusion.dimension] if shape and len(shape) > fusion.dimension else 0
