"""The tables in the terminal and the HTML page: what they show, and what they must never hold."""

import json
import math
import re
import shutil
from collections import Counter
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import escape
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.evaluation.cells import pack
from poss_lightning.evaluation.drawing import Guesses, likeliest_nodes
from poss_lightning.evaluation.records import read_cells
from poss_lightning.evaluation.rounds import NAME, Round, to_line
from poss_lightning.reports.charts import COLOURS, CROWDED, MARKED, Curve, line_chart
from poss_lightning.reports.compare import compare
from poss_lightning.reports.explorer import NODES, Node, spans, steps
from poss_lightning.reports.figures import forest_figure
from poss_lightning.reports.findings import Effects, choose_cells, find, write_headline, write_verdicts
from poss_lightning.reports.report import describe_runs, name_records, report
from poss_lightning.reports.scalars import group_by_choice, mean, mean_over_runs, read_scalars, series_by_depth
from poss_lightning.reports.seeds import summarise_seeds
from poss_lightning.reports.statistics import Estimate, Ratio, difference
from poss_lightning.reports.summary import summarise
from tests.support import look
from tests.support.lab import CHOICES, DEPTH, SEEDS, STEPS, made_rounds, write_events, write_lab, write_records
from tests.support.synthetic import make_records


@pytest.fixture
def run(tmp_path):
    """A folder of records and rounds, some text of which tries to break out of the page."""
    records = make_records()
    evil = {"text": "<script>alert(1)</script>", "pieces": None}
    records = [replace(r, **evil) if r.method == "eagle" and r.id == 0 else r for r in records]
    folder = tmp_path / "run"
    facts = {"methods": {"poss-1": {"depth": 6}}, "device": "cpu & two <cores>", "command": ["poss", "benchmark"]}
    write_records(folder, records, facts)
    record = next(record for record in records if (record.method, record.id) == ("poss-1", 0))
    rounds = [Round("chat", 0, 0, "poss-1", number, made) for number, made in enumerate(made_rounds(record))]
    evil = rounds[0].guesses._replace(tokens=["</script><script>alert(2)</script>", *rounds[0].guesses.tokens[1:]])
    lines = map(to_line, [replace(rounds[0], guesses=evil), *rounds[1:]])
    (folder / NAME).write_text("\n".join(lines))
    return folder, records


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A sweep's folder, and the page over it."""
    folder = tmp_path_factory.mktemp("lab")
    write_lab(folder / "sweep")
    report(str(folder / "sweep"), out=str(folder / "page.html"), reference="eagle")
    return folder / "sweep", (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """The page over more choices than are coloured; the name of one has markup, and hass is the reference."""
    folder = tmp_path_factory.mktemp("crowd")
    for place, choice in enumerate(["<i>poss</i>", "hass", *"abcdefg"]):
        for seed in (0, 1):
            drawn = make_records(methods=("poss-1",), suites=("chat",), prompts=3, seed=7 * seed + place)
            cell = folder / "many" / choice.replace("/", "") / f"seed-{seed}"
            write_records(cell, [replace(record, method=cell.parent.name) for record in drawn], {"device": "cpu"})
            write_events(cell, seed, gain=0.01 * place)
    report(str(folder / "many"), out=str(folder / "page.html"), reference="hass")
    return folder / "page.html"


@pytest.fixture
def training(tmp_path):
    """A training run whose drift was looked at twice."""
    writer = SummaryWriter(str(tmp_path / "fit" / "version_0"))
    for step in (10, 20):
        for depth in range(1, 13):
            writer.add_scalar(f"val_drift_cosine/depth_{depth}", 1 - depth / step, step)
            writer.add_scalar(f"val_loss/depth_{depth}", depth / step, step)
    writer.close()
    return tmp_path / "fit"


class Balance(HTMLParser):
    """Fails where a tag is closed that is not open; counts tags and classes."""

    void = ("meta", "input", "line", "circle", "rect", "polyline", "polygon")

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.classes = [], Counter(), Counter()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.classes.update((dict(attrs).get("class") or "").split())
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag


def write_page(tmp_path, *args, **options):
    report(*args, out=str(tmp_path / "page.html"), resamples=50, **options)
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_shows_the_numbers(tmp_path, run, training):
    page = write_page(tmp_path, str(run[0]), str(training), reference="eagle")
    rows = [row for row in summarise(run[1], reference="eagle", resamples=50) if row.suite == "all"]
    best = max(rows[2:], key=lambda row: row.speed_up["autoregressive"].value)
    assert f"{best.method} decodes at {best.speed_up['autoregressive'].text()} times the speed" in page
    for row in rows[2:]:
        for value, form in ((row.tau_micro, ".2f"), (row.tau_macro, ".2f"), (row.tokens_per_second, ".1f")):
            assert f"<b>{value.text(form)}</b><small>{value.interval(form)}</small>" in page
    for words in ("pos-acc by position", "cosine to the target", "validation loss", "poss benchmark"):
        assert words in page
    for gain, form in ((rows[3].tau_macro_gain, "+.3f"), (rows[3].speed_gain, ".3f")):
        notes = (gain.interval(form), gain.significance(), f"{gain.detectable_text('.3f')}")
        assert f"<b>{gain.text(form)}</b>" + "".join(f"<small>{escape(note)}</small>" for note in notes) in page


def test_speed_against_the_reference_has_one_column_or_none(tmp_path, capsys, monkeypatch, run):
    monkeypatch.setenv("COLUMNS", "100")
    for reference in (None, "generate"):  # none named; one that has its column already
        page = write_page(tmp_path, str(run[0]), reference=reference)
        compare(str(run[0]), reference=reference, resamples=50)
        assert "<h2>Against" not in page and "Against" not in capsys.readouterr().out


def test_a_page_is_complete_in_itself_and_well_formed(tmp_path, run, training, lab):
    for page in (write_page(tmp_path, [str(run[0])], [str(training)]), lab[1]):
        assert not re.search(r"https?:|\ssrc\s*=|\shref\s*=|@import|url\(", page)
        assert "default-src 'none'" in page  # and the browser sees to it
        balance = Balance(page)
        assert not balance.open and balance.tags["script"] == balance.tags["style"] == 1
        assert not balance.tags.keys() & {"link", "img", "iframe", "object"}


def test_names_are_text_on_the_page_and_in_the_terminal(tmp_path, run, capsys):
    evil = "[red]<img src=x onerror=alert(3)>\x1b[2J\x00\x7f\x9b[/nothing]"
    records = [replace(record, method=evil) if record.method == "eagle" else record for record in run[1]]
    write_records(tmp_path / "evil", records, {})
    page = write_page(tmp_path, str(tmp_path / "evil"), reference=evil)
    assert "<img" not in page and str(escape("[red]<img src=x onerror=alert(3)>␛[2J␀␡\ufffd[/nothing]")) in page
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page)
    compare(str(tmp_path / "evil"), reference=evil, resamples=50)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "Against [red]<img" in shown


