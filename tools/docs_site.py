"""Hooks of mkdocs.yml: the navigation, links to files outside docs/, and drawings without a CDN.

Pages are written for a reader of the repository: their links lead to files of it. In the site, a file outside docs/
becomes a page of its own, under repository/, if another page links to it.
"""

from __future__ import annotations

import html
import itertools
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".txt": "text"}


def on_config(config: Any) -> Any:
    config.nav = navigation((DOCS / "index.md").read_text("utf-8"))
    fence = {"name": "mermaid", "class": "drawing", "format": drawing}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    todo = [DOCS / file.src_uri for file in files.documentation_pages()]
    while todo:
        for target in outside(todo.pop()):
            if files.get_file_from_path(site_uri(target)) is None:
                files.append(File.generated(config, site_uri(target), content=content(target)))
                todo += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    if page.file.src_uri.startswith("repository/"):
        return markdown
    return relinked(markdown, DOCS / page.file.src_uri)


def navigation(index: str) -> list[Any]:
    """Return mkdocs's `nav`: a section for each heading of the index, with the pages that are linked below it."""
    nav: list[Any] = ["index.md"]
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        links = [
            path
            for _, path, _ in LINK.findall(part)
            if path.endswith(".md") and not path.startswith("..")
        ]
        nav.append({part.splitlines()[0]: list(dict.fromkeys(links))})
    return nav


def outside(source: Path) -> list[Path]:
    """Files and folders of the repository, but not of docs/, that a Markdown file links to."""
    links = [
        path
        for _, path, _ in LINK.findall(CODE.sub("", source.read_text("utf-8")))
        if ":" not in path
    ]
    targets = [Path(os.path.normpath(source.parent / path)) for path in links]
    return [
        target
        for target in targets
        if DOCS not in target.parents and target != DOCS and target.exists()
    ]


def site_uri(target: Path) -> str:
    """Where the site has a file: those of docs/ in their places."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return f"repository/{name}" if target.suffix == ".md" else f"repository/{name}.md"


def relinked(markdown: str, source: Path) -> str:
    """Turn a file's links into those of its page; one that shows a page's file name shows its title."""

    def link(match: re.Match[str]) -> str:
        text = match[1]
        path = match[2]
        anchor = match[3] or ""
        target = Path(os.path.normpath(source.parent / path))
        if ":" in path or not target.exists() or ROOT not in target.parents:
            return match[0]
        if text.endswith(".md") and (title := re.match(r"# (.+)", target.read_text("utf-8"))):
            text = title[1]
        return f"[{text}]({os.path.relpath(site_uri(target), os.path.dirname(site_uri(source)))}{anchor})"

    parts = re.split(f"({CODE.pattern})", markdown, flags=CODE.flags)  # every second one is code
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def content(target: Path) -> str:
    """The page of a file or folder of the repository."""
    if target.suffix == ".md":
        return relinked(target.read_text("utf-8"), target)
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        files = sorted(
            path.name for path in target.iterdir() if not path.name.startswith(("_", "."))
        )
        return f"# {name}/\n\n" + "\n".join(f"- `{file}`" for file in files) + "\n"
    return f"# {name}\n\n````{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text('utf-8')}\n````\n"


def drawing(source: str, *others: Any, **options: Any) -> str:
    """Draw a mermaid graph whose lines are `a --> b` as SVG: mermaid itself would come from a CDN."""
    edges = re.findall(r"^\s*(\w+) --> (\w+)$", source, re.MULTILINE)
    if not edges or len(edges) != len(source.strip().splitlines()) - 1:
        raise ValueError(f"a drawing has other lines than `a --> b`:\n{source}")
    depth = dict.fromkeys((name for edge in edges for name in edge), 0)
    for _ in depth:  # the longest way from the top
        for above, below in edges:
            depth[below] = max(depth[below], depth[above] + 1)
    rows = [
        [name for name, row in depth.items() if row == level]
        for level in range(max(depth.values()) + 1)
    ]
    spot: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        # each under the middle of those above it, where there is room
        above = {name: [spot[a][0] for a, b in edges if b == name] for name in row}
        middle = {
            name: sum(places) / len(places) if places else i
            for i, (name, places) in enumerate(above.items())
        }
        row.sort(key=middle.__getitem__)
        if any(middle[right] - middle[left] < 1 for left, right in itertools.pairwise(row)):
            first = (sum(middle.values()) - len(row) * (len(row) - 1) / 2) / len(row)
            middle = {name: first + i for i, name in enumerate(row)}
        spot |= {name: (middle[name], level) for name in row}
    left, right = min(x for x, _ in spot.values()), max(x for x, _ in spot.values())
    spot = {name: ((x - left) * 150 + 66, y * 64 + 22) for name, (x, y) in spot.items()}
    lines = "".join(
        f'<path d="M{spot[a][0]:g} {spot[a][1] + 14:g} L{spot[b][0]:g} {spot[b][1] - 16:g}" marker-end="url(#tip)"/>'
        for a, b in edges
    )
    written = 'text-anchor="middle" stroke="none" fill="currentColor"'
    boxes = "".join(
        f'<rect x="{x - 62:g}" y="{y - 14:g}" width="124" height="28" rx="4" fill="var(--md-default-bg-color)"/>'
        f'<text x="{x:g}" y="{y + 5:g}" {written}>{html.escape(name)}</text>'
        for name, (x, y) in spot.items()
    )
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    tip += '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker>'
    size = f"0 0 {(right - left) * 150 + 132:g} {len(rows) * 64 - 20:g}"
    style = 'stroke="currentColor" fill="none" font-size="14" style="max-width: 40rem"'
    return f'<svg viewBox="{size}" {style}><defs>{tip}</defs>{lines}{boxes}</svg>'
