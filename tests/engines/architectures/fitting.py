"""Fits: shapes and presence of a class's tensors as functions of its config's keys.

Names that differ in numbers only are one pattern. For a pattern are found

1. how many there are along each number, as an expression of the config;
2. each dimension, as an expression;
3. on which conditions it is there, as terms that all hold, or that do not all hold.

Whatever no short expression gives is left open (`?`): such a tensor may be there or not, or have
any length. What is found is tried on other configs, and opened where it fails.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.checkpoint.architectures.records import find_number, holds

Shapes = Mapping[str, tuple[int, ...]]
Keys = Mapping[str, Any]
Point = tuple[int, tuple[int, ...]]
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
OPEN = "?"
_WIDTH = re.compile(r"(\w+\.)?(hidden_size|n_embd|d_model|dim|embed_dim)//")
_DIVIDES = re.compile("head|group|rank")


def split_name(name: str, fixed: Collection[str] = ()) -> tuple[str, tuple[int, ...]]:
    """A name's pattern and its numbers, but for those that stand behind one of `fixed`."""
    front, numbers, end = "", [], 0
    for found in _NUMBER.finditer(name):
        front += name[end : found.start()]
        end = found.end()
        if _NUMBER.sub("*", front) in fixed:
            front += found[0]
        else:
            front += "*"
            numbers.append(int(found[0]))
    return front + name[end:], tuple(numbers)


def _find_fixed(forms: Sequence[Shapes]) -> set[str]:
    """The fronts of patterns whose numbers are of parts of different kinds, not of equal ones.

    Of such numbers there are as many in all configs, and some pattern never has the number 0.
    """
    all_of: dict[str, set[frozenset[int]]] = {}
    by_pattern: dict[tuple[str, str], set[frozenset[int]]] = {}
    for shapes in forms:
        fronts: dict[str, set[int]] = {}
        patterns: dict[tuple[str, str], set[int]] = {}
        for name in shapes:
            pattern = _NUMBER.sub("*", name)
            parts = pattern.split("*")
            for at, value in enumerate(map(int, _NUMBER.findall(name))):
                front = "*".join(parts[: at + 1])
                fronts.setdefault(front, set()).add(value)
                patterns.setdefault((front, pattern), set()).add(value)
        for front, values in fronts.items():
            all_of.setdefault(front, set()).add(frozenset(values))
        for key, values in patterns.items():
            by_pattern.setdefault(key, set()).add(frozenset(values))
    return {
        front
        for (front, _), sets in by_pattern.items()
        if len({len(one) for one in all_of[front]}) < 3
        and max(map(len, all_of[front])) < 5
        and not any(0 in one for one in sets)
    }


