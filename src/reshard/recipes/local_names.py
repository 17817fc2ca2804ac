"""Local names: what a rank calls its tensors when it counts its own layers and experts from 0.

A recipe deals layers to pipeline stages and experts to expert ranks, by their numbers in the whole
model. A module on one rank often has only its own, counted from 0::

    stage 1 of 2, layers 16 to 31       model.layers.0.mlp.up_proj.weight
                                    is  model.layers.16.mlp.up_proj.weight

On each rank, the numbers of what it holds are counted in their order.
"""

from __future__ import annotations

from reshard.recipes.assignment import Assignment


def local_names(assignment: Assignment, rank: int) -> dict[str, str]:
    """For each tensor that a rank holds, what the rank calls it.

    Args:
        assignment: of the whole model.
        rank: in the layouts.

    >>> from reshard.mesh import DeviceMesh
    >>> from reshard.recipes.assignment import assign
    >>> from reshard.recipes.library import load_recipe
    >>> shapes = {f"model.layers.{i}.input_layernorm.weight": (4,) for i in range(4)}
    >>> config = {"num_hidden_layers": 4}
    >>> found = assign(shapes, DeviceMesh.of(pp=2), (), load_recipe("llama"), config)
    >>> local_names(found, 1)["model.layers.2.input_layernorm.weight"]
    'model.layers.0.input_layernorm.weight'
    """
    held = [
        name
        for name, layout in assignment.layouts.items()
        if rank < layout.slots and layout.cells_of(rank)
    ]
    rules = {name: assignment.matched[name] for name in held if name in assignment.matched}
    numbers = {name: rule.numbers_in(name) or {} for name, rule in rules.items()}
    places: dict[str, dict[int, int]] = {}
    for what in {what for found in numbers.values() for what in found}:
        of_rank = sorted({found[what] for found in numbers.values() if what in found})
        places[what] = {number: place for place, number in enumerate(of_rank)}
    names = {}
    for name in held:
        local = {what: places[what][number] for what, number in numbers.get(name, {}).items()}
        names[name] = rules[name].with_numbers(name, local) if name in rules else name
    return names
