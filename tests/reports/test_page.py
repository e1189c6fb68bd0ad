"""The page of `poss compare --html`: what it shows, and what it must never contain."""

import re
import shutil
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from markupsafe import escape
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

from poss_lightning.evaluation.record import write_run as write_json
from poss_lightning.reports.compare import compare
from poss_lightning.reports.page import split_rounds
from poss_lightning.reports.results import find
from poss_lightning.reports.scalars import (
    group_by_choice,
    last_values,
    mean,
    mean_by_step,
    read_scalars,
    series_by_depth,
)
from poss_lightning.reports.tables import overview, verdict
from tests.support.lab import write_run
from tests.support.synthetic import make_rows
from tests.support.tolerance import close

EVIL = "</script><script>alert(1)</script>\x00\x7f\x9b"


@pytest.fixture(scope="module")
def page(lab, tmp_path_factory):
    """The page over a sweep."""
    return page_of(lab, tmp_path_factory.mktemp("page"), reference="eagle")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The page over records whose every foreign text tries to break out, and whose names are of one machine."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    records = [r | {"method": EVIL if r["method"] == "eagle" else r["method"], "question": EVIL} for r in make_rows()]
    records = [r | {"pieces": [EVIL]} if r["method"] == "generate" else r for r in records]
    places = ["/home/SECRET/x y", "../SECRET/b"]
    facts = {
        "config": {"target": "/home/SECRET/target", "drafts": dict(enumerate(places))},
        "command": ["poss", *places, *(f"--drafts.a={place}" for place in places), f"[{','.join(places)}]"],
        "machine": EVIL,
        "started": "2026-11-23T10:00:00+00:00",
    }
    write_run(run, records, facts)
    return page_of(run, run.parent, reference=EVIL)


def page_of(records, folder, **options) -> str:
    compare(str(records), html=str(folder / "page.html"), **options)
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_page_is_self_contained_and_every_tag_is_closed(page, hostile):
    for html in (page, hostile):
        assert not re.search(r"https?:|@import|url\((?!#)|<[^>]*(src|href)=[\"'](?!#)", html)
        assert not re.search(r"<(script|link|img|iframe|object)\b", html)
        assert "default-src 'none'" in html  # the browser enforces it
        opened, closed = (Counter(re.findall(tag, html)) for tag in (r"<(\w+)\b[^>]*(?<!/)>", r"</(\w+)>"))
        assert opened == closed | {"meta": opened["meta"]} and closed["style"]


def test_foreign_texts_are_escaped_and_no_page_names_a_home(hostile):
    assert re.sub("[\x00\x7f\x9b]", "\ufffd", str(escape(EVIL))) in hostile
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", hostile)
    assert "SECRET" not in hostile and "target target · 2026-11-23" in hostile


def test_the_page_shows_the_numbers_of_the_terminal_and_answers_after_their_questions(lab, page):
    for texts in overview(find(lab, reference="eagle").results).itertuples(index=False):
        assert all(f"<td>{escape(text)}</td>" in page for text in texts)
    for words in ("τ macro − eagle", "pos-acc by position", "cosine to the target", "validation loss", "By suite"):
        assert words in page
    assert page.count('role="img"') == 3 + 1 + 5 + 1  # comparisons, acceptance, by depth, by step
    record = next(row for row in make_rows(("plain", "generate", "eagle")) if row["method"] == "eagle")
    first = page[page.index("<h2>Decoded text") :]
    assert first.index(record["question"]) < first.index('<div class="answer">')
    assert f"eagle: {record['new_tokens']} tokens in {len(record['accepted'])} rounds" in first


def test_a_benchmark_has_its_seconds_and_drafts_and_a_sweep_whose_seconds_were_measured_apart_none(run, page, tmp_path):
    turns = page_of(run, tmp_path, reference="eagle")
    assert "Milliseconds" in turns and "Milliseconds" not in page
    cells = re.findall("<td>(.*)</td>", turns[turns.index("How drafts are made") :])
    assert cells[:6] == ["eagle", "[6]", "1234567", "poss-1", "[1, 1]", ""]


