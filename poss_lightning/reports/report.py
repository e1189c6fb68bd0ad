"""`poss report`: one HTML page over benchmark records and training runs, complete in itself."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from poss_lightning import __version__
from poss_lightning.evaluation.records import as_object, find_depths, has_seconds, read_runs
from poss_lightning.evaluation.rounds import read_rounds
from poss_lightning.files import check_file
from poss_lightning.ranges import CountOrNone, Draws, Seed, check_numbers
from poss_lightning.reports.charts import COLOURS
from poss_lightning.reports.explorer import decoded_texts
from poss_lightning.reports.figures import assign_colours, choice_panel, depth_figures, forest_figure, seconds_panel
from poss_lightning.reports.findings import find
from poss_lightning.reports.scalars import Scalars, group_by_choice, read_scalars
from poss_lightning.reports.summary import choose_depth, group
from poss_lightning.work import write_alone

# HTML forbids raw control characters: each as its symbol (U+2400 on), those that have none as U+FFFD.
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"} | {127: 0x2421}
CONTROLS |= dict.fromkeys(range(128, 160), 0xFFFD)


@check_numbers
def report(
    records: list[str] | str,
    runs: list[str] | str | None = None,
    *,
    out: str = "report.html",
    baseline: str = "autoregressive",
    reference: str | None = None,
    prompts: CountOrNone = 6,
    resamples: Draws = 2000,
    seed: Seed = 0,
) -> None:
    """Write one self-contained HTML page: tables, curves, rounds and decoded text of benchmarks and training runs.

    If choices were trained with several seeds, in folders CHOICE/seed-N, tables and curves are over seeds. Text and
    seconds are those of the first seed that all choices have.

    Args:
        records: files of records, or folders with a records.jsonl in them or below; several as [a,b].
        runs: folders of training runs, whose TensorBoard files give drift and loss by depth; a sweep's own by default.
        out: page to write.
        baseline: the method whose speed is 1; the others should give its tokens.
        reference: the method that acceptance lengths and speeds are compared with, for example the single-layer draft.
        prompts: number of prompts whose decoded text is shown, spread over the suites.
        resamples: draws of the bootstrap over prompts, where each method was trained once.
        seed: of the bootstrap.
    """
    check_file(out, ".html")
    facts = read_runs(records)
    title, circumstances = name_records(records), describe_runs(facts.values())
    findings = find(records, baseline=baseline, reference=reference, resamples=resamples, seed=seed)
    trained = group_by_choice(_read_runs(runs) if runs else read_scalars(list(facts) if findings.cells else []))
    if findings.cells:
        facts = {folder: entries for folder, entries in facts.items() if _cell(folder) in findings.cells}
    methods = group(findings.answers)
    colours = assign_colours([*findings.shares, *trained], reference)
    depths = find_depths(facts)
    most = {name: choose_depth(name, answers, depths.get(name)) for name, answers in methods.items()}
    shown = [folder for folder in facts if folder in findings.folders]
    page = _template().render(
        title=title,
        circumstances=circumstances,
        findings=findings,
        reference=reference,
        forests=[forest_figure(effects) for effects in findings.effects],
        choices=choice_panel(findings.shares, trained, colours),
        series=len(colours),
        # Seconds of trainings that were decoded one after another do not compare.
        seconds=seconds_panel(methods) if has_seconds(findings.answers) and len(findings.cells) < 2 else None,
        depths=depth_figures(trained),
        trained=bool(trained),
        seeds=max(map(len, trained.values()), default=0),
        texts=decoded_texts(methods, read_rounds(shown), most, prompts),
        facts={folder: list(format_facts(entries)) for folder, entries in facts.items()},
        made=f"poss_lightning {__version__}, {findings.made}",
    )
    with write_alone(out) as path:
        path.write_text(page.translate(CONTROLS), encoding="utf-8")
    print(f"{out}: {len(findings.answers)} records of {len(methods)} methods")


# --- the page ---


def name_records(records: Iterable[str | Path] | str | Path) -> str:
    """What the page is called: the folders of its records, each with the one above, as experiments/methods."""
    paths = [records] if isinstance(records, str | Path) else records
    folders = [path.parent if path.is_file() else path for path in (Path(path).absolute() for path in paths)]
    return ", ".join(dict.fromkeys("/".join(folder.parts[1:][-2:]) for folder in folders))


def describe_runs(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Target, dates and machines of runs, in this order, as far as their run.json have them."""
    targets, dates, machines = [], [], []
    for run in runs:
        config = as_object(run.get("config"))
        targets.append(config.get("target"))
        dates.append(str(run.get("started") or "")[: len("2026-11-22")])
        machines.append(", ".join(str(run[fact]) for fact in ("machine", "device") if run.get(fact)))
    days = sorted(filter(None, dates))
    named = [f"target {target}" for target in dict.fromkeys(targets) if target]
    span = " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))
    return [words for words in (*named, span, *dict.fromkeys(machines)) if words]


def format_facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
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


def _read_runs(runs: list[str] | str) -> dict[str, Scalars]:
    """The scalars of folders that the user named, each of which must have some."""
    found = {folder: read_scalars(folder) for folder in ([runs] if isinstance(runs, str) else runs)}
    if empty := [folder for folder, scalars in found.items() if not scalars]:
        raise ValueError(f"runs has {empty[0]}, which holds no TensorBoard files of a training, nor has any below")
    return {place: scalars for by_place in found.values() for place, scalars in by_place.items()}


def _cell(folder: str) -> tuple[str, int]:
    """The choice and seed of a folder CHOICE/seed-N."""
    *_, choice, seed = Path(folder).absolute().parts
    return choice, int(seed.removeprefix("seed-"))


def _template() -> Any:
    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.globals["colours"] = COLOURS
    return pages.get_template("report.html.j2")
