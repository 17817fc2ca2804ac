"""Records of a model type, made of what was found in its probes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.architectures.fitting import OPEN, Fitter
from engines.architectures.probing import Classes, Probe
from reshard.checkpoint.architectures.records import is_closed, list_row

FOLDER = Path(__file__).parents[3] / "src/reshard/checkpoint/architectures/recorded"
Row = list[Any]
Shapes = Mapping[str, tuple[int, ...]]


def make_record(classes: Classes, probes: Sequence[Probe], version: str) -> dict[str, Any]:
    """The record of a model type, as `reshard.checkpoint.architectures.records` reads it."""
    counts = Counter(name for one in probes for name in one.forms)
    rows: list[Row] = []
    of_classes: dict[str, Any] = {}
    # The class with most probes first: the others have most of its tensors.
    for name in sorted(counts, key=lambda one: (-counts[one], one)):
        used = [one for one in probes if name in one.forms]
        found = _record_class(name, used, rows, classes.base_prefix)
        found["ignored"] = classes.ignored.get(name, [])
        of_classes[name] = found
    words = {*re.findall(r"[A-Za-z_][\w.]*", json.dumps(rows))}
    kinds: dict[str, set[str]] = {}
    for one in probes:
        for key, value in one.keys.items():
            if key.endswith("_config.model_type"):
                kinds.setdefault(key, set()).add(value)
    return {
        "transformers": version,
        "prefix": classes.base_prefix,
        "defaults": {key: value for key, value in classes.defaults.items() if key in words},
        "types": {key: next(iter(values)) for key, values in kinds.items() if len(values) == 1},
        "rows": rows,
        "classes": of_classes,
    }


def write_record(model_type: str, record: Mapping[str, Any]) -> None:
    """Write a record, a row a line."""
    lines = [f' "{key}": {json.dumps(record[key])},' for key in ("transformers", "prefix")]
    lines += [f' "{key}": {json.dumps(record[key])},' for key in ("defaults", "types")]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    own = ",\n".join(f'  "{name}": {json.dumps(one)}' for name, one in record["classes"].items())
    text = "\n".join(("{", *lines, ' "rows": [', rows, " ],", ' "classes": {', own, " }", "}"))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{model_type}.json").write_text(text + "\n")


def _record_class(name: str, probes: Sequence[Probe], rows: list[Row], prefix: str) -> Any:
    configs = [nest(one.keys) for one in probes]
    forms = []
    for number in range(max(len(one.forms[name]) - 1 for one in probes)):
        shapes = [one.forms[name][min(number, len(one.forms[name]) - 2)] for one in probes]
        forms.append(_record_form(probes, configs, shapes, rows, prefix))
    if forms[-1] == forms[0]:
        forms = forms[:1]
    ties = {
        (_as_pattern(target), _as_pattern(source))
        for one in probes
        for target, source in one.forms[name][-1].items()
    }
    return {"forms": forms, "ties": sorted(map(list, ties))}


def _record_form(
    probes: Sequence[Probe],
    configs: Sequence[Mapping[str, Any]],
    shapes: Sequence[Shapes],
    rows: list[Row],
    prefix: str,
) -> list[int]:
    """The numbers of the rows of a form; rows that no other class has are added."""
    left = [dict(one) for one in shapes]
    found = []
    for row in [*rows]:
        for pattern in sorted({row[0], f"{prefix}.{row[0]}", row[0].removeprefix(f"{prefix}.")}):
            own = [pattern, *row[1:]]
            is_here = is_closed(own) and any(_matching(own, one) for one in left)
            if is_here and _agrees(own, configs, left):
                found.append(_number(own, rows))
                left = [_without(own, one) for one in left]
                break
    if any(left):
        fitted = Fitter(configs, left, [one.keys for one in probes]).fit()
        for pattern, one in fitted.items():
            own = [pattern, one["counts"], one["shape"], one["when"]]
            if is_closed(own) and not _agrees(own, configs, left):
                own[3] = OPEN
            found.append(_number(own, rows))
    return sorted({*found})


def _number(row: Row, rows: list[Row]) -> int:
    if row not in rows:
        rows.append(row)
    return rows.index(row)


def _matching(row: Row, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    pattern = re.compile(r"\d+".join(map(re.escape, row[0].split("*"))))
    return {name: shape for name, shape in shapes.items() if pattern.fullmatch(name)}


def _without(row: Row, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    there = _matching(row, shapes)
    return {name: shape for name, shape in shapes.items() if name not in there}


def _agrees(row: Row, configs: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> bool:
    pairs = zip(configs, shapes, strict=True)
    return all(list_row(row, config) == _matching(row, one) for config, one in pairs)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A config of dotted keys, nested."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, key = path.split(".")
        part: Any = found
        for parent in parents:
            part = part.setdefault(parent, {}) if isinstance(part, dict) else None
        if isinstance(part, dict):
            part[key] = value
    return found


def _as_pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
