"""Check that built pages fit the screens of a telephone and of a desk: 390 and 1,400 pixels.

    python tools/check_widths.py HTML [--browser PATH] [--if-browser]

Each page of the folder HTML is laid out by a headless Chromium, all in one run. What is wide (a
table, a line of code) may scroll in its own box; a page that is wider than the screen fails.
Without a browser it fails; with ``--if-browser`` it says so and ends with 0, unless the environment
variable INFERCORE_REQUIRE_BROWSER is set.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (390, 1400)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SECONDS = 300
TRIES = 3  # a browser may fail to start
HARNESS = """<!doctype html>
<meta charset="utf-8">
<pre id="found"></pre>
<script>
async function measure() {
  const found = [];
  for (const page of %s) for (const width of %s) {
    const frame = document.createElement("iframe");
    frame.style = `width:${width}px;height:900px;border:0`;
    frame.src = page;
    await new Promise((done) => { frame.onload = done; document.body.append(frame); });
    found.push([page, width, frame.contentDocument.documentElement.scrollWidth]);
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify(found);
}
measure();
</script>
"""


def main() -> None:
    """Measure every page; end with 1 where one is too wide."""
    parser = argparse.ArgumentParser(description="check that built pages fit screens")
    parser.add_argument("html", type=Path, help="the folder of the built documentation")
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, BROWSERS)), None))
    parser.add_argument("--if-browser", action="store_true", help="without one, pass")
    given = parser.parse_args()
    pages = sorted(given.html.rglob("*.html"))
    if not pages:
        sys.exit(f"there are no pages in {given.html}")
    if given.browser is None:
        missing = f"no browser ({', '.join(BROWSERS)}): the widths of pages were not checked"
        if given.if_browser and not os.environ.get("INFERCORE_REQUIRE_BROWSER"):
            print(missing)
            return
        sys.exit(missing)
    found = measured(given.browser, [path.resolve().as_uri() for path in pages])
    if len(found) != len(pages) * len(WIDTHS):
        sys.exit(f"{len(found)} of {len(pages) * len(WIDTHS)} pages were measured")
    wide = [
        f"{page} is {needed} wide on {width}" for page, width, needed in found if needed > width
    ]
    print("\n".join([*wide, f"{len(pages)} pages at {WIDTHS} pixels, {len(wide)} too wide"]))
    sys.exit(bool(wide))


def measured(browser: str, pages: list[str]) -> list[tuple[str, int, int]]:
    """Return each page with a width of the screen and the width that it takes there."""
    with tempfile.TemporaryDirectory() as folder:
        harness = Path(folder) / "harness.html"
        harness.write_text(HARNESS % (json.dumps(pages), json.dumps(WIDTHS)), encoding="utf-8")
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--allow-file-access-from-files", "--window-size=1600,1000", "--hide-scrollbars",
            f"--user-data-dir={folder}/profile", "--virtual-time-budget=600000", "--dump-dom",
            harness.as_uri(),
        ]  # fmt: skip
        for _ in range(TRIES):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            text = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
            if text is not None:
                found: list[tuple[str, int, int]] = json.loads(html.unescape(text[1]))
                return found
    sys.exit(f"the browser measured nothing:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
