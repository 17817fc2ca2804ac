"""A page taken apart by parsers that know nothing of how it was made."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br", "link", "img", "input", "hr"}


class StrictParser(HTMLParser):
    """Fails on an element that is not closed, or closed by another's name."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(page: str) -> StrictParser:
    """The page, read to its end with nothing left open."""
    parser = StrictParser()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def svgs(page: str) -> list[ElementTree.Element]:
    """Every `svg` element of a page, read as XML."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def local_name(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def text_boxes(svg: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of every text of a picture, as wide as its letters are."""
    sizes = {"label": 7.3, "small": 6.1, "index": 6.4, "amount": 5.8, "host": 7.3}
    boxes = []
    for node in svg.iter():
        if local_name(node) != "text":
            continue
        kinds = (node.get("class") or "").split()
        letter = min(sizes[kind] for kind in kinds if kind in sizes)
        width = letter * len(node.text or "")
        x, y = float(node.get("x", "0")), float(node.get("y", "0"))
        if {"label", "across", "amount"} & set(kinds):
            x -= width / 2
        elif "down" in kinds or node.get("text-anchor") == "end":
            x -= width
        boxes.append((x, y - 9, x + width, y + 2))
    return boxes


def overlapping(svg: ElementTree.Element) -> list[tuple[int, int]]:
    """Pairs of texts that overlap by more than a hair."""
    boxes = text_boxes(svg)
    return [
        (i, j)
        for i, a in enumerate(boxes)
        for j, b in enumerate(boxes[:i])
        if min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 1
    ]


def outside(svg: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Texts that stick out of a picture."""
    left, top, width, height = (float(word) for word in svg.get("viewBox", "").split())
    return [
        box
        for box in text_boxes(svg)
        if box[0] < left - 1
        or box[1] < top - 1
        or box[2] > left + width + 1
        or box[3] > top + height + 1
    ]
