"""`make look-report`: opens a report in a real browser, narrow as a phone and wide, and fails where a person would.

    python tests/support/look.py [page.html] [--out FOLDER]

Fails on an error of a script, anything asked of the outside, a page wider than its window, a table whose names scroll
away or leave no room, a name of many whose curves stay grey, or rounds that do not turn by arrow key. Leaves
phone-light.png, desktop-dark.png and so on in `runs/look`. Without a page it makes one of a sweep made up for it.

The browser is Chromium, its windows never narrower than 500 px: so the page stands in a frame as wide as asked.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from poss_lightning.reports.report import report
from tests.support.lab import write_lab

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = {"phone": 390, "desktop": 1280}
TALLEST = 6000  # px of a screenshot

# Runs before the page's own scripts. Whatever the policy forbids is asked of the outside, and told.
WATCH = """<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"><script>
window.told = [];
addEventListener("error", (event) => told.push(`script: ${event.message}`));
addEventListener("unhandledrejection", (event) => told.push(`script: ${event.reason}`));
addEventListener("securitypolicyviolation", (event) => told.push(`asks for ${event.blockedURI}`));
console.error = (...words) => told.push(`console: ${words.join(" ")}`);
</script>"""

# In the frame's parent: what is seen when all is there, then opened.
ASK = """
const frame = document.querySelector("iframe"), { contentDocument: page, contentWindow: window_ } = frame;
const told = window_.told;
const wide = (when) => {
  const width = page.documentElement.scrollWidth;
  if (width > frame.clientWidth) told.push(`${when}, the page is ${width} px wide in ${frame.clientWidth}`);
};
wide("as it opens");
const height = page.documentElement.scrollHeight;
const explorer = page.querySelector(".explorer");
if (explorer) {
  const seen = () => [...explorer.querySelectorAll(".round")].findIndex((round) => !round.hidden);
  explorer.closest("details:not(.explorer)").open = true;
  explorer.querySelector("button:last-of-type").click();
  const first = seen();
  page.body.dispatchEvent(new window_.KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  const second = seen();
  page.body.dispatchEvent(new window_.KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true }));
  if (first !== 1 || second !== 2 || seen() !== 1) told.push(`rounds turn to ${[first, second, seen()]}, not 1,2,1`);
}
page.querySelectorAll("details").forEach((details) => { details.open = true; });
wide("all opened");
page.querySelectorAll(".wide").forEach((table) => {
  const name = table.querySelector("td.name"), edge = table.getBoundingClientRect();
  if (!name) return;
  table.scrollLeft = table.scrollWidth;
  const { left, width: taken } = name.getBoundingClientRect();
  if (left < edge.left - 1) told.push(`the names of “${table.ariaLabel}” scroll away`);
  if (taken > edge.width / 2) told.push(`the names of “${table.ariaLabel}” take ${taken} of ${edge.width} px`);
  table.scrollLeft = 0;
});
const pointed = page.querySelector(".crowded > .legend span:last-of-type");
if (pointed) {
  const stroke = (series) => window_.getComputedStyle(page.querySelector(`.crowded svg .${series}`)).stroke;
  const series = pointed.className.match(/n[0-9]+/)[0], grey = stroke(series);
  pointed.focus();
  if (stroke(series) === grey || stroke("n1") !== grey) told.push(`${pointed.innerText} is not lit alone`);
}
document.body.dataset.told = JSON.stringify({ told, height, explorer: !!explorer });
"""


def look(page: Path, out: Path) -> list[str]:
    """What is wrong with the page; leaves its screenshots in `out`."""
    if (browser := find_browser()) is None:
        sys.exit(f"error: none of {', '.join(BROWSERS)} found; on Debian: apt-get install chromium")
    out.mkdir(parents=True, exist_ok=True)
    wrong = []
    with TemporaryDirectory() as folder:
        for name, width in WIDTHS.items():
            frame = Path(folder) / f"{name}.html"
            told = asked(browser, page, frame, width)
            wrong += [f"{name}: {words}" for words in dict.fromkeys(told["told"])]
            height = min(told["height"], TALLEST)
            frame.write_text(framed(page.read_text(encoding="utf-8"), width, height, ""), encoding="utf-8")
            for scheme, number in (("light", 1), ("dark", 0)):
                picture = out / f"{name}-{scheme}.png"
                options = [f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={number}"]
                run(browser, frame, width, height, *options)
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


def asked(browser: str, page: Path, frame: Path, width: int) -> dict:
    """What the script in the parent of the page's frame noted; writes the parent as `frame`."""
    frame.write_text(framed(page.read_text(encoding="utf-8"), width, 900, ASK), encoding="utf-8")
    dom = run(browser, frame, width, 900, "--dump-dom", "--virtual-time-budget=5000")
    if not (found := re.search(r'data-told="([^"]*)"', dom)):
        raise RuntimeError(f"the page did not load: {dom[:300]!r}")
    return json.loads(html.unescape(found[1]))


def run(browser: str, frame: Path, width: int, height: int, *options: str) -> str:
    """Chromium without a window, on a file."""
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    command = [browser, *common, *options, frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{browser} failed with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/look"))
    given = parser.parse_args()
    page = given.page or given.out / "report.html"
    if given.page is None:
        write_lab(given.out / "lab")
        report(str(given.out / "lab"), out=str(page), reference="eagle")
    wrong = look(page, given.out)
    print(
        "\n".join(wrong)
        or f"nothing wrong; look at {', '.join(str(given.out / f'{name}-light.png') for name in WIDTHS)}"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
