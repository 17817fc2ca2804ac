"""Verdicts: a family judged at every parallelism."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from reshard.errors import RecipeError
from reshard.recipes import Recipe, choose_recipe

from .family import Family
from .modules import InDouble, RankModule, make_model, randomize
from .names import compare_names, pair_names
from .plans import explain_differences
from .ranks import Meeting
from .records import digest_of, write_shapes
from .shards import Array, CutModel, JudgeError, assign_case, parse_parallelism

# Of the largest logit. Everything is computed in float64; sums over ranks run in another order.
TOLERANCE = 1e-9

Tamper = Callable[[CutModel], None]


@dataclass(frozen=True)
class Case:
    """One whole model: what is compared with."""

    family: Family
    model: nn.Module
    inputs: dict[str, Any]
    expected: list[torch.Tensor]
    # As config.json and the checkpoint have them.
    config: dict[str, Any]
    tensors: dict[str, Array]
    # The same tensors under the names of the Hub's checkpoints.
    hub: dict[str, Array]

    @property
    def has_other_names(self) -> bool:
        """Whether the Hub's checkpoints have other names or shapes."""
        return write_shapes(self.hub) != write_shapes(self.tensors)

    @cached_property
    def renamed(self) -> dict[str, str] | None:
        """The Hub's name of each tensor, where its checkpoints only have other names."""
        return pair_names(self.tensors, self.hub)

    @property
    def recipe(self) -> Recipe:
        recipe = choose_recipe(self.config)
        if recipe is None:
            raise JudgeError(f"no recipe is for {self.config.get('model_type')!r}")
        return recipe


def flatten(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def make_case(family: Family, values: Mapping[str, Any]) -> Case:
    """The whole model of a config, with random weights, and what it computes."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    known = {key: value for key, value in values.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(values["model_type"], **known)
    model = make_model(family, config)
    randomize(model, generator)
    family.dense(model)
    inputs = family.inputs(config, generator)
    with torch.no_grad(), InDouble():
        expected = flatten(family.outputs(model(**inputs, use_cache=False)))
    for one in expected:
        assert one.isfinite().all() and one.std() > 1e-3, "logits of nothing"
    saved, tensors = save_and_read(model, original=False)
    _, hub = save_and_read(model, original=True)
    return Case(family, model, inputs, expected, saved, tensors, hub)


def save_and_read(model: Any, original: bool) -> tuple[dict[str, Any], dict[str, Array]]:
    """The config.json and the tensors of a checkpoint that transformers writes."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_original_format=original)
        tensors: dict[str, Array] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors.update(load_file(file))
        return json.loads((Path(folder) / "config.json").read_text()), tensors


def cut_case(case: Case, parallelism: str, tensors: dict[str, Array]) -> CutModel:
    """The shards of a case's tensors. Raises RecipeError where the recipe refuses."""
    mesh, options = parse_parallelism(parallelism)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assignment = assign_case(case.recipe, parallelism, case.config, shapes)
    if assignment.unknown:
        raise JudgeError(f"no rule matches {list(assignment.unknown)}")
    return CutModel(mesh, case.recipe.with_options(options), assignment, tensors)


def compute(case: Case, cut: CutModel) -> float:
    """How far the ranks' outputs are from the whole model's, in parts of its largest.

    Raises JudgeError where a rank cannot compute.
    """
    meeting = Meeting(cut.coordinates, cut.compute_axes)
    try:
        modules = [
            RankModule(case.family, case.model.config, cut, rank, meeting)
            for rank in range(len(cut.coordinates))
        ]
        answers = meeting.run(lambda rank: flatten(modules[rank].run(case.inputs)))
    except (RuntimeError, IndexError, ValueError, ArithmeticError) as error:
        # Sizes that do not go together inside of a module.
        raise JudgeError(f"a rank cannot compute: {error!r}") from error
    if unused := set.intersection(*(module.unused for module in modules)):
        raise JudgeError(f"no module used {sorted(unused)}")
    worst = 0.0
    for answer in answers:
        for found, expected in zip(answer, case.expected, strict=True):
            if found.shape != expected.shape:
                raise JudgeError(f"outputs of {list(found.shape)}, expected {list(expected.shape)}")
            difference = (found - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(torch.nan_to_num(difference, nan=float("inf"))))
    return worst


def judge(case: Case, parallelism: str, tamper: Tamper | None = None) -> dict[str, Any]:
    """The verdict at one parallelism, as the record has it.

    Raises:
        JudgeError: the ranks do not compute what the whole model computes.
    """
    try:
        cut = cut_case(case, parallelism, case.tensors)
    except RecipeError as error:
        return {"refused": str(error)}
    if tamper is not None:
        tamper(cut)
    difference = compute(case, cut)
    if difference > TOLERANCE:
        raise JudgeError(f"outputs differ by {difference:.1e} of the largest")
    verdict: dict[str, Any] = {"equal": True, "layouts": digest_of(cut.assignment)}
    if case.has_other_names:
        # A RecipeError here is a failure: one name goes, the other does not.
        hub = cut_case(case, parallelism, case.hub)
        compare_names(case.family, case.model.config, cut, hub, case.renamed)
        verdict["hub_layouts"] = digest_of(hub.assignment)
    return verdict


def judge_family(family: Family) -> tuple[dict[str, Any], list[str]]:
    """The record of a family, and what is wrong with it."""
    cases, failures = [], []
    for values in family.configs():
        case = make_case(family, values)
        verdicts = {}
        for parallelism in family.parallelisms:
            try:
                verdicts[parallelism] = judge(case, parallelism)
            except (JudgeError, RecipeError) as error:
                failures.append(f"case {len(cases)} at {parallelism}: {error}")
        shapes = {"shapes": write_shapes(case.tensors)}
        if case.has_other_names:
            shapes["hub_shapes"] = write_shapes(case.hub)
        cases.append({"config": case.config, **shapes, "verdicts": verdicts})
    plan, wrong = compare_plan(case)
    failures += wrong
    record = {
        "family": family.name,
        "recipe": case.recipe.name,
        "class": type(case.model).__name__,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "differs_from_plan": plan,
        "cases": cases,
    }
    return record, failures


def compare_plan(case: Case) -> tuple[list[str] | None, list[str]]:
    """Differences from transformers' plan, at the first size of tp that goes."""
    for size in range(2, 6):
        try:
            cut = cut_case(case, f"tp={size}", case.tensors)
        except RecipeError:
            continue
        return explain_differences(case.family, case.model, cut)
    return None, [f"tp=2 to 5 are refused for the last case of {case.family.name}"]
