"""Make the README's picture of the dashboard: a report.html in Debian's Chromium.

python tools/dashboard_image.py results/demo/report.html docs/images/dashboard.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a picture of a run's report.")
    parser.add_argument("report", type=Path, help="a report.html")
    parser.add_argument("image", type=Path, help="the PNG to write")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument(
        "--size", type=int, nargs=2, default=(1240, 900), metavar=("WIDTH", "HEIGHT")
    )
    args = parser.parse_args()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=OPTIONS)
        width, height = args.size
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if args.dark else "light",
        )
        page.goto(args.report.resolve().as_uri())
        page.wait_for_selector("body[data-ready]")
        page.wait_for_timeout(500)
        page.screenshot(path=args.image)
        browser.close()
    size = args.image.stat().st_size
    print(f"{args.image}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
