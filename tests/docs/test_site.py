"""The site is complete: an entry for each name, no dead links, and every page can be found."""

from __future__ import annotations

import importlib
import inspect
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer

from fullshard.cli import app
from tests.pure.import_rules import PUBLIC_MODULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted(page for page in DOCS.rglob("*.md"))


class Page(HTMLParser):
    """The anchors of a page, its links, and its navigation."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.navigation: set[str] = set()
        self._depth = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids.add(found.get("id", ""))
        if tag == "div" and (self._depth or "sidebar-tree" in found.get("class", "")):
            self._depth += 1
        target = found.get("href" if tag in ("a", "link") else "src")
        if target is not None:
            self.links.append(target)
            if self._depth:
                self.navigation.add(target)

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "div" and self._depth > 0


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


@pytest.fixture(scope="module")
def anchors(pages: dict[Path, Page]) -> set[str]:
    return set().union(*(page.ids for page in pages.values()))


def public_names(module: str) -> dict[str, Any]:
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or set(vars(found)) - {"annotations"}
    return {f"{module}.{name}": getattr(found, name) for name in names if name[0] != "_"}


@pytest.mark.parametrize("module", sorted(PUBLIC_MODULES))
def test_each_public_name_has_an_entry_and_a_docstring(module: str, anchors: set[str]) -> None:
    names = public_names(module)
    if not hasattr(importlib.import_module(module), "__all__"):
        names = {name: one for name, one in names.items() if not inspect.ismodule(one)}
    assert len(names) > 1
    missing = [name for name in names if name not in anchors and f"module-{name}" not in anchors]
    assert missing == []
    assert [name for name, one in names.items() if callable(one) and not one.__doc__] == []


def test_each_method_of_a_public_class_has_an_entry(anchors: set[str]) -> None:
    """Methods inherited from private base classes count too."""
    wanted = set()
    public = [one for module in PUBLIC_MODULES for one in public_names(module).values()]
    for one in filter(inspect.isclass, public):
        for base in (base for base in one.__mro__ if base.__module__.startswith("fullshard")):
            for member, value in vars(base).items():
                if member[0] != "_" and inspect.isfunction(value) and value.__doc__:
                    wanted.add(f"{one.__name__}.{member}")
    entries = {".".join(anchor.split(".")[-2:]) for anchor in anchors}
    assert sorted(wanted - entries) == []
    assert len(wanted) > 100


def commands(command: Any, name: str) -> dict[str, Any]:
    found = {name: command}
    for part, inner in getattr(command, "commands", {}).items():
        found |= commands(inner, f"{name} {part}")
    return found


def test_each_command_and_option_has_an_entry(anchors: set[str]) -> None:
    found = commands(typer.main.get_command(app), "fullshard")
    assert {"fullshard train", "fullshard checkpoint convert"} < set(found)
    wanted = set()
    for name, command in found.items():
        wanted.add(name.replace(" ", "-"))
        options = [word for one in command.params for word in (*one.opts, *one.secondary_opts)]
        wanted |= {
            f"cmdoption-{name} {word.lstrip('-')}".replace(" ", "-")
            for word in options
            if word.startswith("--")
        }
    assert len(wanted) > 60
    assert wanted - anchors == set()


def test_no_link_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    dead, checked = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith(("//", "data:")):
                assert parts.scheme in ("https", "data"), link
                continue
            checked += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].ids if target in pages else {anchor}
            if not target.is_file() or (anchor and anchor not in known):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    assert checked > 5000


def test_each_page_is_in_the_navigation(pages: dict[Path, Page], site: Path) -> None:
    found = pages[site / "index.html"].navigation
    wanted = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in SOURCES}
    assert wanted - found == {"index.html"}  # the title of each page links to the index


def test_each_variable_that_the_source_reads_is_explained() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"\bFULLSHARD_[A-Z_]*[A-Z]\b", sources))
    table = (DOCS / "environment.md").read_text()
    rows = re.findall(r"^\| `(FULLSHARD_\w+)` \|.*\]\((\w+\.md)", table, re.MULTILINE)
    assert {name for name, _ in rows} == read
    assert [name for name, page in rows if name not in (DOCS / page).read_text()] == []


def test_programs_can_read_all_pages_as_markdown(site: Path) -> None:
    listed = (site / "llms.txt").read_text()
    whole = (site / "llms-full.txt").read_text()
    for page in SOURCES:
        name = page.relative_to(DOCS).as_posix()
        assert listed.count(f"]({name}): ") == 1, name
        text = (site / name).read_text()
        assert text in whole
        assert "```{" not in text.replace("```{toctree}", ""), name
    for name in (
        "fullshard.fully_shard(",
        "fullshard.errors.ConfigError",
        "`--min-workers N`",
        "- `reduce_dtype`",
    ):
        assert name in whole
    assert "## Set up, check, test" in whole and "## [Unreleased]" in whole
