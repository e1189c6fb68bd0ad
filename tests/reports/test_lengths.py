"""τ by output position, input length and category: rounds counted one by one give the same."""

from dataclasses import replace
from statistics import fmean

import pytest

from poss_lightning.evaluation.records import Record, to_line
from poss_lightning.reports.findings import find
from poss_lightning.reports.lengths import by_category, by_input, by_position, length_tables
from poss_lightning.reports.summary import group
from tests.support.synthetic import make_records


def answer(accepted: list[int], prompt_tokens: int = 10, **fields) -> Record:
    tokens = [1] * (1 + sum(accepted) + len(accepted))
    plain = make_records(methods=("eagle",))[0]
    lengths = {"tokens": tokens, "new_tokens": len(tokens), "pieces": None, "prompt_tokens": prompt_tokens}
    return replace(plain, accepted=accepted, **lengths, **fields)


def test_a_round_stands_where_it_began():
    record = answer([3] * 40)  # rounds begin at 1, 5, 9, … 157
    columns = [column for column, _ in by_position(record)]
    assert columns == [0] * 8 + [32] * 8 + [64] * 16 + [128] * 8
    assert [accepted for _, accepted in by_position(record)] == record.accepted


def test_inputs_stand_by_their_length():
    columns = {length: next(by_input(answer([1], length)))[0] for length in (1, 127, 128, 255, 256, 511, 512, 33000)}
    assert columns == {1: 0, 127: 0, 128: 128, 255: 128, 256: 256, 511: 256, 512: 512, 33000: 32768}


def test_questions_without_a_category_stand_nowhere():
    assert not list(by_category(answer([1, 2])))
    assert list(by_category(answer([1, 2], category="maths"))) == [("maths", 1), ("maths", 2)]


def test_the_table_is_what_counting_gives():
    records = make_records(methods=("eagle", "poss-1"))
    records = [replace(each, prompt_tokens=100 * (each.turn + 1), category=each.suite) for each in records]
    position, length, category = length_tables(group(records), resamples=20)
    for table, cut in ((position, by_position), (length, by_input), (category, by_category)):
        for (name,), cells in table.rows:
            own = [one for record in records if record.method == name for one in cut(record)]
            columns = sorted({column for column, _ in own})
            shown = [f"{fmean(accepted + 1 for at, accepted in own if at == column):.2f}" for column in columns]
            assert [cell.text for cell in cells] == shown and all(cell.notes for cell in cells)
    assert [column for (column,) in position.columns] == ["0–31", "32–"]
    assert [column for (column,) in length.columns] == ["0–127", "128–"]
    assert [column for (column,) in category.columns] == ["chat", "code"]


def test_what_never_varies_has_no_table(tmp_path):
    assert not length_tables({"eagle": {("chat", 0, 0, 0): answer([1, 2])}})


@pytest.mark.parametrize("long", [1, 2])
def test_a_column_of_one_or_two_prompts_has_no_interval(long):
    answers = {("chat", place, 0, 0): answer([1] * 30) for place in range(long)}
    answers |= {("chat", 8, 0, 0): answer([1, 2]), ("chat", 9, 0, 0): answer([0, 2])}
    ((_, (short, rest)),) = length_tables({"eagle": answers})[0].rows
    assert short.notes and rest.text == "2.00" and not rest.notes


def test_prompts_without_a_round_there_lend_a_column_no_certainty(tmp_path):
    """Three long answers among 57 short ones: their interval is as wide as without the short ones."""
    long = {("chat", place, 0, 0): answer([1] * 14 + [level] * 30) for place, level in enumerate((1, 2, 4))}
    short = {("chat", place, 0, 0): answer([place % 3, 1]) for place in range(3, 60)}
    widths = []
    for answers in (long, long | short):
        ((_, cells),) = length_tables({"eagle": answers}, resamples=4000)[0].rows
        low, high = map(float, cells[1].notes[0].split("…"))
        widths.append(high - low)
    assert 0.8 < widths[1] / widths[0] < 1.25


def test_compare_shows_them(tmp_path):
    (tmp_path / "records.jsonl").write_text("".join(to_line(record) + "\n" for record in make_records()))
    titles = [table.title for table in find(tmp_path, resamples=20).tables]
    assert "τ micro by output position (tokens before the round)" in titles