class Fitter:
    """Fits the tensors of one class in one form, from the keys and shapes of many configs."""

    def __init__(
        self, configs: Sequence[Keys], forms: Sequence[Shapes], flat: Sequence[Keys]
    ) -> None:
        self.configs = configs
        self.flat = flat
        self.tensors: dict[str, dict[Point, tuple[int, ...]]] = {}
        fixed = _find_fixed(forms)
        for number, shapes in enumerate(forms):
            for name, shape in shapes.items():
                pattern, numbers = split_name(name, fixed)
                self.tensors.setdefault(pattern, {})[number, numbers] = shape
        self.counts: dict[str, str] = {}
        self._known: dict[tuple[tuple[int, int], ...], str | None] = {}
        self._integers = self._list_integers()

    def fit(self) -> dict[str, dict[str, Any]]:
        """The records of all patterns: counts, dimensions and conditions."""
        self._fit_counts()
        return {pattern: self._fit_pattern(pattern) for pattern in self.tensors}

    # Numbers.

    def _list_integers(self) -> dict[str, list[int | None]]:
        """Keys and alternatives that are whole numbers where they are defined."""
        names = {key for one in self.flat for key in one}
        found: dict[str, list[int | None]] = {}
        for key in [*sorted(names - {"num_labels"}), "num_labels"]:
            column = [one.get(key) for one in self.flat]
            kept = [v if isinstance(v, int) and not isinstance(v, bool) else None for v in column]
            lists = [len(v) if isinstance(v, list) else None for v in column]
            for text, values in ((key, kept), (f"{key}[]", lists)):
                if len({v for v in values if v is not None}) > 1:
                    found[text] = values
        return found

    def _fit_counts(self) -> None:
        """How many there are at each number of a pattern."""
        ranges: dict[str, dict[int, set[int]]] = {}
        for pattern, points in self.tensors.items():
            parts = pattern.split("*")
            for at in range(len(parts) - 1):
                front = "*".join(parts[: at + 1])
                for number, numbers in points:
                    ranges.setdefault(front, {}).setdefault(number, set()).add(numbers[at])
        for front, of_config in ranges.items():
            rows = sorted(of_config)
            if any(values != {*range(max(values) + 1)} for values in of_config.values()):
                # Such as adapters between layers: numbers with gaps.
                self.counts[front] = OPEN
                continue
            wanted = {row: max(of_config[row]) + 1 for row in rows}
            self.counts[front] = self._find_expression(wanted) or OPEN

    def _find_expression(self, wanted: Mapping[int, int]) -> str | None:
        """The shortest expression that has these values for these configs."""
        key = tuple(sorted(wanted.items()))
        if key not in self._known:
            self._known[key] = self._search(wanted)
        return self._known[key]

    def _search(self, wanted: Mapping[int, int]) -> str | None:
        rows = sorted(wanted)
        target = tuple(wanted[row] for row in rows)
        if len({*target}) == 1 and len(rows) < 3:
            return str(target[0])
        atoms: dict[str, tuple[int, ...]] = {}
        partial: dict[str, list[int | None]] = {}
        for text, values in self._integers.items():
            column = [values[row] for row in rows]
            if all(v is not None for v in column):
                atoms[text] = tuple(v for v in column if v is not None)
            elif any(v is not None for v in column):
                partial[text] = column
        if len({*target}) == 1:
            return str(target[0])
        for text, values in atoms.items():
            if values == target:
                return text
        # Alternatives of keys that configs leave out.
        rest = {**atoms}
        quotients = {
            f"{a}//{b}": tuple(x // y for x, y in zip(atoms[a], atoms[b], strict=True))
            for a, b in itertools.permutations(atoms, 2)
            if _DIVIDES.search(b) and all(atoms[b])
        }
        # The width of a head, where no key has it.
        rest |= {f"({text})": v for text, v in quotients.items() if _WIDTH.match(text)}
        scaled = {
            f"{c}*{a}": tuple(c * v for v in values)
            for a, values in atoms.items()
            for c in (2, 3, 4, 8)
        }
        for text, column in partial.items():
            for other, values in (*atoms.items(), *quotients.items(), *scaled.items()):
                mixed = tuple(
                    v if v is not None else w for v, w in zip(column, values, strict=True)
                )
                if mixed == target:
                    return f"{text}|{other}"
                if _DIVIDES.search(text) and "*" not in other:
                    rest[f"({text}|{other})"] = mixed
        divided = {
            f"{a}//{c}": tuple(v // c for v in values)
            for a, values in rest.items()
            for c in (2, 3, 4, 8, 16)
        }
        rounded = {f"({a}+15)//16": tuple((v + 15) // 16 for v in x) for a, x in rest.items()}
        shifted = {
            f"{a}+{c}": tuple(v + c for v in values)
            for a, values in rest.items()
            for c in (1, 2, 3)
        }
        lowered = {
            f"{a}-{c}": tuple(v - c for v in values) for a, values in rest.items() for c in (1, 2)
        }
        for group in (scaled, divided, quotients, rounded, shifted, lowered):
            for text, values in group.items():
                if values == target:
                    return text
        products = {}
        for a, b in itertools.combinations_with_replacement(rest, 2):
            values = tuple(x * y for x, y in zip(rest[a], rest[b], strict=True))
            products.setdefault(values, f"{a}*{b}")
        if target in products:
            return products[target]
        for values, text in products.items():
            for c in (2, 3, 4):
                if tuple(c * v for v in values) == target:
                    return f"{c}*{text}"
        terms = {values: text for text, values in reversed([*rest.items()])} | products
        for c, d in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (1, -1)):
            for values, text in terms.items():
                left = [t - c * v for t, v in zip(target, values, strict=True)]
                if d < 0:
                    left = [-v for v in left]
                if any(v % abs(d) or v < 0 for v in left):
                    continue
                other = terms.get(tuple(v // abs(d) for v in left))
                if other is not None:
                    sign = "-" if d < 0 else "+"
                    first = text if c == 1 else f"{c}*{text}"
                    second = other if abs(d) == 1 else f"{d}*{other}"
                    return f"{first}{sign}{second}"
        by_value = {values: text for text, values in reversed([*rest.items()])}
        # A product with a sum, such as (heads + 2 * kv_heads) * head_dim.
        for a, values in rest.items():
            if not all(v and t % v == 0 for t, v in zip(target, values, strict=True)):
                continue
            quotient = tuple(t // v for t, v in zip(target, values, strict=True))
            for c, d in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3)):
                for b, other in rest.items():
                    left = [t - c * v for t, v in zip(quotient, other, strict=True)]
                    if any(v % d or v < 0 for v in left):
                        continue
                    wanted_rest = tuple(v // d for v in left)
                    third = by_value.get(wanted_rest)
                    if third is not None:
                        first = b if c == 1 else f"{c}*{b}"
                        second = third if d == 1 else f"{d}*{third}"
                        return f"{a}*({first}+{second})"
        return None

    # Patterns.

    def _fit_pattern(self, pattern: str) -> dict[str, Any]:
        points = self.tensors[pattern]
        record: dict[str, Any] = {"shape": self._fit_shape(points)}
        parts = pattern.split("*")
        counts = [self.counts["*".join(parts[: at + 1])] for at in range(len(parts) - 1)]
        record["counts"] = counts
        if OPEN in counts:
            record["when"] = OPEN
            return record
        domain: list[Point] = []
        for number, keys in enumerate(self.configs):
            sizes = [find_number(count, keys) for count in counts]
            if any(size is None for size in sizes):
                record["when"] = OPEN
                return record
            domain += [
                (number, numbers)
                for numbers in itertools.product(*(range(size or 0) for size in sizes))
            ]
        if not {*points} <= {*domain}:
            record["when"] = OPEN
            return record
        record["when"] = self._fit_presence(points, domain)
        return record

    def _fit_shape(self, points: Mapping[Point, tuple[int, ...]]) -> list[str] | str:
        ranks = {len(shape) for shape in points.values()}
        if len(ranks) != 1:
            return OPEN
        found = []
        for dimension in range(ranks.pop()):
            wanted: dict[int, int] = {}
            is_even = True
            for (number, _), shape in points.items():
                if wanted.setdefault(number, shape[dimension]) != shape[dimension]:
                    is_even = False
            found.append((self._find_expression(wanted) if is_even else None) or OPEN)
        return found

    def _fit_presence(self, points: Iterable[Point], domain: Sequence[Point]) -> Any:
        """Terms that hold for exactly the points of a domain; an empty list where all are."""
        there = {*points}
        absent = [one for one in domain if one not in there]
        if not absent:
            return []
        present = [one for one in domain if one in there]
        own = self._find_terms(present, absent)
        if own is not None:
            return own
        other = self._find_terms(absent, present)
        return OPEN if other is None else {"unless": other}

    def _find_terms(self, yes: Sequence[Point], no: Sequence[Point]) -> list[str] | None:
        """The fewest terms that hold for all of `yes`, not all of which hold for any of `no`."""
        necessary = []
        # Terms are about the first number only.
        yes = sorted({(number, numbers[:1]) for number, numbers in yes})
        no = sorted({(number, numbers[:1]) for number, numbers in no})
        if {*yes} & {*no}:
            return None
        for term in self._list_terms(any(numbers for _, numbers in yes)):
            if all(holds(term, self.configs[number], numbers) for number, numbers in yes):
                excluded = {one for one in no if not holds(term, self.configs[one[0]], one[1])}
                if excluded:
                    necessary.append((term, excluded))
        left, chosen = {*no}, []
        while left:
            if not necessary:
                return None
            term, excluded = max(necessary, key=lambda one: (len(one[1] & left), -len(one[0])))
            if not excluded & left:
                return None
            chosen.append(term)
            left -= excluded
            if len(chosen) > 4:
                return None
        return chosen

    def _list_terms(self, has_numbers: bool) -> Iterator[str]:
        """All terms that differ between configs, the simplest first."""
        names = sorted({key for one in self.flat for key in one})
        for key in names:
            values = [one.get(key) for one in self.flat]
            if {bool(v) for v in values} == {True, False}:
                yield key
                yield f"!{key}"
            texts = {v for v in values if isinstance(v, str)}
            if 1 < len(texts) < 9:
                for text in sorted(texts):
                    yield f"{key}={text}"
                    yield f"{key}!={text}"
        integers = [key for key in self._integers if not key.endswith("[]")]
        for a, b in itertools.combinations(integers, 2):
            if (_DIVIDES.search(a) and _DIVIDES.search(b)) or ("size" in a and "size" in b):
                yield f"{a}<>{b}"
                yield f"{a}=={b}"
        if not has_numbers:
            return
        for key in names:
            lists = [one[key] for one in self.flat if isinstance(one.get(key), list)]
            inner = {v for one in lists for v in one if isinstance(v, str | int)}
            if any(isinstance(v, str | bool) for v in inner):
                for value in sorted(map(str, inner)):
                    yield f"{key}[n]={value}"
                    yield f"{key}[n]!={value}"
            elif lists:
                yield f"[n] in {key}"
                yield f"[n] not in {key}"
            words = [one[key] for one in self.flat if isinstance(one.get(key), str)]
            if words and all(len(word) > 1 for word in words) and "pattern" in key:
                for letter in sorted({*"".join(words)}):
                    yield f"{key}[n]={letter}"
                    yield f"{key}[n]!={letter}"
        for key in integers:
            yield f"[n]>={key}"
            yield f"[n]<{key}"
            for plus in (0, 1):
                yield f"([n]+{plus})%{key}==0"
                yield f"([n]+{plus})%{key}<>0"
                for other in integers:
                    if other != key and any(word in other for word in ("offset", "period", "freq")):
                        yield f"([n]+{plus})%{key}=={other}"
                        yield f"([n]+{plus})%{key}<>{other}"
