"""Names: the checkpoint that the Hub has, where transformers calls its parameters something else.

transformers stacks experts, renames and fuses when it loads, and undoes it when it saves. Where it
only renames, each rank's shards must be the same under both names. Else each
rank's shards under the Hub's names, with numbers of experts counted on the rank, must load into
the rank's module as the shards under transformers' own names.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .family import Family
from .modules import local_config, matches_any
from .shards import Array, Coordinate, CutModel, JudgeError


def number_on_rank(cut: CutModel, coordinate: Coordinate) -> dict[str, str]:
    """For each tensor at a coordinate its name there: experts are counted from 0."""
    held = [
        name for name, pieces in cut.pieces.items() if any(at == coordinate for at, _ in pieces)
    ]
    numbers = {
        name: {
            what: number
            for what, number in (cut.assignment.matched[name].numbers_in(name) or {}).items()
            if what not in cut.numbers_of_stages
        }
        for name in held
    }
    there: dict[str, set[int]] = {}
    for found in numbers.values():
        for what, number in found.items():
            there.setdefault(what, set()).add(number)
    places = {
        what: {number: place for place, number in enumerate(sorted(found))}
        for what, found in there.items()
    }
    return {
        name: cut.assignment.matched[name].with_numbers(
            name, {what: places[what][number] for what, number in numbers[name].items()}
        )
        for name in held
    }


def tensors_of(cut: CutModel, coordinate: Coordinate) -> dict[str, Array]:
    """All that the stages of a coordinate hold, under its own names."""
    return {
        local: np.array(
            next(p.array for (at, _), p in cut.pieces[name].items() if at == coordinate)
        )
        for name, local in number_on_rank(cut, coordinate).items()
    }


def load_shards(family: Family, config: Any, tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The state dict of a rank's module after transformers has loaded its shards.

    Parameters that no key of the config makes smaller cannot be loaded so, and are left out.
    """
    import transformers
    from safetensors.numpy import save_file

    auto = getattr(transformers, family.auto)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(tensors), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        # Looked for by models that generate.
        (Path(folder) / "generation_config.json").write_text("{}")
        try:
            model, found = auto.from_pretrained(
                folder,
                config=config,
                dtype=torch.float64,
                output_loading_info=True,
                ignore_mismatched_sizes=bool(family.sized_by_shard or family.whole),
            )
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise JudgeError(f"transformers cannot load a rank's shards: {error!r}") from error
    mismatched = {key[0] for key in found.pop("mismatched_keys", ())}
    whole = [f"{glob}.*" for globs in family.whole.values() for glob in globs]
    odd = {n for n in mismatched if not matches_any(n, (*family.sized_by_shard, *whole))}
    wrong = {key: sorted(map(str, found[key])) for key in found if found[key]}
    if wrong or odd:
        raise JudgeError(f"transformers cannot load a rank's shards: {wrong or sorted(odd)}")
    return {name: one for name, one in model.state_dict().items() if name not in mismatched}


def pair_names(own: Mapping[str, Array], hub: Mapping[str, Array]) -> dict[str, str] | None:
    """The Hub's name of each tensor; None where some tensor is no tensor there.

    The tensors of a judged model are random, so that equal ones are the same.
    """
    by_bytes = {(tensor.shape, tensor.tobytes()): name for name, tensor in hub.items()}
    found = {name: by_bytes.get((tensor.shape, tensor.tobytes())) for name, tensor in own.items()}
    pairs = {name: there for name, there in found.items() if there is not None}
    return pairs if len(set(pairs.values())) == len(own) == len(hub) else None


def compare_names(
    family: Family, whole: Any, own: CutModel, hub: CutModel, pairs: Mapping[str, str] | None
) -> None:
    """Compare each rank's shards under transformers' names with those of the Hub's names.

    Args:
        family: of the model.
        whole: the whole model's config.
        own: cut under transformers' names.
        hub: cut under the Hub's names.
        pairs: the Hub's name of each tensor, where the names alone differ.

    Raises:
        JudgeError: shards that transformers cannot load, or that are others.
    """
    if pairs is not None:
        for name, there in pairs.items():
            if own.assignment.layouts[name] is not hub.assignment.layouts[there]:
                raise JudgeError(f"{name} and {there} are the same tensor, cut in two ways")
        return
    for coordinate in own.coordinates:
        config = local_config(family, whole, own, coordinate)
        theirs = tensors_of(hub, coordinate)
        loaded = load_shards(family, config, theirs)
        for name, shard in tensors_of(own, coordinate).items():
            if name not in {*loaded, *theirs}:
                # What has the whole model's number, under another name, and is not cut.
                continue
            found = loaded[name].numpy() if name in loaded else theirs.get(name)
            # What transformers keeps in 32 bits is rounded where it is loaded.
            if found is None or not np.array_equal(found, shard.astype(found.dtype)):
                raise JudgeError(
                    f"{name} at {coordinate} of {own.compute_axes} is not what the shards under "
                    "the Hub's names make of it"
                )
