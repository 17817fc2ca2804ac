"""Pages of the site: those of docs/, and one for each file beside it that they link to."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_LINK = re.compile(r"\]\((?P<target>(?:\.\./)+(?:examples|tests|benchmarks)/[^)#]+\.py)\)")
# Longer than any fence in the files.
_FENCE = "````"


def gather_pages(root: Path, folder: Path) -> None:
    """Copy `docs/` into a folder, with the files that it links to as pages beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "docs", folder)
    (folder / "assets").mkdir()
    for name in ("site.css", "site.js"):
        shutil.copy(Path(__file__).with_name(name), folder / "assets" / name)
    listed: set[str] = set()
    for page in sorted(folder.rglob("*.md")):
        text = page.read_text()
        place = (root / "docs" / page.relative_to(folder)).parent

        def as_page(match: re.Match[str], place: Path = place, page: Path = page) -> str:
            file = os.path.relpath((place / match["target"]).resolve(), root)
            listed.add(file)
            return f"]({os.path.relpath(folder / 'files' / f'{file}.md', page.parent)})"

        page.write_text(_LINK.sub(as_page, text))
    for file in sorted(listed):
        page = folder / "files" / f"{file}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        code = (root / file).read_text()
        page.write_text(f"# `{file}`\n\n{_FENCE}python\n{code}{_FENCE}\n")
