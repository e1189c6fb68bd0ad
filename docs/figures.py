"""`python docs/figures.py` draws the figures of the documentation from committed records; report.png is a screenshot.

    python docs/figures.py             # writes docs/figures/*.svg; after `make demo`, and with Chromium, report.png
    python docs/figures.py --decode    # first decodes the example answer again into docs/figures/rounds.jsonl.gz

Every number comes from the functions that `poss compare` uses. The mask is computed by the unroll's attention, slot by
slot. The tree and the text are rounds of one real answer.
"""

import argparse
import gzip
import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

matplotlib.use("svg")  # needs no display
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from poss_lightning import plots
from poss_lightning.draft.attention import Packing, attend
from poss_lightning.evaluation.tree_view import DraftedTree, drafted_tree, most_likely_nodes
from poss_lightning.files import atomic
from poss_lightning.plots import INK, QUIET
from poss_lightning.reports.page import last_by_depth
from poss_lightning.reports.results import results
from poss_lightning.reports.scalars import group_by_choice, read_scalars

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
QUESTION, DRAFT, LIMIT = "Why is the sky blue?", "embedded-poss2", 64  # the example answer
ROUND = 6  # the round that is drawn, from 0
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
NODES = 16  # nodes of the tree to draw
NAMES = {"depth-1": "depth 1", "hass": "HASS", "poss1": "PosS-1", "poss2": "PosS-2", "poss3": "PosS-3"}
COLOURS = dict(zip(NAMES.values(), ("#7f7f7f", "#d95f02", "#1b9e77", "#1f5fbf", "#8e44ad"), strict=True))
ACCEPTED, BONUS = "#1b7f3b", "#1f5fbf"
MONOSPACED = {"family": "DejaVu Sans Mono", "fontsize": 9}


def acceptance() -> Figure:
    """Draw pos-acc by position: the shipped drafts over prompts, and the methods over trainings and prompts."""
    panels = {
        "shipped drafts, one training each,\n120 questions, 60-node trees": "shipped/eval",
        "80 steps from one trained layer,\n5 trainings each": "methods",
    }
    drawn = {}
    for title, folder in panels.items():
        found = results(ROOT / "experiments" / folder).query("suite == 'all' and measure == 'pos_acc'")
        shares = {name: {row.position: row for row in own.itertuples()} for name, own in found.groupby("method")}
        drawn[title] = {NAMES[name]: shares[name] for name in NAMES if name in shares}
    return plots.curves(drawn, "draft position k", "pos-acc (95 % intervals)", share=True, colours=COLOURS)


def drift() -> Figure:
    """Draw the relative L2 distance of the draft's feature to the target's, by depth, over each choice's trainings."""
    choices = group_by_choice(read_scalars(ROOT / "experiments" / "methods"))
    drawn = {NAMES[name]: last_by_depth(choices[name], "val_drift_l2") for name in NAMES}
    panels = {"80 steps from one trained layer, 5 trainings each": drawn}
    label = "drift: relative L2 (95 % intervals)"
    return plots.curves(panels, "depth of the pass", label, colours=COLOURS)


def tree() -> Figure:
    """Draw one round of the example answer: drafted tokens, the accepted path, and the bonus token."""
    tree = _rounds()[ROUND]
    shown = sorted(most_likely_nodes(tree, NODES))
    places = _places(tree, shown)
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for node in shown:
        x, y = places[node]
        accepted = node in tree.path
        if node:
            _edge(axes, places[tree.parents[node]], (x, y), ACCEPTED if accepted else "#c9c9c9", accepted)
        below = "root" if not node else f"{100 * math.exp(tree.scores[node]):.0f} %"
        _token(axes, (x, y), tree.tokens[node], below, ACCEPTED if accepted else QUIET)
    if tree.bonus is not None:
        last = places[tree.path[-1]]
        taken = any(node and tree.parents[node] == tree.path[-1] for node in shown)
        place = (last[0] + 1, min(y for _, y in places.values()) - 1 if taken else last[1])
        _edge(axes, last, place, BONUS, True)
        _token(axes, place, tree.bonus, "bonus", BONUS)
    accepted = len(tree.path) - 1
    axes.set_title(
        f"One round of “{QUESTION}”: {len(tree.tokens) - 1} tokens drafted, {len(shown) - 1} shown, "
        f"{accepted} accepted,\n"
        f"and one more token from the target: {accepted + 1} tokens for one forward pass of the target",
        fontsize=10,
    )
    axes.margins(0.07, 0.12)
    axes.axis("off")
    return figure


