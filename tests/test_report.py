"""The tables in the terminal and the HTML page: what they show, and what they must never hold."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from synthetic import make_records
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.evaluation.charts import Curve, line_chart
from poss_lightning.evaluation.compare import compare
from poss_lightning.evaluation.records import to_line
from poss_lightning.evaluation.report import report, spans
from poss_lightning.evaluation.scalars import by_depth, read_scalars
from poss_lightning.evaluation.summary import summarise


@pytest.fixture
def run(tmp_path):
    """A folder of records, one text of which tries to break out of the page."""
    records = make_records()
    evil = {"text": "<script>alert(1)</script>", "pieces": None}
    records = [replace(r, **evil) if r.method == "eagle" and r.id == 0 else r for r in records]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "records.jsonl").write_text("".join(to_line(record) + "\n" for record in records))
    facts = {"methods": {"poss-1": {"depth": 6}}, "device": "cpu & two <cores>", "command": ["poss", "benchmark"]}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder, records


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
    """Fails where a tag is closed that is not open."""

    void = ("meta", "br", "line", "circle", "rect", "polyline")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
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
    for words in ("Acceptance by position", "cosine to the target", "Validation loss of", "poss benchmark"):
        assert words in page
    gain = rows[3].speed_gain
    assert "speed over<br>eagle" in page and f"<b>{gain.text()}</b><small>{gain.interval()}</small>" in page


def test_speed_against_the_reference_has_one_column_or_none(tmp_path, capsys, monkeypatch, run):
    monkeypatch.setenv("COLUMNS", "100")
    for reference in (None, "generate"):  # none named; one that has its column already
        page = write_page(tmp_path, str(run[0]), reference=reference)
        compare(str(run[0]), reference=reference, resamples=50)
        assert "speed over<br>" not in page and capsys.readouterr().out.count("× generate") == 1


def test_the_page_is_complete_in_itself_and_well_formed(tmp_path, run, training):
    page = write_page(tmp_path, [str(run[0])], [str(training)])
    assert not re.search(r"https?:|\ssrc\s*=|\shref\s*=|@import|url\(", page)
    balance = Balance()
    balance.feed(page)
    assert not balance.open
    assert not balance.seen & {"script", "link", "img", "iframe", "object"}


def test_text_from_models_and_machines_is_escaped(tmp_path, run):
    page = write_page(tmp_path, str(run[0]))
    assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "cpu &amp; two &lt;cores&gt;" in page


def test_sections_without_matter_are_left_out(tmp_path):
    records = make_records(methods=("autoregressive",), suites=("chat",))
    (tmp_path / "records.jsonl").write_text("".join(to_line(record) + "\n" for record in records))
    page = write_page(tmp_path, str(tmp_path))
    assert "No method here drafts" in page
    for words in ("Acceptance by position", "By suite", "<h2>Training", "was made"):
        assert words not in page


def test_a_failing_report_leaves_the_old_page(tmp_path, run):
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(ValueError, match="baseline is 'plain'"):
        write_page(tmp_path, str(run[0]), baseline="plain")
    assert (tmp_path / "page.html").read_text() == "old" and not list(tmp_path.glob(".page*"))


def test_spans_are_the_rounds():
    record = next(record for record in make_records() if record.method == "eagle")
    short = replace(record, accepted=[2, 0], new_tokens=5, tokens=[0] * 5, pieces=["a", "b", "\n", "c", "d"])
    cut = [(span.kind, span.text, span.strength) for span in spans(short, depth=4)]
    assert cut == [("plain", "a", 0), ("accepted", "b↵\n", 0.5), ("bonus", "c", 0), ("bonus", "d", 0)]
    assert [span.kind for span in spans(replace(short, pieces=None), depth=4)] == ["plain"]


def test_a_cut_round_has_no_bonus():
    record = next(record for record in make_records() if record.method == "eagle")
    facts = {"accepted": [0, 3], "new_tokens": 4, "tokens": [0] * 4, "pieces": list("abcd")}
    found = [(span.kind, span.text, span.strength) for span in spans(replace(record, **facts), depth=4)]
    assert found == [("plain", "a", 0), ("bonus", "b", 0), ("accepted", "cd", 0.75)]


def test_spans_hold_every_piece_once():
    for record in make_records():
        assert "".join(span.text for span in spans(record, 3)).split() == record.text.split()


def test_scalars_by_depth_are_in_order_of_number(training):
    (own,) = read_scalars(training).values()
    drift = by_depth(own, "val_drift_cosine")
    assert list(drift) == list(range(1, 13))  # not 1, 10, 11, 12, 2, ...
    assert drift[2] == [(10, pytest.approx(0.8)), (20, pytest.approx(0.9))]


def test_a_missing_training_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        read_scalars(tmp_path / "nowhere")


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [float("nan"), 0.2], [float("nan")], [1e-7, 3e6]])
def test_charts_of_odd_values_stay_inside_the_drawing(values):
    drawn = line_chart([Curve("<a>", range(1, len(values) + 1), values)], "position", "share", whole=True)
    assert "nan" not in drawn and "<a>" not in drawn
    assert all(0 <= float(y) <= 230 for y in re.findall(r'(?:y1|y2|cy)="([^"]+)"', drawn))


def test_compare_prints_tables_that_fit_100_columns(capsys, monkeypatch, run):
    monkeypatch.setenv("COLUMNS", "100")
    compare(str(run[0]), reference="eagle", resamples=50)
    out = capsys.readouterr().out
    assert "× eagle" in out
    assert max(map(len, out.splitlines())) <= 100
    row = next(row for row in summarise(run[1], resamples=50) if row.method == "poss-1")
    for words in ("Tokens a round", "pos-acc by position", "Speed", "By suite", "10 prompts", row.tau_micro.text()):
        assert words in out
    assert "…\n" not in out and "poss-1" in out  # nothing cut short
