"""Hooks of mkdocs.yml: the navigation, links to files outside docs/, and drawings without a CDN.

Pages are written for readers of the repository: their links lead to its files. In the site, a file
outside docs/ becomes a page under repository/ if another page links to it.
"""

from __future__ import annotations

import html
import itertools
import os
import re
import statistics
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
CODE = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".txt": "text"}
STYLE = 'stroke="currentColor" fill="none" font-size="14" style="max-width: 40rem"'
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
    'markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker>'
)


def on_config(config: Any) -> Any:
    config.nav = navigation((DOCS / "index.md").read_text("utf-8"))
    fence = {"name": "mermaid", "class": "drawing", "format": drawing}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages link to, at any distance."""
    todo = [DOCS / file.src_uri for file in files.documentation_pages()]
    while todo:
        source = todo.pop()
        for target in outside(source):
            uri = site_uri(target)
            if files.get_file_from_path(uri) is not None:
                continue
            file = File.generated(config, uri, content=content(target))
            files.append(file)
            if target.suffix == ".md":
                todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    if page.file.src_uri.startswith("repository/"):
        return markdown
    return relinked(markdown, DOCS / page.file.src_uri)


def navigation(index: str) -> list[Any]:
    """Return mkdocs's `nav`: a section for each heading of the index, with its pages."""
    nav: list[Any] = ["index.md"]
    _, *parts = re.split(r"^## ", index, flags=re.MULTILINE)
    for part in parts:
        pages = []
        for _, path, _ in LINK.findall(part):
            is_page = path.endswith(".md") and not path.startswith("..")
            if is_page and path not in pages:
                pages.append(path)
        title, *_ = part.splitlines()
        nav.append({title: pages})
    return nav


def outside(source: Path) -> list[Path]:
    """Files and folders of the repository, but not of docs/, that a Markdown file links to."""
    text = CODE.sub("", source.read_text("utf-8"))
    targets = []
    for _, path, _ in LINK.findall(text):
        if ":" in path:
            continue
        target = linked(source, path)
        is_in_docs = target == DOCS or DOCS in target.parents
        if target.exists() and not is_in_docs:
            targets.append(target)
    return targets


def linked(source: Path, path: str) -> Path:
    """The file that a relative link in `source` leads to."""
    return Path(os.path.normpath(source.parent / path))


def site_uri(target: Path) -> str:
    """The file's place in the site; files of docs/ stay in their places."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    if target.suffix != ".md":
        name += ".md"
    return f"repository/{name}"


def relinked(markdown: str, source: Path) -> str:
    """Turn a file's links into links of the site.

    A link whose text is a page's file name shows the page's title instead.
    """

    def link(match: re.Match[str]) -> str:
        text = match[1]
        path = match[2]
        anchor = match[3] or ""
        target = linked(source, path)
        if ":" in path or not target.exists() or ROOT not in target.parents:
            return match[0]
        if text.endswith(".md") and (title := re.match(r"# (.+)", target.read_text("utf-8"))):
            text = title[1]
        folder = os.path.dirname(site_uri(source))
        uri = os.path.relpath(site_uri(target), folder)
        return f"[{text}]({uri}{anchor})"

    parts = re.split(f"({CODE.pattern})", markdown, flags=CODE.flags)
    for i in range(0, len(parts), 2):  # every second part is code
        parts[i] = LINK.sub(link, parts[i])
    return "".join(parts)


def content(target: Path) -> str:
    """The page of a file or folder of the repository."""
    if target.suffix == ".md":
        return relinked(target.read_text("utf-8"), target)
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        names = sorted(path.name for path in target.iterdir())
        text = f"# {name}/\n\n"
        for file in names:
            if not file.startswith(("_", ".")):
                text += f"- `{file}`\n"
        return text
    language = LANGUAGES.get(target.suffix, "text")
    text = target.read_text("utf-8")
    return f"# {name}\n\n````{language}\n{text}\n````\n"


def drawing(source: str, *others: Any, **options: Any) -> str:
    """Draw a mermaid graph whose lines are `a --> b` as SVG.

    Mermaid itself would come from a CDN.
    """
    edges = re.findall(r"^\s*(\w+) --> (\w+)$", source, re.MULTILINE)
    _, *lines = source.strip().splitlines()
    if not edges or len(edges) != len(lines):
        raise ValueError(f"a drawing has other lines than `a --> b`:\n{source}")
    levels = levels_of(edges)
    columns = columns_of(levels, edges)
    leftmost = min(columns.values())
    rightmost = max(columns.values())
    x = {name: (column - leftmost) * 150 + 66 for name, column in columns.items()}
    y = {}
    for level, names in enumerate(levels):
        y.update(dict.fromkeys(names, level * 64 + 22))
    arrows = ""
    for above, below in edges:
        bottom = y[above] + 14
        top = y[below] - 16
        line = f"M{x[above]:g} {bottom:g} L{x[below]:g} {top:g}"
        arrows += f'<path d="{line}" marker-end="url(#tip)"/>'
    boxes = ""
    for name in columns:
        boxes += box(name, x[name], y[name])
    width = (rightmost - leftmost) * 150 + 132
    height = len(levels) * 64 - 20
    head = f'<svg viewBox="0 0 {width:g} {height:g}" {STYLE}><defs>{TIP}</defs>'
    return f"{head}{arrows}{boxes}</svg>"


def levels_of(edges: list[tuple[str, str]]) -> list[list[str]]:
    """The names of each level; a name is below everything that leads to it."""
    names = [name for edge in edges for name in edge]
    depth = dict.fromkeys(names, 0)
    for _ in depth:  # the longest way from the top
        for above, below in edges:
            depth[below] = max(depth[below], depth[above] + 1)
    levels: dict[int, list[str]] = {level: [] for level in sorted(depth.values())}
    for name, level in depth.items():
        levels[level].append(name)
    return list(levels.values())


def columns_of(levels: list[list[str]], edges: list[tuple[str, str]]) -> dict[str, float]:
    """The horizontal place of each name, at least 1 from its neighbours.

    A name is below the middle of the names above it, where there is room.
    """
    columns: dict[str, float] = {}
    for names in levels:
        middle: dict[str, float] = {}
        for i, name in enumerate(names):
            above = [columns[upper] for upper, lower in edges if lower == name]
            middle[name] = statistics.fmean(above) if above else i
        names = sorted(names, key=middle.__getitem__)
        places = [middle[name] for name in names]
        if any(right - left < 1 for left, right in itertools.pairwise(places)):
            half_width = (len(names) - 1) / 2
            first = statistics.fmean(places) - half_width
            places = [first + i for i in range(len(names))]
        columns.update(zip(names, places, strict=True))
    return columns


def box(name: str, x: float, y: float) -> str:
    size = 'width="124" height="28" rx="4" fill="var(--md-default-bg-color)"'
    style = 'text-anchor="middle" stroke="none" fill="currentColor"'
    text = html.escape(name)
    frame = f'<rect x="{x - 62:g}" y="{y - 14:g}" {size}/>'
    label = f'<text x="{x:g}" y="{y + 5:g}" {style}>{text}</text>'
    return frame + label
