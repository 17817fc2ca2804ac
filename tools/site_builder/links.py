"""Links of a built site: each leads to what is there, and nothing is taken from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Links(HTMLParser):
    """What one page links to, what it shows or runs, and the names of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.taken: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if "id" in given:
            self.names.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.taken.append(given.get("href", ""))
        elif "src" in given:
            self.taken.append(given["src"])


def find_faults(folder: Path) -> list[str]:
    """What is wrong with the links of a built site, a line each."""
    pages: dict[Path, _Links] = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path] = _Links()
        pages[path].feed(path.read_text())
    found = []
    for path, page in pages.items():
        where = path.relative_to(folder)
        if where.name == "404.html":
            continue
        for link in page.taken:
            parts = urlsplit(link)
            if parts.scheme not in ("", "data") or parts.netloc:
                found.append(f"{where}: takes {link} from elsewhere")
            elif not parts.scheme and not _target(path, parts.path).exists():
                found.append(f"{where}: there is no {link}")
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = _target(path, parts.path)
            name = unquote(parts.fragment)
            if not target.exists():
                found.append(f"{where}: links to {link}, which is not there")
            elif (
                name
                and not name.startswith("__")
                and target in pages
                and name not in pages[target].names
            ):
                found.append(f"{where}: links to {link}, which has no such place")
    return found


def _target(page: Path, link: str) -> Path:
    target = (page.parent / unquote(link)).resolve() if link else page
    return target / "index.html" if target.is_dir() else target
