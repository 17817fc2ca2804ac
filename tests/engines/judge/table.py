"""The page of models, docs/models.md: its tables are made from the records.

`python -m engines.judge.table` writes it, with `src` and `tests` on the path, and the words of
refusals into the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engines.known_differences import KNOWN
from engines.layout_records import GOLDEN, families_of

from .records import load_records, replay_case, write_record

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

Record = dict[str, Any]


def _list_parallelisms(record: Record) -> list[str]:
    found = dict.fromkeys(name for case in record["cases"] for name in case["verdicts"])
    return [*found]


def _count_equal(record: Record, parallelism: str) -> tuple[int, int]:
    """How many cases compute the same at a parallelism, and how many there are."""
    verdicts = [case["verdicts"][parallelism] for case in record["cases"]]
    return sum("equal" in verdict for verdict in verdicts), len(verdicts)


def _mark(record: Record, parallelism: str, text: str) -> str:
    equal, cases = _count_equal(record, parallelism)
    return text + ("" if equal == cases else "*" if equal else "")


def _join(words: Iterable[str]) -> str:
    return ", ".join(words)


def _list_engines() -> dict[str, str]:
    """For each model type, the engines whose real ranks hold what its recipe cuts, and where."""
    found: dict[str, dict[str, list[str]]] = {}
    for engine in ("vllm", "transformers"):
        for family in families_of(engine):
            record = json.loads((GOLDEN / engine / f"{family}.json").read_text())
            kind = record["config"]["model_type"]
            # Its plans leave more whole than recipes do, so one mesh is compared.
            meshes = [text for text in record["layouts"] if engine == "vllm" or text == "tp=2"]
            listed = found.setdefault(kind, {}).setdefault(engine, [])
            listed += [text for text in meshes if text not in listed]
    return {
        kind: "; ".join(
            f"{engine} {_join(f'`{text}`' for text in meshes)}"
            for engine, meshes in by_engine.items()
        )
        for kind, by_engine in found.items()
    }


def list_of_known() -> str:
    """What engines do otherwise, a line each."""
    return "\n".join(
        f"- {one.engine}, {'all models' if one.families == '*' else f'`{one.families}`'}: "
        f"{_join(f'`{pattern}`' for pattern in one.patterns)}: {one.reason}."
        for one in KNOWN
    )


def table_of_models(records: dict[str, Record]) -> str:
    """One row a family: where its shards compute what the whole model computes."""
    lines = ["| model | `model_type` | recipe | `tp` | with others | refused | engines |"]
    lines.append("|---|---|---|---|---|---|---|")
    engines = _list_engines()
    for name, record in records.items():
        sizes, others, refused = [], [], []
        for parallelism in _list_parallelisms(record):
            alone = re.fullmatch(r"tp=(\d+)", parallelism)
            if _count_equal(record, parallelism)[0]:
                into, text = (sizes, alone[1]) if alone else (others, f"`{parallelism}`")
                into.append(_mark(record, parallelism, text.replace("|", "\\|")))
            else:
                refused.append(f"`{parallelism}`".replace("|", "\\|"))
        kinds = dict.fromkeys(case["config"]["model_type"] for case in record["cases"])
        lines.append(
            f"| {name} | {_join(f'`{kind}`' for kind in kinds)} | `{record['recipe']}` "
            f"| {' '.join(sizes)} | {_join(others)} | {_join(refused)} "
            f"| {'; '.join(engines[kind] for kind in kinds if kind in engines)} |"
        )
    return "\n".join(lines)


def list_of_refusals(records: dict[str, Record]) -> str:
    """One refusal of each kind, as the command says it, and how many models have such a one."""
    examples: dict[str, str] = {}
    models: dict[str, set[str]] = {}
    for name, record in records.items():
        for case in record["cases"]:
            for parallelism, verdict in case["verdicts"].items():
                if "refused" in verdict:
                    # Of one kind are those that differ in names and numbers alone.
                    reason = verdict["refused"].partition(". ")[0]
                    words = re.findall(r"(?<![\w.])[a-z]+(?![\w.\[])", reason.partition(" (and")[0])
                    kind = " ".join(words)
                    examples.setdefault(kind, f"{name} at `{parallelism}`: {reason}.")
                    models.setdefault(kind, set()).add(name)
    return "\n".join(
        f"- {example} (So or alike: {len(models[kind])} of {len(records)} models.)"
        for kind, example in sorted(examples.items(), key=lambda pair: -len(models[pair[0]]))
    )


def list_of_differences(records: dict[str, Record]) -> str:
    """Where a family's recipe and transformers' plan differ, a line each."""
    lines: list[str] = []
    none = [name for name, record in records.items() if record["differs_from_plan"] is None]
    for name, record in records.items():
        lines += [f"- {name}: {line}" for line in record["differs_from_plan"] or ()]
    if none:
        lines.append(f"\nWithout a plan: {_join(none)}.")
    return "\n".join(lines)


def fill_in(page: str, records: dict[str, Record]) -> str:
    """The page with its tables made from the records."""
    for mark, make in (
        ("models", table_of_models),
        ("refusals", list_of_refusals),
        ("differences", list_of_differences),
        ("known", lambda _: list_of_known()),
    ):
        begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        assert found and closed, f"{PAGE.name} lacks the marks of {mark}"
        page = f"{before}{begin}\n\n{make(records)}\n\n{end}{after}"
    return page


def renew_refusals(records: dict[str, Record]) -> None:
    """Write refusals into the records, which takes no engine; what computes is judged again."""
    for name, record in records.items():
        for case in record["cases"]:
            for parallelism in case["verdicts"]:
                found = replay_case(case, parallelism)
                if "refused" in found:
                    case["verdicts"][parallelism] = found
        write_record(name, record)


if __name__ == "__main__":
    all_records = load_records()
    renew_refusals(all_records)
    PAGE.write_text(fill_in(PAGE.read_text(), all_records))
