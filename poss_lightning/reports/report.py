"""`poss report`: one HTML page over benchmark records and training runs, complete in itself."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from poss_lightning import __version__
from poss_lightning.evaluation.records import BASELINES, Record, depths, read_cells, read_records, read_runs, timed
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.files import atomic
from poss_lightning.reports.charts import COLOURS
from poss_lightning.reports.explorer import decoded_texts
from poss_lightning.reports.figures import palette, position_figure, seconds_figure, training
from poss_lightning.reports.scalars import by_choice, read_scalars
from poss_lightning.reports.seeds import Cells, over_seeds
from poss_lightning.reports.statistics import Estimate
from poss_lightning.reports.summary import ALL, MethodSummary, group, summarise
from poss_lightning.reports.tables import LEVEL, Measured, Table, method_tables, of_choices, positions, seed_tables


def report(
    records: list[str] | str,
    runs: list[str] | str | None = None,
    out: str = "report.html",
    baseline: str = "autoregressive",
    reference: str | None = None,
    prompts: int = 6,
    resamples: int = 2000,
    seed: int = 0,
) -> None:
    """Write one self-contained HTML page: tables, curves, rounds and decoded text of benchmarks and training runs.

    Where the records are of several training seeds, in folders CHOICE/seed-N, tables and curves are over seeds, and
    text and seconds are of the first seed that all choices have.

    Args:
        records: Files of records, folders that hold a records.jsonl, or a sweep's; several as [a,b].
        runs: Folders of training runs, whose TensorBoard files give drift and loss by depth; a sweep's own by default.
        out: The page to write.
        baseline: The method whose speed is 1 and whose tokens the others should give.
        reference: The method that acceptance lengths and speeds are held against, for example the single-layer draft.
        prompts: Prompts whose decoded text is shown, spread over the suites.
        resamples: Draws of the bootstrap behind the 95 % intervals.
        seed: Of the bootstrap.
    """
    cells, facts = read_cells(records), read_runs(records)
    if cells:
        found = across_seeds(cells, baseline, reference, depths(facts))
        runs, chosen = runs or list(facts), one_seed(cells)
        answers = own_records(cells, chosen)
        facts = {folder: own for folder, own in facts.items() if _cell(folder) in chosen}
    else:
        answers = read_records(records)
        baseline = baseline if timed(answers) else None
        found = across_prompts(answers, baseline, reference, depths(facts), resamples, seed)
    methods = group(answers)
    trained = by_choice(read_scalars(runs or []))
    colours = palette([*found.shares, *trained])
    most = {name: len(found.shares.get(name, ())) for name in methods}
    page = _template().render(
        found=found,
        reference=reference,
        positions=position_figure(found.shares, colours),
        seconds=seconds_figure(methods) if methods.keys() & set(BASELINES) else None,  # replayed rounds take none
        training=training(trained, colours),
        texts=decoded_texts(methods, read_rounds(facts), most, prompts),
        facts={folder: list(readable(entries)) for folder, entries in facts.items()},
        made=f"poss_lightning {__version__}, {resamples} draws of the bootstrap, seed {seed}",
    )
    with atomic(out) as path:
        path.write_text(page, encoding="utf-8")
    print(f"{out}: {len(answers)} records of {len(methods)} methods")


# --- what the records say ---


class Findings(NamedTuple):
    """What the top of the page says, over prompts or over seeds."""

    headline: str
    note: str  # how to read the tables
    shares: dict[str, Sequence[Estimate]]  # pos-acc of every method that drafts
    tables: list[Table]


def across_prompts(
    answers: list[Record], baseline: str | None, reference: str | None, known: dict[str, int], resamples: int, seed: int
) -> Findings:
    """One training of each method: other prompts might come."""
    summaries = summarise(answers, baseline, reference, known, resamples, seed)
    overall = [row for row in summaries if row.suite == ALL]
    note = (
        f"{overall[0].prompts} prompts. Under each value stands its 95 % interval for other prompts; each method was "
        "trained once, and of another training it says nothing."
    )
    shares = {row.method: row.pos_acc for row in overall if row.rounds}
    return Findings(headline(overall, baseline), note, shares, method_tables(summaries, baseline, reference))


def across_seeds(cells: Cells, baseline: str, reference: str | None, known: dict[str, int]) -> Findings:
    """Several trainings of each choice."""
    summaries = over_seeds(cells, reference, baseline, known)
    overall = of_choices(summaries)
    note = (
        f"{len(overall)} choices, {len(cells)} trainings. Under each mean over seeds stand its 95 % interval for other "
        "seeds, and the standard deviation of one training. Text, rounds and seconds are of one training of each."
    )
    shares = {choice: [one.mean for one in positions(own)] for choice, own in overall.items()}
    return Findings(headline_over_seeds(overall, baseline, reference), note, shares, seed_tables(summaries, reference))


def headline(overall: list[MethodSummary], baseline: str | None) -> str:
    """The fastest drafting method against the baseline, in a sentence or two; or acceptance alone."""
    if baseline is None:
        taus = ", ".join(f"{row.method} {row.tau_macro.text()}{_within(row.tau_macro)}" for row in overall)
        return f"Replayed rounds, without seconds. Tokens a round (τ macro): {taus}."
    drafting = [row for row in overall if row.method not in BASELINES and baseline in row.speed_up]
    if not drafting:
        speeds = ", ".join(f"{row.method} {row.tokens_per_second.text('.1f')}" for row in overall)
        return f"No method here drafts; tokens per second: {speeds}."
    best = max(drafting, key=lambda row: row.speed_up[baseline].value)
    gain = best.speed_up[baseline]
    verdict = "faster" if gain.low > 1 else "slower" if gain.high < 1 else "no difference shown"
    return (
        f"{best.method} decodes at {gain.text()} times the speed of {baseline}{_within(gain)}: {verdict}. "
        f"It emits {best.tau_micro.text()} tokens a round{_within(best.tau_micro)}, "
        f"and {best.identical.text('.0%')} of its {best.prompts} prompts have exactly {baseline}'s tokens."
    )


def headline_over_seeds(overall: dict[str, Measured], baseline: str, reference: str | None) -> str:
    """The choice with the largest τ, its speed, and what is certain of it against the reference."""
    best, own = max(overall.items(), key=lambda entry: entry[1]["tau_macro"].mean.value)
    tau = own["tau_macro"]
    words = f"{best} has the largest τ by prompt, {tau.mean.text()} over {len(tau.values)} seeds{_within(tau.mean)}"
    if "speed_up" in own:
        words += f", at {own['speed_up'].mean.text()} times the speed of {baseline}{_within(own['speed_up'].mean)}"
    if tau.gain is None or not tau.gain.significance():
        return f"{words}."
    verdict = "larger" if tau.gain.holm < LEVEL else "no difference shown"
    return (
        f"{words}. Against {reference} it is {tau.gain.text('+.2f')}{_within(tau.gain, '+.2f')}, "
        f"{tau.gain.significance()} after Holm's correction: {verdict}."
    )


def one_seed(cells: Cells) -> list[tuple[str, int]]:
    """One cell of each choice: the first seed that all choices have, or else each one's first."""
    seeds: dict[str, set[int]] = {}
    for choice, seed in cells:
        seeds.setdefault(choice, set()).add(seed)
    shared = set.intersection(*seeds.values())
    return [(choice, min(shared or own)) for choice, own in seeds.items()]


