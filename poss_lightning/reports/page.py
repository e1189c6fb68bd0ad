"""The page of `poss compare --html`: tables, curves and decoded text in one file that loads nothing else."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from poss_lightning import plots
from poss_lightning.evaluation.rounds import ANSWER_KEY, KEY, read_answers
from poss_lightning.files import public_name
from poss_lightning.reports.html import write_html
from poss_lightning.reports.results import ALL, Findings
from poss_lightning.reports.scalars import Scalars, group_by_choice, mean, mean_by_step, read_scalars, series_by_depth
from poss_lightning.reports.statistics import Estimate
from poss_lightning.reports.tables import LEGEND, all_tables, compared_measures, overview, reference_of, verdict

MAX_PROMPTS = 6  # whose decoded text is shown
DRIFT = {  # tag -> what it is
    "val_drift_cosine": "cosine to the target's feature (1 is best)",
    "val_drift_l2": "relative L2 distance to the target's feature (0 is best)",
    "val_drift_norm_ratio": "norm over the target's (1 is best)",
}
BY_DEPTH = {
    "val_pos_acc_tree": "pos-acc in trees, held-out answers replayed",
    "val_pos_acc_unroll": "pos-acc in the unroll, teacher-forced",
    **DRIFT,
}
BY_STEP = {"val/loss": "validation loss, all depths", "val/tau_tree": "τ in trees, held-out answers replayed"}
Figures = dict[str, Figure]  # by title


def write_page(findings: Findings, out: str, baseline: str = "plain", runs: list[str] | str | None = None) -> None:
    """Write the page; `runs` are folders of trainings, whose event files give drift and loss: by default a sweep's."""
    results = findings.results
    trained = group_by_choice(read_scalars(runs or [name for name in findings.runs if "choice=" in name]))
    if runs and not trained:
        raise ValueError(f"runs is {runs}, which holds no TensorBoard files of a training, nor has any below")
    drafts = {name: facts for run in findings.runs.values() for name, facts in run.get("methods", {}).items() if facts}
    methods = pd.DataFrame(drafts).T.rename_axis("method").reset_index().map(str).replace("nan", "")
    methods = methods.drop(columns="weights", errors="ignore")  # of one training
    write_html(
        out,
        title=findings.title,
        circumstances=describe_runs(findings.runs.values()),
        verdict=verdict(results, baseline),
        notes=findings.notes,
        overview=overview(results),
        legend=LEGEND,
        figures=comparison_figures(results),
        tables=all_tables(results, baseline) | ({"How drafts are made and used": methods} if drafts else {}),
        training=training_figures(trained),
        texts=list(decoded_texts(findings.answers)),
    )


def describe_runs(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Return targets, days, machines and devices of runs, as far as their run.json have them."""
    circumstances: dict[str, None] = {}
    for run in runs:
        target, day = run.get("config", {}).get("target"), str(run.get("started") or "")[: len("2026-11-22")]
        named = f"target {public_name(target)}" if target else ""
        circumstances |= dict.fromkeys(filter(None, (named, day, run.get("machine"), run.get("device"))))
    return [*circumstances]


def comparison_figures(results: pd.DataFrame) -> Figures:
    """Draw comparisons with the reference, and acceptance by position."""
    drawn: Figures = {}
    overall = results[results["suite"] == ALL]
    for measure in compared_measures(results):
        gains = overall[(overall["measure"] == measure.name) & (overall["against"] != "")]
        if gains["value"].notna().any():
            named = {row.method: row for row in gains.itertuples()}
            drawn[f"{measure.compared_title} {reference_of(results)}"] = plots.forest(named, float(measure.logs))
    shares: dict[str, dict[int, Any]] = {}
    for row in overall[(overall["measure"] == "pos_acc") & (overall["against"] == "")].itertuples():
        shares.setdefault(row.method, {})[row.position] = row
    if shares:
        drawn["pos-acc by position"] = plots.curves(
            {"": shares}, "draft position k", "accepted, if k−1 was", share=True
        )
    return drawn


def training_figures(trained: Mapping[str, list[Scalars]]) -> Figures:
    """Draw what trainings logged: at their last validation by depth, and by step; means over the runs of a choice."""
    drawn: Figures = {}
    for titles, average, x_label in ((BY_DEPTH, last_by_depth, "depth"), (BY_STEP, mean_by_step, "step")):
        for tag, title in titles.items():
            means = {choice: average(runs, tag) for choice, runs in trained.items()}
            if shown := {choice: points for choice, points in means.items() if len(points) > 1}:
                drawn[title] = plots.curves({"": shown}, x_label, "", share="pos_acc" in tag)
    return drawn


def last_by_depth(runs: list[Scalars], tag: str) -> dict[int, Estimate]:
    """`tag` at the last validation by depth, averaged over the runs that have it."""
    last = [{k: series[-1][1] for k, series in series_by_depth(run, tag).items()} for run in runs]
    return {k: mean([one[k] for one in last if k in one]) for k in sorted(set().union(*last))}


def decoded_texts(answers: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """First turn and first repeat of some prompts: the first of each suite, then the second of each, and so on."""
    first = answers.query("turn == 0 and repeat == 0").sort_values("seed", kind="stable")
    firsts = first.drop_duplicates(["method", *KEY]).groupby("method", sort=False)  # of each method's first training
    joined = {name: own.join(read_answers(own), on=ANSWER_KEY).fillna({"question": ""}) for name, own in firsts}
    texts = {name: own.set_index(KEY[:2]).sort_index() for name, own in joined.items()}
    with_text = next(iter(texts.values()))["pieces"].dropna()
    for prompt in with_text.groupby(level="suite").cumcount().sort_values(kind="stable").index[:MAX_PROMPTS]:
        answers = [own.loc[prompt].to_dict() | {"name": name} for name, own in texts.items() if prompt in own.index]
        shown = [answer | {"spans": split_rounds(answer["accepted"], answer["pieces"])} for answer in answers]
        yield {"title": ", ".join(prompt), "question": answers[0]["question"], "answers": shown}


def split_rounds(accepted: Sequence[int], pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Kinds and texts: "plain" for the prefill's token, then each round's "accepted" run and its "bonus" or stop token.

    The last round may end within its accepted run, where the limit of new tokens cut it.
    """
    if not len(accepted):
        return [("plain", "".join(pieces))]
    spans, start = [("plain", pieces[0])], 1
    for count in accepted:
        end = start + count
        runs = ("accepted", pieces[start:end]), ("bonus", pieces[end : end + 1])
        spans += [(kind, "".join(each).replace("\n", "↵\n")) for kind, each in runs if len(each)]
        start = end + 1
    return spans