def test_a_replay_has_no_speeds_and_its_page_no_empty_sections(tmp_path):
    replayed = [row | {"seconds": {}, "pieces": None} for row in make_rows(methods=("eagle",))]
    write_run(tmp_path / "run", replayed, {})
    (tmp_path / "run" / "run.json").unlink()
    page, found = page_of(tmp_path / "run", tmp_path), find(tmp_path / "run").results
    assert list(overview(found).columns) == ["method", "τ"] and not verdict(found, "plain")
    assert not any(words in page for words in ("Decoded text", "Milliseconds", "Training"))


def test_an_answer_whose_question_was_not_kept_is_shown_without_one(tmp_path):
    write_run(tmp_path / "run", [row | {"question": None} for row in make_rows()], {})
    first, _ = page_of(tmp_path / "run", tmp_path).partition("Decoded text")[2].partition('<div class="answer">')[::2]
    assert "nan" not in first and "What is" not in first


def test_spans_are_the_rounds_and_have_every_piece_once():
    short = split_rounds([2, 0], ["a", "b", "\n", "c", "d"])
    assert short == [("plain", "a"), ("accepted", "b↵\n"), ("bonus", "c"), ("bonus", "d")]
    cut = split_rounds([0, 3], list("abcd"))  # by the limit
    assert cut == [("plain", "a"), ("bonus", "b"), ("accepted", "cd")]
    for row in make_rows():
        assert "".join(text for _, text in split_rounds(row["accepted"], row["pieces"])) == "".join(row["pieces"])


def test_event_files_say_more_than_the_last_values_of_a_cell_and_choices_are_named_by_their_folders(tmp_path):
    training = tmp_path / "fit" / "version_0"
    with SummaryWriter(str(training)) as writer:
        for step, depth in product((10, 20), range(1, 13)):
            writer.add_scalar(f"val_drift_cosine/depth_{depth}", 1 - depth / step, step)
    (events,) = read_scalars(tmp_path / "fit").values()
    drift = series_by_depth(events, "val_drift_cosine")
    assert list(drift) == list(range(1, 13))  # not 1, 10, 11, 12, 2, ...
    assert close(drift[2], [(10, 0.8), (20, 0.9)], dtype=torch.float32)
    cell = tmp_path / "choice=poss-1" / "seed=0"
    write_json(cell, {"scalars": last_values(events)})
    (last,) = read_scalars(cell).values()
    assert last == {tag: [(0, float(f"{series[-1][1]:.5g}"))] for tag, series in events.items()}
    shutil.copytree(training, cell, dirs_exist_ok=True)
    assert list(read_scalars(cell).values()) == [events]
    runs = {f"out/choice={choice}/seed={seed}": last for choice in ("a", "b") for seed in (0, 1)}
    assert {name: len(found) for name, found in group_by_choice(runs).items()} == {"a": 2, "b": 2}
    assert group_by_choice({"x/hass": last, "x/y/eagle": last}).keys() == {"hass", "y/eagle"}


def test_a_curve_over_runs_is_the_mean_at_shared_steps_with_its_t_interval():
    values = np.random.default_rng(0).normal(size=(4, 5))
    runs = [{"tau": [(step, float(values[run, step])) for step in range(5 - (run == 2))]} for run in range(4)]
    runs[3]["tau"].insert(0, (0, 99.0))  # step 0 was logged again
    found = mean_by_step([*runs, {"loss": []}], "tau")
    assert list(found) == [0, 1, 2, 3]
    for step, one in found.items():
        own = values[:, step]
        ends = stats.t.interval(0.95, 3, own.mean(), stats.sem(own))
        assert close((one.value, one.low, one.high), (own.mean(), *ends), dtype=torch.float32)
    assert mean([0.5]).value == 0.5 and not mean([0.5]).interval() and mean_by_step(runs, "loss") == {}