def answer() -> Figure:
    """Draw the whole example answer, each token in the colour of its origin."""
    rounds = _rounds()
    pieces = [(rounds[0].tokens[0], BONUS)]
    for tree in rounds:
        pieces += [(tree.tokens[node], ACCEPTED) for node in tree.path[1:]]
        pieces += [(tree.bonus, BONUS)] if tree.bonus is not None else []
    figure, axes = plt.subplots(figsize=(9, 1.7))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    columns, row, column = 110, 0, 0  # a monospaced page
    axes.set(xlim=(0, columns + 2), ylim=(7.6, -0.6))
    axes.axis("off")
    for piece, colour in pieces:
        if column + len(piece) > columns or piece.strip(" ") == "\n":
            row, column = row + 1, 0
        word = piece.strip("\n")
        word = word.lstrip() if column == 0 else word
        axes.text(column, row, word, color=colour, weight="bold", **MONOSPACED)
        column += len(word)
    accepted = sum(len(one.path) - 1 for one in rounds)
    axes.text(0, row + 2, f"green: {accepted} tokens drafted and accepted", color=ACCEPTED, fontsize=9, weight="bold")
    axes.text(
        45,
        row + 2,
        f"blue: {len(pieces) - accepted} tokens of the target itself, one per forward pass",
        color=BONUS,
        fontsize=9,
        weight="bold",
    )
    return figure


def mask() -> Figure:
    """Draw which key set a query reads, by the weights that `attend` gives in passes 1 to 4."""
    slots = 6
    figure, panels = plt.subplots(1, 4, figsize=(10, 3.4), layout="constrained")
    palette = ["#dbe6f6", "#f9d8b8", "#cfe8d5", "#e3d3ef"]
    for place, axes in enumerate(panels, 1):
        for t, row in enumerate(key_sets(place, slots)):
            for s, which in enumerate(row):
                colour = "#ffffff" if which is None else palette[which]
                axes.add_patch(plt.Rectangle((s, t), 1, 1, facecolor=colour, edgecolor="#bbbbbb", linewidth=0.6))
                if which is not None:
                    axes.text(s + 0.5, t + 0.54, str(which), ha="center", va="center", fontsize=9, color=INK)
        axes.set(xlim=(0, slots), ylim=(slots, 0), title=f"pass {place}", aspect="equal", xlabel="key slot s")
        axes.set_xticks([s + 0.5 for s in range(slots)], range(slots))
        axes.set_yticks([t + 0.5 for t in range(slots)], range(slots))
        axes.tick_params(length=0, labelsize=8)
        axes.grid(False)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("query slot t")
    figure.suptitle("number i: the key comes from z after pass i; white: hidden before the softmax", fontsize=10)
    return figure


def key_sets(number: int, slots: int) -> list[list[int | None]]:
    """The pass that each visible key of pass `number` comes from, by query slot and key slot; None where it is hidden.

    Values are one-hot, so `attend` returns the weight of every key. Rows t < number - 1 do not exist and stay empty.
    """
    zero = torch.zeros(1, 1, slots, number * slots)
    sets = torch.eye(number * slots).view(number, 1, 1, slots, -1)  # value of slot s in set i: 1 at i * slots + s
    diagonals = [(zero, sets[number - 1 - i]) for i in range(number - 1)]
    weights = attend(zero, (zero, sets[0]), diagonals, Packing.one_per_row(1, slots, torch.device("cpu")))
    visible = weights[0, 0].view(slots, number, slots) > 0  # (t, set, s)
    return [
        [next((i for i in range(number) if visible[t, i, s]), None) if t >= number - 1 else None for s in range(slots)]
        for t in range(slots)
    ]


def data_path() -> Figure:
    """Draw the path from text to report, with the command of every arrow."""
    figure, axes = plt.subplots(figsize=(10, 3.3), layout="constrained")
    axes.set(xlim=(0, 10.5), ylim=(0.1, 3.4))
    axes.axis("off")
    boxes = {
        "text": (0.1, 2.2, "conversations", "JSON lines"),
        "store": (2.35, 2.2, "feature store", "tokens, f(t), embedding,\nLM head of the target"),
        "fit": (4.75, 2.2, "unroll", "K passes, losses,\ndrift by depth"),
        "draft": (6.95, 2.2, "draft folder", "config.json,\nsafetensors"),
        "logs": (4.75, 0.35, "TensorBoard", "scalars, drift,\nacceptance"),
        "rounds": (6.95, 0.35, "rounds", "one row per prompt\nand repeat"),
        "report": (9.0, 0.35, "tables, report", "intervals, curves,\nrounds"),
    }
    for x, y, name, about in boxes.values():
        axes.add_patch(
            FancyBboxPatch((x, y), 1.35, 0.85, boxstyle="round,pad=0.06", facecolor="#f3f6fb", edgecolor=BONUS)
        )
        axes.text(x + 0.675, y + 0.68, name, ha="center", va="center", fontsize=10, weight="bold", color=INK)
        axes.text(x + 0.675, y + 0.25, about, ha="center", va="center", fontsize=7.5, color="#555555")
    arrows = [
        ((1.55, 2.65), (2.25, 2.65), "poss extract"),
        ((3.8, 2.65), (4.65, 2.65), "poss fit"),
        ((6.2, 2.65), (6.85, 2.65), ""),
        ((5.42, 2.1), (5.42, 1.32), ""),
        ((7.62, 2.1), (7.62, 1.32), "poss benchmark,\nposs replay"),
        ((8.4, 0.78), (8.92, 0.78), ""),
    ]
    for start, end, label in arrows:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2})
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        upright = start[0] == end[0]
        axes.text(
            middle[0] + (0.1 if upright else 0),
            middle[1] + (0 if upright else 0.58),
            label,
            ha="left" if upright else "center",
            va="center",
            fontsize=8,
            family="DejaVu Sans Mono",
            color=INK,
        )
    axes.text(9.68, 1.45, "poss compare", ha="center", fontsize=8, family="DejaVu Sans Mono", color=INK)
    axes.text(0.1, 1.75, "poss synthesize writes\nthem with the target", fontsize=8, color="#555555", va="top")
    return figure