def own_records(cells: Cells, chosen: list[tuple[str, int]]) -> list[Record]:
    """Of the chosen cells each choice's own records, and those of the baselines from the first cell."""
    return [
        record
        for place, cell in enumerate(chosen)
        for record in cells[cell]
        if record.method == cell[0] or (place == 0 and record.method in BASELINES)
    ]


# --- the page ---


def readable(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts of a run as names and texts: a list of strings as a command line, nested facts as JSON of several lines."""
    for name, value in facts.items():
        if isinstance(value, dict) and not any(isinstance(part, dict | list) for part in value.values()):
            yield name, " · ".join(f"{key} {part}" for key, part in value.items())
        elif isinstance(value, list) and all(isinstance(part, str) for part in value):
            yield name, " ".join(value)
        elif isinstance(value, dict | list):
            yield name, json.dumps(value, indent=2, ensure_ascii=False)
        else:
            yield name, "–" if value is None else str(value)


def _cell(folder: str) -> tuple[str, int]:
    """The choice and seed of a folder CHOICE/seed-N."""
    *_, choice, seed = Path(folder).absolute().parts
    return choice, int(seed.removeprefix("seed-"))


def _within(value: Estimate, form: str = ".2f") -> str:
    return f" (95 % interval {value.interval(form)})" if value.interval(form) else ""


def _template() -> Any:
    here = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.globals["colours"] = COLOURS
    return environment.get_template("report.html.j2")
