"""The report in a real browser: at phone and desk width, light and dark, it fits and can be read.

Needs Debian's `chromium`; a skip says so. A copy of the page gets a script that measures it; the page itself has none.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.folded import folded
from support.run_log import START_MS, small_run

from odradek.infra.observe.report import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
]  # fmt: skip
DARK, LIGHT = 0, 1

MEASURE = """
<script>
const parse = (text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (c) => { const [r, g, b] = c.map(channel); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => {
  const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!c.startsWith("rgba(0, 0, 0, 0")) return parse(c); } return [255, 255, 255]; };
const texts = [...document.querySelectorAll("h1,h2,h3,p,td,th,b,span,small,figcaption,svg text")]
  .filter(e => e.textContent.trim());
const colour = (e) => parse(e.closest("svg") ? getComputedStyle(e).fill : getComputedStyle(e).color);
const svg = [...document.querySelectorAll("svg text")];
document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: document.documentElement.clientWidth,
  contrast: Math.min(...texts.map(e => contrast(colour(e), behind(e)))),
  smallest: Math.min(...svg.map(e => 11 * e.closest("svg").getBoundingClientRect().width / 380)),
  charts: document.querySelectorAll("svg").length,
  empty: [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().height < 50).length,
  paper: light(behind(document.body)),
});
</script>
"""


def measured(tmp_path: Path, width: int, scheme: int) -> dict[str, Any]:
    fold, book = folded(small_run(versions=6, groups=4))
    page = tmp_path / "page.html"
    page.write_text(render(fold, book, START_MS).replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    # Headless windows are at least some 500 px wide; a phone is an iframe of its width.
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe id="f" style="width:{width}px;height:6000px;border:0" srcdoc=""></iframe>'
                     "<script>const f = document.getElementById('f'); f.onload = () => "
                     "{ document.title = f.contentDocument.title; }; f.srcdoc = PAGE;</script>"
                     .replace("PAGE", json.dumps(page.read_text()).replace("</", "<\\/")))  # fmt: skip
    command = [
        str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000",
        f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stdout[:500]
    found: dict[str, Any] = json.loads(title[1].replace("&quot;", '"'))
    return found


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_its_width_and_can_be_read(tmp_path: Path, width: int, scheme: int) -> None:
    found = measured(tmp_path, width, scheme)
    assert found["width"] == width
    assert found["wide"] <= 0  # nothing to scroll sideways but inside tables
    assert (found["charts"], found["empty"]) == (15, 0)
    assert found["smallest"] >= 8.5  # px of a chart's text
    assert found["contrast"] >= 4.5  # WCAG AA
    assert (found["paper"] < 0.1) == (scheme == DARK)