def _rounds() -> list[DraftedTree]:
    lines = gzip.decompress((FIGURES / "rounds.jsonl.gz").read_bytes()).splitlines()
    return [DraftedTree(**{name: json.loads(line)[name] for name in DraftedTree._fields}) for line in lines]


def _places(tree: DraftedTree, shown: Sequence[int]) -> dict[int, tuple[float, float]]:
    """(depth, row) of each node: leaves below each other, most likely first; a parent in the row of its first child."""
    places: dict[int, tuple[float, float]] = {}
    rows = iter(range(len(shown)))

    def put(node: int, depth: int) -> float:
        children = sorted((n for n in shown if n and tree.parents[n] == node), key=lambda n: -tree.scores[n])
        heights = [put(child, depth + 1) for child in children]
        places[node] = (depth, heights[0] if heights else -next(rows))
        return places[node][1]

    put(0, 0)
    return places


def _edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, strong: bool) -> None:
    axes.plot(*zip(start, end, strict=True), color=colour, linewidth=2 if strong else 1, zorder=1)


def _token(axes: Axes, place: tuple[float, float], token: str, below: str, colour: str) -> None:
    word = token.strip() or repr(token)
    axes.text(
        *place,
        word,
        ha="center",
        va="center",
        fontsize=10,
        color=colour,
        zorder=2,
        weight="normal" if colour == QUIET else "bold",
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 0.8},
    )
    axes.text(place[0], place[1] - 0.46, below, ha="center", va="center", fontsize=7, color=colour, zorder=2)


def decode() -> None:
    """Decode the example answer with the embedded target in float32, and write its rounds."""
    from poss_lightning.decoding.decoder import Progress
    from poss_lightning.decoding.engine import Speculative
    from poss_lightning.decoding.plans import TreePlan
    from poss_lightning.draft.kinds import load_draft
    from poss_lightning.sampling import Sampling
    from poss_lightning.target_model.model import Target

    target = Target.load("embedded", "float32", "cpu")
    engine = Speculative.from_draft(target, load_draft(DRAFT), TreePlan(tree="fixed"))
    rounds: list[DraftedTree] = []

    def watch(step: Progress) -> None:
        if step.tree is not None:
            tokens, parents, scores, path, bonus = drafted_tree(step, target.chat.stops)
            texts = [str(target.tokenizer.decode([token])) for token in tokens]
            last = None if bonus is None else str(target.tokenizer.decode([bonus]))
            rounds.append(DraftedTree(texts, parents, [round(score, 4) for score in scores], path, last))

    prompt = target.chat.prompt([{"role": "user", "content": QUESTION}])
    (decoded,) = engine.decode([prompt], LIMIT, sampling=Sampling(), generator=torch.Generator(), watch=watch)
    print(f"{len(decoded.tokens)} tokens in {len(rounds)} rounds")
    text = "".join(json.dumps(one._asdict(), ensure_ascii=False) + "\n" for one in rounds)
    with atomic(FIGURES / "rounds.jsonl.gz") as part:
        part.write_bytes(gzip.compress(text.encode(), mtime=0))


def screenshot() -> Path | None:
    """Write the top of the report of `make demo` as Chromium shows it; None without Chromium or report."""
    browser, page = next(filter(None, map(shutil.which, BROWSERS)), None), ROOT / "runs" / "demo" / "report.html"
    if browser is None or not page.exists():
        return print(f"no report.png: it needs {page}, which `make demo` writes, and one of {', '.join(BROWSERS)}")
    file = FIGURES / "report.png"
    with TemporaryDirectory() as folder:
        image = Path(folder) / "report.png"
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1600")
        subprocess.run([browser, *options, f"--screenshot={image}", page.as_uri()], check=True, capture_output=True)
        Image.open(image).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
    return file


def main() -> None:
    """Write the named figures, or all; with --decode, decode the example answer first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", action="store_true", help="decode the example answer again first")
    parser.add_argument("names", nargs="*", help="figures to write (default: all)")
    options = parser.parse_args()
    FIGURES.mkdir(exist_ok=True)
    if options.decode:
        decode()
    draw = {each.__name__: each for each in (acceptance, drift, tree, answer, mask, data_path)}
    with plt.rc_context(plots.STYLE | {"font.family": "DejaVu Sans", "figure.facecolor": "white"}):
        for name in options.names or draw:
            file = FIGURES / f"{name}.svg"
            draw[name]().savefig(file, metadata={"Date": None})
            _print_size(file)
    if not options.names and (file := screenshot()):
        _print_size(file)


def _print_size(file: Path) -> None:
    print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