def test_text_from_models_and_machines_is_escaped(tmp_path, run):
    page = write_page(tmp_path, str(run[0]))
    assert page.count("<script>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "&lt;script&gt;alert(2)&lt;/script&gt;" in page
    assert "cpu &amp; two &lt;cores&gt;" in page


def test_sections_without_matter_are_left_out(tmp_path):
    write_records(tmp_path / "run", make_records(methods=("autoregressive",), suites=("chat",)), {})
    (tmp_path / "run" / "run.json").unlink()
    page = write_page(tmp_path, str(tmp_path / "run"))
    assert "No method here drafts" in page
    for words in (
        "pos-acc by position",
        "By suite",
        "Training, depth",
        "<h2>Against",
        "runs were made",
        'class="explorer"',
    ):
        assert words not in page


def test_a_page_is_named_like_one(run, tmp_path):
    with pytest.raises(ValueError, match=r"out is .*README.md; its name must end in .html"):
        report(str(run[0]), out=str(tmp_path / "README.md"))


def test_a_table_keeps_its_numbers_whole_on_a_narrow_terminal(run, capsys, monkeypatch):
    said = []
    for columns in ("40", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        compare(str(run[0]), reference="eagle", resamples=50)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_failing_report_leaves_the_old_page(tmp_path, run):
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(ValueError, match="baseline is 'plain'"):
        write_page(tmp_path, str(run[0]), baseline="plain")
    assert (tmp_path / "page.html").read_text() == "old" and not list(tmp_path.glob(".page*"))


# --- what was measured, when and where ---


def test_the_page_says_what_was_measured_of_which_target_when_and_where(tmp_path, run):
    facts = {
        "config": {"target": "smol<lm>"},
        "started": "2026-11-23T10:00:00+00:00",
        "machine": "EPYC",
        "device": "cpu",
    }
    write_records(tmp_path / "exp" / "one", run[1], facts)
    page = write_page(tmp_path, str(tmp_path / "exp" / "one" / "records.jsonl"))
    said = "target smol&lt;lm&gt; · 2026-11-23 · EPYC, cpu"
    assert f"<title>exp/one · {said}</title>" in page
    assert "<h1>exp/one</h1>" in page and f"Speculative decoding: {said}." in page


def test_several_runs_are_named_dated_and_placed_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert name_records(["a/hass", "a/poss2"]) == "a/hass, a/poss2" and name_records(".").endswith(tmp_path.name)
    runs = [{"started": f"2026-11-{day}T09:00:00+00:00", "device": "cpu", "config": None} for day in (24, 22, 23)]
    assert describe_runs(runs) == ["2026-11-22 to 2026-11-24", "cpu"]
    assert describe_runs([{}, {"config": {"target": "embedded"}}]) == ["target embedded"]


def test_how_runs_were_made_is_one_folded_list(lab, crowd):
    for page, runs in ((lab[1], len(CHOICES)), (crowd.read_text(), 9)):
        made = page[page.index("<h2>How these runs were made") : page.index("<footer>")]
        assert made.count("<h2>") == 1 and f"machine of {runs} runs</summary>" in made
        assert made.count("<dl>") == runs and "<details open" not in made


# --- the forest plot ---


def test_a_forest_has_the_reference_first_and_then_the_largest_effect():
    gains = {"<b>": difference(-0.09, 0.01, 30), "same": difference(0.0, 0.0, 30), "up": difference(0.0512, 0.001, 30)}
    gains |= {"unsure": difference(0.004, 0.01, 30), "alone": difference(0.1, math.nan, 0)}
    drawn = forest_figure(Effects("τ − hass", "hass", Estimate(2.9512, 2.9, 3.0), gains, "+z.3f")).chart
    rows = re.findall(r'<g class="effect (\w*)"><title>([^<]*)</title>(<line [^>]*>)?<circle cx="([^"]+)"', drawn)
    titles = ["hass: 2.951 the reference", "alone: +0.100", "up: +0.051 (+0.049…+0.053)", "unsure: +0.004 ("]
    titles += ["same: identical", "&lt;b&gt;: -0.090 (-0.110…-0.070)"]
    assert len(rows) == len(titles) and all(row[1].startswith(one) for row, one in zip(rows, titles, strict=True))
    assert [row[0] for row in rows] == ["", "", "larger", "", "", "smaller"]
    places = [float(row[3]) for row in rows]
    assert places[1:] == sorted(places[1:], reverse=True) and places[0] == places[4]  # no effect
    assert f'class="none" x1="{places[0]}"' in drawn and not rows[1][2]  # an interval that is not known is not drawn


def test_the_page_draws_the_differences_of_its_tables(lab):
    sweep, page = lab
    (one,) = [s for s in summarise_seeds(read_cells(str(sweep)), "eagle") if s.measure == "tau_macro" and s.gain][:1]
    forest = page[page.index("<h2>Against eagle</h2>") : page.index("<h2>Over training seeds")]
    assert forest.count("<figure>") == 2 and "τ macro − eagle" in forest and "speed-up × eagle" in forest
    assert f"poss-1: {one.gain.text('+.3f')} ({one.gain.interval('+.3f')})" in forest
    assert f'<g class="effect {one.gain.direction}">' in forest


def test_a_tie_has_no_winner_and_a_loss_is_none():
    tied = {name: difference(0.001, 0.01, 30) for name in "abcde"}
    effects = Effects("τ − hass", "hass", Estimate(3, 2, 4), tied | {"eagle": difference(-0.09, 0.01, 30)}, "+z.3f")
    said = "τ − hass, after Holm's correction: smaller for eagle; no difference shown for 5 of 6."
    assert write_verdicts(effects) == said
    same = effects._replace(gains={"a": difference(0.0, 0.0, 5), "b": difference(0.3, 0.01, 30)})
    assert write_verdicts(same).endswith(": larger for b; identical for a.")


# --- many choices ---


def test_many_curves_are_grey_but_for_the_reference_and_the_one_pointed_at(crowd, lab):
    page = crowd.read_text()
    section = page[page.index("<section") : page.index("</section>")]
    assert section.startswith('<section class="crowded referred">') and len(CHOICES) < CROWDED
    assert '<section class="crowded' not in lab[1]
    legend = re.findall(r'<span class="([^"]+)" tabindex="0">([^<]+)</span>', section)
    assert legend[0] == ("s0 n0", "hass") and section.count('class="legend"') == 1
    assert [name.split()[1] for name, _ in legend] == [f"n{place}" for place in range(9)]
    assert all(f".crowded:has(.n{place}:is(:hover, :focus)) svg g.n{place}" in page for place in range(9))
    assert "<i>" not in page


def test_charts_of_one_measure_have_the_same_axes(crowd):
    page = crowd.read_text()
    figures = re.findall(r"<figcaption>([^<]*)</figcaption>(.*?)</figure>", page, re.DOTALL)
    ticks: dict[tuple, set] = {}
    for title, chart in figures:
        by_step = f'aria-label="{title} by step"' in chart
        measure = "pos-acc" if title.startswith("pos-acc") and not by_step else title
        numbers = re.findall(r'<text class="(?:end|middle)"[^>]*>([-\d.e]+)</text>', chart)
        ticks.setdefault((measure, by_step), set()).add(tuple(numbers))
    assert len(figures) > 30 and all(len(different) == 1 for different in ticks.values())


@pytest.mark.skipif(look.find_browser() is None, reason="no Chromium here")
def test_a_browser_finds_nothing_wrong_on_a_phone(crowd, tmp_path):
    told = look.asked(look.find_browser(), crowd, tmp_path / "frame.html", look.WIDTHS["phone"])["told"]
    assert not told


def test_names_stay_beside_their_numbers_when_a_table_is_scrolled(run, tmp_path):
    page = write_page(tmp_path, str(run[0]), reference="eagle")
    assert "th.name, td.name { position: sticky; left: 0;" in page
    suites = page[page.index("<summary>By suite") :]
    suites = suites[: suites.index("</table>")]
    rows = re.findall(r"<tr([^>]*)><t[hd] class=\"name\">([^<]+)</t[hd]>", suites)
    groups = [name for kind, name in rows if "group" in kind]
    assert groups == ["chat", "code"] and all(row.count('class="name"') == 1 for row in suites.split("<tr")[1:])


# --- text and rounds ---


def test_an_answer_stands_under_its_question(tmp_path, run):
    forged = "<b>Why?</b> & **how**\n\x1b[2J</script>"
    records = [replace(record, question=forged if record.id == 0 else None) for record in run[1]]
    write_records(tmp_path / "asked", records, {})
    page = write_page(tmp_path, str(tmp_path / "asked"))
    assert page.count('<p class="question"') == 2  # the first prompt of two suites; older records have none
    first = page[page.index("<summary>chat, prompt 0") :]
    assert first.index(str(escape(forged.replace("\x1b", "␛")))) < first.index('<div class="answer">')


@pytest.mark.parametrize(("holm", "verdict"), [(0.116, "no difference shown"), (0.01, "faster")])
def test_the_headline_says_no_more_than_its_table(holm, verdict):
    """It tells of the fastest of all, so an interval that was not corrected for the choice would say too much."""
    gain = Ratio(1.10, 1.02, 1.19, 0.02, holm, 0.1, 0.04, 7)
    row = replace(summarise(make_records(), resamples=20)[0], method="poss-1", speed_up={"autoregressive": gain})
    assert f"1.10 times the speed of autoregressive (95 % interval 1.02…1.19): {verdict}. " in write_headline(
        [row], "autoregressive"
    )


@pytest.mark.parametrize("tree", ["auto", "fixed"])
def test_sized_trees_are_told(tmp_path, tree):
    write_records(tmp_path / "run", make_records(), {"config": {"tree": tree}})
    assert ("sized by their cost" in find(str(tmp_path / "run"), resamples=20).note) == (tree == "auto")


def test_spans_are_the_rounds():
    record = next(record for record in make_records() if record.method == "eagle")
    short = replace(record, accepted=[2, 0], new_tokens=5, tokens=[0] * 5, pieces=["a", "b", "\n", "c", "d"])
    cut = [(span.kind, span.text, span.strength, span.round) for span in spans(short, depth=4)]
    assert cut == [("plain", "a", 0, None), ("accepted", "b↵\n", 0.5, 0), ("bonus", "c", 0, 0), ("bonus", "d", 0, 1)]
    assert [span.kind for span in spans(replace(short, pieces=None), depth=4)] == ["plain"]


def test_a_cut_round_has_no_bonus():
    record = next(record for record in make_records() if record.method == "eagle")
    facts = {"accepted": [0, 3], "new_tokens": 4, "tokens": [0] * 4, "pieces": list("abcd")}
    found = [(span.kind, span.text, span.strength) for span in spans(replace(record, **facts), depth=4)]
    assert found == [("plain", "a", 0), ("bonus", "b", 0), ("accepted", "cd", 0.75)]


def test_spans_hold_every_piece_once():
    for record in make_records():
        assert "".join(span.text for span in spans(record, 3)).split() == record.text.split()


def rounds_of(record) -> list[Round]:
    return [
        Round(record.suite, record.id, record.turn, record.method, number, guesses)
        for number, guesses in enumerate(made_rounds(record))
    ]


def flat(node: Node) -> list[Node]:
    return [node, *(inner for child in node.below for inner in flat(child))]


def test_steps_tell_the_text_round_by_round():
    record = next(record for record in make_records() if record.method == "poss-1")
    said = record.pieces[0]
    for step, accepted in zip(steps(record, rounds_of(record)), record.accepted, strict=True):
        assert step.before == said[-160:] and step.taken == accepted
        said += step.accepted + step.bonus
        kinds = Counter(node.kind for node in flat(step.root))
        assert (kinds["root"], kinds["accepted"], kinds["bonus"]) == (1, accepted, 1)
        assert kinds["refused"] == step.drafted - accepted and not step.hidden
    assert said == "".join(record.pieces)
    assert len(steps(record, rounds_of(record), most=4)) == 4


def test_a_large_tree_is_cut_to_its_likeliest_nodes():
    record = replace(make_records()[2], accepted=[1], new_tokens=3, tokens=[0] * 3, pieces=["a", "b", "c"])
    guesses = Guesses(list(map(str, range(60))), [0] * 60, [0.0, *(-i / 10 for i in range(1, 60))], [0, 59], "c")
    (step,) = steps(record, [Round("chat", 0, 0, "eagle", 0, guesses)])
    shown = {int(node.token) for node in flat(step.root) if node.kind != "bonus"}
    assert shown == likeliest_nodes(guesses, NODES) and 59 in shown and len(shown) + step.hidden == 60
    assert [node.chance for node in step.root.below[:2]] == ["90", "82"]


def test_a_drafted_stop_token_stands_for_the_bonus():
    facts = {"accepted": [1], "new_tokens": 3, "tokens": [0] * 3, "pieces": ["a", "b", "<end>"]}
    record = replace(make_records()[2], **facts)
    guesses = Guesses(["a", "b", "<end>"], [0, 0, 1], [0.0, -1.0, -2.0], [0, 1, 2], None)
    (step,) = steps(record, [Round("chat", 0, 0, "eagle", 0, guesses)])
    assert (step.taken, step.accepted, step.bonus) == (2, "b<end>", "")
    assert [node.kind for node in flat(step.root)] == ["root", "accepted", "accepted"]


def test_rounds_of_another_answer_are_refused():
    record = next(record for record in make_records() if record.method == "poss-1")
    with pytest.raises(ValueError, match=r"rounds of 'poss-1', chat/0 turn 0, are not those of its record"):
        steps(record, rounds_of(record)[1:])


def test_every_recorded_round_of_what_is_shown_can_be_stepped_to(lab):
    sweep, page = lab
    cells = read_cells(str(sweep))
    shown = [r for c in CHOICES for r in cells[c, 0] if (r.method, r.id, r.turn, r.repeat) == (c, 0, 0, 0)]
    balance = Balance(page)
    assert balance.classes["explorer"] == len(shown) == 4  # two choices, the first prompt of two suites
    assert balance.classes["round"] == sum(len(record.accepted) for record in shown)
    assert page.count('<details class="explorer" open>') == 1


# --- several seeds ---


def test_a_sweep_is_one_page_over_seeds(lab):
    sweep, page = lab
    summaries = [one for one in summarise_seeds(read_cells(str(sweep)), "eagle") if one.suite == "all"]
    for one in summaries:
        if one.measure in ("tau_macro", "tau_micro", "speed_up"):
            notes = f"<small>{one.mean.interval()}</small><small>sd {one.deviation:.2f}</small>"
            assert f"<b>{one.mean.text()}</b>{notes}" in page
        if one.measure == "tau_macro" and one.gain:
            assert (
                f"<small>{escape(one.gain.significance())}</small><small>{one.gain.detectable_text('.3f')}</small>"
                in page
            )
            assert f"poss-1 has the largest τ by prompt, {one.mean.text()} over {SEEDS} seeds" in page
    assert f"{len(CHOICES)} choices, {len(CHOICES) * SEEDS} trainings" in page
    assert page.count("poss-1/seed-0</summary>") == 1 and "poss-1/seed-1" not in page


def test_runs_of_a_choice_are_one_curve_with_a_band(lab):
    _, page = lab
    loss = page[page.index("<figcaption>validation loss, all depths") :]
    loss = loss[: loss.index("</figure>")]
    assert len(STEPS) > MARKED and loss.count("<polyline") == loss.count("<polygon") == len(CHOICES)
    assert re.findall(r'<g class="([^"]+)"><title>([^<]+)', loss) == [("s1 n1", "poss-1"), ("s0 n0", "eagle")]


def test_one_legend_serves_all_charts_of_the_choices(lab):
    section = lab[1][lab[1].index("<section") : lab[1].index("</section>")]
    legend = re.findall(r'<span class="([^"]+)">([^<]+)</span>', section)
    assert legend == [("s0 n0", "eagle"), ("s1 n1", "poss-1")] and section.count("<figure>") > 4
    depths = lab[1][lab[1].index("Training, depth by depth") : lab[1].index("<h2>Decoded text")]
    assert re.findall(r"<span [^>]*>([^<]+)</span>", depths) == [f"depth {k}" for k in range(1, DEPTH + 1)]


def test_the_seed_shown_is_one_that_all_choices_have():
    cells = {("a", 1): [], ("a", 2): [], ("b", 2): [], ("b", 5): []}
    assert choose_cells(cells) == [("a", 2), ("b", 2)]
    assert choose_cells({("a", 3): [], ("a", 1): [], ("b", 2): []}) == [("a", 1), ("b", 2)]


def test_runs_are_named_by_what_their_folders_do_not_share():
    own = {"loss": [(1, 0.5)]}
    runs = {f"out/{choice}/seed-{seed}": own for choice in ("a", "b") for seed in (0, 1)}
    assert {name: len(found) for name, found in group_by_choice(runs).items()} == {"a": 2, "b": 2}
    assert group_by_choice({"x/hass": own, "x/y/eagle": own}).keys() == {"hass", "y/eagle"}
    assert group_by_choice({"x/hass": own}).keys() == {"hass"}
    again = {"out/a/seed-0/v0": {"loss": [(2, 0.2)]}, "out/a/seed-0/v1": {"loss": [(1, 0.5)], "tau": [(1, 2.0)]}}
    assert group_by_choice(again) == {
        "a": [{"loss": [(1, 0.5), (2, 0.2)], "tau": [(1, 2.0)]}]
    }  # one run, in two folders


def test_a_curve_over_runs_is_the_mean_where_all_have_come_and_its_t_interval():
    draw = np.random.default_rng(0)
    values = draw.normal(size=(4, 5))
    runs = [[(step, float(values[run, step])) for step in range(5 - (run == 2))] for run in range(4)]
    found = mean_over_runs([*runs[:3], [(0, 99.0), *runs[3]]])  # step 0 logged again
    assert list(found) == [0, 1, 2, 3]
    for step, one in found.items():
        own = values[:, step]
        low, high = stats.t.interval(0.95, 3, own.mean(), stats.sem(own))
        assert (one.value, one.low, one.high) == pytest.approx((own.mean(), low, high))
    assert mean([0.5]).value == 0.5 and not mean([0.5]).interval()
    assert mean_over_runs([]) == {}


def test_scalars_by_depth_are_in_order_of_number(training):
    (own,) = read_scalars(training).values()
    drift = series_by_depth(own, "val_drift_cosine")
    assert list(drift) == list(range(1, 13))  # not 1, 10, 11, 12, 2, ...
    assert drift[2] == [(10, pytest.approx(0.8)), (20, pytest.approx(0.9))]


def test_where_there_are_no_event_files_the_last_values_will_do(training, tmp_path):
    events = next(iter(read_scalars(training).values()))
    rows = [asdict(record) for record in make_records(methods=("poss-1",))]
    pack(tmp_path, "poss-1", 0, {"scalars": {tag: series[-1] for tag, series in events.items()}}, rows)
    cell = tmp_path / "cells/poss-1/seed-0"
    assert read_scalars(cell) == {str(cell): {tag: series[-1:] for tag, series in events.items()}}
    shutil.copytree(next(training.iterdir()), cell)
    assert list(read_scalars(cell).values()) == [events]  # event files say more
    shutil.rmtree(cell)
    pack(tmp_path, "poss-1", 0, {"scalars": {"val/loss": 1}}, rows)
    with pytest.raises(ValueError, match=r"poss-1/seed-0: scalars of cells\.jsonl are not a step and a value by tag"):
        read_scalars(cell)


def test_a_sweep_without_baselines_is_shown_without_speed(tmp_path):
    for seed in (0, 1):
        for choice in CHOICES:
            records = make_records(methods=(choice,), seed=seed)
            write_records(tmp_path / choice / f"seed-{seed}", records, {"methods": {}})
        page = write_page(tmp_path, str(tmp_path), reference="eagle")
        assert "largest τ by prompt" in page and "Milliseconds" not in page


def test_seconds_of_trainings_decoded_apart_are_not_drawn_side_by_side(tmp_path):
    for choice in CHOICES:
        write_records(tmp_path / choice / "seed-0", make_records(methods=("autoregressive", choice)), {"methods": {}})
    assert "Milliseconds" not in write_page(tmp_path, str(tmp_path), reference="eagle")
    write_records(tmp_path / "turns", make_records(methods=("autoregressive", *CHOICES)), {"methods": {}})
    assert "Milliseconds" in write_page(tmp_path, str(tmp_path / "turns"), reference="eagle")


def test_answers_of_two_temperatures_are_those_of_the_lower_with_its_rounds(run, tmp_path):
    folder, records = run
    facts = json.loads((folder / "run.json").read_text())
    write_records(tmp_path / "warm", make_records(seed=1), facts | {"config": {"temperature": 1.0}})
    other = [Round("chat", 0, 0, "poss-1", 0, made_rounds(records[-1])[0])]  # fits no answer of the first
    (tmp_path / "warm" / NAME).write_text("\n".join(map(to_line, other)))
    report([str(folder), str(tmp_path / "warm")], out=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "answers of T = 0" in page and "By temperature" in page and "poss-1, T = 1" in page


def test_replayed_rounds_are_shown_without_seconds_and_text(tmp_path):
    for choice in CHOICES:
        own = make_records(methods=(choice,))
        replayed = [replace(record, seconds={}, text="", pieces=None) for record in own]
        for folder in (tmp_path / "cells" / choice / "seed-0", tmp_path / "alone" / choice):
            write_records(folder, replayed, {"methods": {}})
    page = write_page(tmp_path, str(tmp_path / "cells"), reference="eagle")
    assert "Decoded text" not in page and "Milliseconds" not in page and "eagle" in page
    assert "Each method was trained once" in page  # so prompts are what chance has: an interval all the same
    page = write_page(tmp_path, [str(tmp_path / "alone" / choice) for choice in CHOICES], reference="eagle")
    assert "Replayed rounds, without seconds" in page and "same tokens as" not in page


def test_a_missing_training_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        read_scalars(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "values", [[0.5], [0.0, 0.0], [float("nan"), 0.2], [float("nan")], [1e-7, 3e6], [1e-12, 2e-12]]
)
def test_charts_of_odd_values_stay_inside_the_drawing(values):
    drawn = line_chart([Curve("<a>", 0, range(1, len(values) + 1), values)], "position", "share", integer_ticks=True)
    assert "nan" not in drawn and "<a>" not in drawn
    assert all(0 <= float(y) <= 230 for y in re.findall(r'(?:y1|y2|cy)="([^"]+)"', drawn))


def test_the_ninth_colour_is_the_first_one_dashed():
    curves = [Curve(str(place), place, [1, 2], [0.1, 0.2]) for place in range(COLOURS + 1)]
    drawn = line_chart(curves, "depth", "share", integer_ticks=True)
    assert [wears for wears in re.findall(r'<g class="([^"]*)"', drawn) if "s0" in wears] == ["s0 n8 dashed", "s0 n0"]


def test_compare_prints_tables_that_fit_100_columns(capsys, monkeypatch, run):
    monkeypatch.setenv("COLUMNS", "100")
    compare(str(run[0]), reference="eagle", resamples=50)
    out = capsys.readouterr().out
    assert "Against eagle" in out and "could see" not in out
    assert max(map(len, out.splitlines())) <= 100
    row = next(row for row in summarise(run[1], resamples=50) if row.method == "poss-1")
    for words in ("10 prompts", "Speed and acceptance", "pos-acc by position", "By suite", row.tau_micro.text()):
        assert words in out
    assert "…\n" not in out and "poss-1" in out  # nothing cut short
