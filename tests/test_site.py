"""The site's own parts: every page has its place, links are followed, worked changes are right."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}


@pytest.fixture(autouse=True)
def with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for name in [name for name in sys.modules if name.startswith("site_builder")]:
        monkeypatch.delitem(sys.modules, name)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"(?:: |- )([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(PAGES)


def test_files_beside_the_documents_become_pages(tmp_path: Path) -> None:
    from site_builder.pages import gather_pages

    gather_pages(ROOT, tmp_path / "site")
    links = re.findall(r"\]\((files/[^)]+)\)", (tmp_path / "site" / "refit.md").read_text())
    assert "files/examples/refit.py.md" in links
    deeper = (tmp_path / "site" / "tutorials" / "trainer-and-engine.md").read_text()
    assert "](../files/examples/link.py.md)" in deeper
    page = (tmp_path / "site" / "files" / "examples" / "link.py.md").read_text()
    assert (ROOT / "examples" / "link.py").read_text() in page
    for text in (tmp_path / "site").rglob("*.md"):
        assert not re.search(r"\]\([^)]*/(examples|tests)/[^)]*\.py\)", text.read_text()), text


def test_worked_changes_are_found_by_every_notation_and_say_what_explain_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("click")
    from site_builder import worked

    table = worked.Table("x=2,y=3", (6, 6), ("x, y", "y, x"))
    monkeypatch.setattr(worked, "TABLES", (table,))
    worked.write_worked_changes(tmp_path)
    page = (tmp_path / "index.html").read_text()
    (listed,) = re.findall(r"^const tables = (\[.*?^\]);", page, re.M | re.S)
    (written,) = json.loads(listed)
    assert written["title"] == "x=2,y=3, a tensor of 6 x 6"
    assert written["shardings"][0]["mlir"] == "[[0], [1]]"
    assert written["shardings"][1]["dtensor"] == "[Shard(1), Shard(0)]"
    report = (tmp_path / "0" / "0-1.html").read_text()
    assert "26 of 36 elements move, 10 stay." in report
    assert "joint all-to-all" in report
    assert (tmp_path / "0" / "1-0.html").exists()


def test_the_moving_picture_of_the_readme_is_what_its_plan_says() -> None:
    from site_builder.moving_picture import picture_of_the_readme

    assert (ROOT / "docs" / "moving.svg").read_text() == picture_of_the_readme()


def test_faults_in_links_are_found(tmp_path: Path) -> None:
    from site_builder.links import find_faults

    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "there.html").write_text('<h1 id="place">There</h1>')
    elsewhere = '<a href="https://elsewhere.example/"></a>'
    good = f'<a href="deep/there.html#place"></a>{elsewhere}<img src="a.svg">'
    (tmp_path / "a.svg").touch()
    (tmp_path / "index.html").write_text(good)
    assert find_faults(tmp_path) == []
    for wrong, said in {
        '<a href="gone.html">': "which is not there",
        '<a href="deep/there.html#gone">': "no such place",
        '<img src="b.svg">': "there is no b.svg",
        '<script src="https://elsewhere.example/x.js">': "from elsewhere",
    }.items():
        (tmp_path / "index.html").write_text(wrong)
        (fault,) = find_faults(tmp_path)
        assert said in fault


def test_docstrings_are_shown_as_they_are_meant() -> None:
    pytest.importorskip("griffe")
    import doctest

    from site_builder import docstrings

    assert doctest.testmod(docstrings).failed == 0
