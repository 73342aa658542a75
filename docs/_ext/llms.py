"""Pages for programs that read: each page as Markdown, ``llms.txt`` and ``llms-full.txt``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from from_code import expand
from sphinx import addnodes


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write(app: Any, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    env, out = app.env, Path(app.outdir)
    root = env.config.root_doc
    index, whole = [f"# {app.config.project}", "", f"> {_summary(env, root)}"], []
    for caption, pages in _parts(env):
        index += ["", f"## {caption}", ""]
        for page in pages:
            source = Path(env.doc2path(page))
            text = expand(source.read_text(), source, plain=True).rstrip() + "\n"
            target = out / f"{page}.md"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            whole.append(f"<!-- {page}.md -->\n\n{text}")
            index.append(f"- [{env.titles[page].astext()}]({page}.md): {_summary(env, page)}")
    (out / "llms.txt").write_text("\n".join(index) + "\n")
    (out / "llms-full.txt").write_text("\n\n".join(whole))


def _parts(env: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each part of the navigation with its pages, the front page first."""
    first = [env.config.root_doc]
    for toctree in env.get_doctree(env.config.root_doc).findall(addnodes.toctree):
        pages = [page for _, page in toctree["entries"] if page in env.titles]
        inner = [one for page in pages for one in env.toctree_includes.get(page, [])]
        if pages:
            yield toctree["caption"], list(dict.fromkeys([*first, *pages, *inner]))
            first = []


def _summary(env: Any, page: str) -> str:
    """Return the first sentence of a page."""
    for paragraph in env.get_doctree(page).findall(nodes.paragraph):
        sentence, dot, _ = " ".join(paragraph.astext().split()).partition(". ")
        return sentence + dot.strip()
    return ""
