"""Models without layouts of their own, cut by the recipe of a known kind of model.

A module of an inference engine, or of a trainer's pipeline stage, has plain tensors. A recipe says
how the whole tensors are cut (`reshard.recipes.assignment`), and where each is here:

1. the module's own names become the recipe's (`naming`). A fused parameter is its members' parts
   of this rank, one after another, as engines build them::

       qkv_proj here    | q q q q | k k | v v |    queries of this rank, keys of this rank, ...

2. where a rank counts its layers and experts from 0, they get their numbers in the whole model;
3. each tensor has the recipe's layout. A tensor that is not among the shapes is whole here.

Such a model is `{name: (tensor, Layout)}`, which `refit` takes on either side.
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
from reshard.torch.models.given_models import LaidModel
from reshard.torch.models.module_memory import tensors_of
from reshard.torch.models.naming import Naming, meaning


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
) -> LaidModel:
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
    found = LaidModel(first_rank)
    found.module = model if isinstance(model, torch.nn.Module) else None
    try:
        whole = {name: _shape(name, shape) for name, shape in shapes.items()}
        assignment = assign(whole, mesh, rules, recipe, config, allow=allow)
        rank = dist.get_rank() - first_rank
        _lay(found, model, assignment, naming, counts_from_zero, rank)
    except ReshardError as error:
        found.problems.append(str(error))
    except Exception as error:
        # A function of the user's that gives names, or what is no mesh: the other ranks wait.
        found.problems.append(f"{type(error).__name__}: {error}")
    return found


def _lay(
    found: LaidModel,
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
    found.update({name: (None, layout) for name, layout in layouts.items()})
    for own_name, tensor in tensors_of(model) if model is not None else ():
        for local_name, part in _parts(own_name, tensor, naming, names, layouts, rank):
            name = names.get(local_name, local_name)
            if name in layouts and local_name not in names and counts_from_zero:
                # It must not pass for the tensor that has this name in the whole model.
                name = f"{local_name} of a rank that should have none"
            other = found.own_names.setdefault(name, own_name)
            if other != own_name:
                found.problems.append(
                    f"{name}: the name of two tensors of the model, {other!r} and {own_name!r}"
                )
            found[name] = (part, layouts[name]) if name in layouts else part


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(size) for size in shape)
    except TypeError:
        found = (-1,)
    if any(size < 0 for size in found):
        raise UsageError(f"shape {shape!r} of {name!r}; give the whole tensor's sizes, from 0 up")
    return found


def _parts(
    own_name: str,
    tensor: torch.Tensor,
    naming: Naming | None,
    names: Mapping[str, str],
    layouts: Mapping[str, Layout],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that one of the model's is, by the recipe's names as this rank counts."""
    means = meaning(own_name, naming)
    if isinstance(means, str):
        yield means, tensor
        return
    sizes = list(_sizes(means, names, layouts, rank, own_name))
    # Only a tensor that is as long as its members together is split into them.
    is_cut = isinstance(tensor, torch.Tensor) and tensor.ndim > means.dimension
    if not is_cut or sum(sizes) != tensor.shape[means.dimension]:
        # Told with the name and the shape that were expected, on all ranks, by the refit.
        yield from ((member, tensor) for member in means.members)
        return
    yield from zip(means.members, tensor.split(sizes, means.dimension), strict=True)


def _sizes(
    fusion: Fusion,
    names: Mapping[str, str],
    layouts: Mapping[str, Layout],
    rank: int,
    own_name: str,
) -> Iterator[int]:
    """How much of a fused tensor here each member has."""
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
