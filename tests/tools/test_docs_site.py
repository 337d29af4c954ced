"""The documentation as a site: it builds without a warning, is complete, and uses no other host."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
sys.path.insert(0, str(ROOT / "tools"))

import docs_site  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert done.stdout + done.stderr == ""
    return folder


def text(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def test_every_page_is_built_and_in_the_navigation(site):
    home = text(site, "index.html")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / name).is_file()
    index_file = ROOT / "docs" / "index.md"
    sections = re.findall(r"^## (.+)$", index_file.read_text(encoding="utf-8"), re.MULTILINE)
    tabs = re.findall(r'<a href="[^"]+" class="md-tabs__link">\s*([^<]+?)\s*<', home)
    assert tabs[1:] == sections


def test_nothing_is_loaded_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|link|iframe|source)\b[^>]*https?://[^>]*>",
            page.read_text(encoding="utf-8"),
        )
        assert [tag for tag in loaded if 'rel="canonical"' not in tag] == []
        # the theme would load them from a CDN
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8")


def test_links_out_of_docs_lead_to_the_repositorys_files(site):
    assert 'href="repository/CONTRIBUTING.html"' in text(site, "index.html")
    assert 'href="repository/CONTRIBUTING.html#an-estimator"' in text(site, "concepts.html")
    assert 'href="../algorithms.html#baselines-and-advantages"' in text(
        site, "repository/CONTRIBUTING.html"
    )
    assert "leave_one_out" in text(site, "repository/reinforce_rl/algorithm/advantages.py.html")
    assert "advantages.py" not in text(site, "repository/reinforce_rl/config.html")
    assert "rules.py" in text(site, "repository/reinforce_rl/config.html")


def test_links_show_titles_and_code_stays_as_it_is():
    page = (
        "see [x](../README.md#resuming), [security.md](security.md)\n```\n[x](../README.md)\n```\n"
        "[a](https://b.c/d.md)"
    )
    assert docs_site.relinked(page, ROOT / "docs" / "gpu.md") == (
        "see [x](repository/README.md#resuming), [Security](security.md)\n```\n[x](../README.md)\n"
        "```\n[a](https://b.c/d.md)"
    )


def test_a_drawing_has_each_part_once_and_each_arrow(site):
    svg = docs_site.drawing(
        "graph TD\n    a --> b\n    a --> c\n    b --> d\n    c --> d\n    a --> d\n"
    )
    assert re.findall(r">(\w+)</text>", svg) == ["a", "b", "c", "d"]
    assert svg.count("marker-end") == 5
    spots = {
        name: (float(x), float(y))
        for x, y, name in re.findall(r'<text x="(.+?)" y="(.+?)" .*?>(\w)<', svg)
    }
    assert spots["b"][0] < spots["a"][0] == spots["d"][0] < spots["c"][0]
    assert spots["a"][1] < spots["b"][1] == spots["c"][1] < spots["d"][1]
    assert text(site, "architecture.html").count("marker-end") > 10
    with pytest.raises(ValueError, match="other lines"):
        docs_site.drawing("graph TD\n    a -.-> b\n    a --> c\n")


def test_the_reference_has_signatures_and_docstrings(site):
    page = text(site, "concepts.html")
    assert "Start scoring and return at once" in page
    assert "infer_rm" in page
    assert ":::" not in page


@pytest.mark.slow
def test_search_finds_a_message_and_no_other_host_is_asked(site):
    from playwright.sync_api import sync_playwright

    if not Path(CHROMIUM).is_file():
        pytest.fail("chromium is missing") if os.environ.get("CI") else pytest.skip(
            f"there is no {CHROMIUM}"
        )
    asked = []
    said = []
    handler = functools.partial(QuietHandler, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_playwright() as play,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_address[1]}/"
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on(
            "console",
            lambda message: said.append(message.text) if message.type == "error" else None,
        )
        for name in ("architecture.html", "concepts.html", "index.html"):
            page.goto(home + name)
        page.fill("input[name=query]", "misspelt")
        first = page.wait_for_selector(".md-search-result__link")
        assert "debugging.html" in (first.get_attribute("href") or "")
        browser.close()
        server.shutdown()
    assert said == []
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith((home, "data:", "blob:"))] == []


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass
