"""Layers of DeepSpeed's pipelines: a file each, whose names are those within the layer.

In the whole model a tensor has the number of its layer before its name. A layer that stands at
several places of the pipeline (`TiedLayerSpec`) has a file for each, and one name::

    layer_00-model_00-model_states.pt   weight          tied_modules.embed.weight
    layer_01-model_00-model_states.pt   weight, bias    1.weight, 1.bias
    layer_02-model_00-model_states.pt   weight          tied_modules.embed.weight
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.checkpoint.formats.torch_files.values import ArchivedTensor

_TIED = "tied_modules."


def name_layer(
    layer: int, tensors: Mapping[str, ArchivedTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ArchivedTensor]:
    """The tensors of a layer by their names in the whole model, whose parameters have `shapes`.

    One that the optimizer has under no such name is a tied layer's, where only one fits.
    """
    found = {}
    for name, archived in tensors.items():
        own = f"{layer}.{name}"
        if own not in shapes:
            tied = [
                other
                for other, shape in shapes.items()
                if other.startswith(_TIED)
                and other.removeprefix(_TIED).partition(".")[2] == name
                and shape == archived.shape
            ]
            own = tied[0] if len(tied) == 1 else own
        found[own] = archived
    return found
