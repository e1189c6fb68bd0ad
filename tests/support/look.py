"""Opens a page in Chromium, narrow as a phone and wide, and tells what a person would find wrong.

That is anything asked of the outside, a page wider than its window, and a table whose names scroll away or leave no
room. Chromium's windows are never narrower than 500 px: so the page stands in a frame as wide as asked.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = {"phone": 390, "desktop": 1280}

# Whatever the policy forbids is asked of the outside, and told.
WATCH = """<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"><script>
window.told = [];
addEventListener("securitypolicyviolation", (event) => told.push(`asks for ${event.blockedURI}`));
</script>"""

# In the frame's parent: what is seen when all is there, then opened.
ASK = """
const frame = document.querySelector("iframe"), { contentDocument: page, contentWindow: { told } } = frame;
const wide = (when) => {
  const width = page.documentElement.scrollWidth;
  if (width > frame.clientWidth) told.push(`${when}, the page is ${width} px wide in ${frame.clientWidth}`);
};
wide("as it opens");
page.querySelectorAll("details").forEach((details) => { details.open = true; });
wide("all opened");
page.querySelectorAll(".wide").forEach((table) => {
  const name = table.querySelector("td"), edge = table.getBoundingClientRect();
  table.scrollLeft = table.scrollWidth;
  const { left, width: taken } = name.getBoundingClientRect();
  if (left < edge.left - 1) told.push(`names like ${name.innerText} scroll away`);
  if (taken > edge.width / 2 || taken < 60) told.push(`names like ${name.innerText} take ${taken} of ${edge.width} px`);
});
document.body.dataset.told = JSON.stringify(told);
"""


def look(page: Path) -> list[str]:
    """What is wrong with the page, of each width."""
    wrong = []
    with TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        for name, width in WIDTHS.items():
            frame.write_text(framed(page.read_text(encoding="utf-8"), width, 900, ASK), encoding="utf-8")
            dom = run(frame, width, 900, "--dump-dom", "--virtual-time-budget=5000")
            if not (found := re.search(r'data-told="([^"]*)"', dom)):
                raise RuntimeError(f"the page did not load: {dom[:300]!r}")
            wrong += [f"{name}: {words}" for words in dict.fromkeys(json.loads(html.unescape(found[1])))]
    return wrong


def find_browser() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def framed(page: str, width: int, height: int, script: str) -> str:
    """A page that shows `page` in a frame, and runs `script` when it is there."""
    watched = page.replace("<head>", f"<head>{WATCH}", 1)
    return (
        f'<!DOCTYPE html><body style="margin:0"><iframe style="border:0;width:{width}px;height:{height}px" '
        f'srcdoc="{html.escape(watched)}"></iframe><script>onload = () => setTimeout(() => {{{script}}}, 500)</script>'
    )


def run(frame: Path, width: int, height: int, *options: str) -> str:
    """Chromium without a window, on a file."""
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    command = [str(find_browser()), *common, *options, frame.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
