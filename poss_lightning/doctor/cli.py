"""`poss doctor`: why a draft accepts less than it should."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

from poss_lightning.doctor.answers import ANSWERS, Answers, make_prompts, write_answers
from poss_lightning.doctor.diagnosis import (
    CHAIN,
    ENGINE,
    FOREIGN,
    MIN_PROMPTS,
    Case,
    Findings,
    Step,
    climb,
    describe_engine,
    find_causes,
    report,
)
from poss_lightning.doctor.load import Fact, compare_facts, load
from poss_lightning.evaluation.serving_metrics import read_served
from poss_lightning.evaluation.suites import digest, read_suites
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import check_folder, check_new, sha256
from poss_lightning.interop.convert import write_folder
from poss_lightning.interop.problems import ForeignDraft
from poss_lightning.ranges import Count, Position, Tokens, check_numbers
from poss_lightning.reports.acceptance import Counts
from poss_lightning.target_model.model import Target
from poss_lightning.work import Work

MEASURED = "measured"  # folder of what was measured
SHOWN_HYPOTHESES = 16  # on the page


@check_numbers
def doctor(
    draft: str,
    target: str = "embedded",
    input_format: Literal["ours", "eagle", "hass", "poss", "eagle3", "speed", "speculators", "dflash"] = "ours",
    allocation: list[Position] | None = None,
    prompts: list[str] | str | None = None,
    store: str | None = None,
    served: str | None = None,
    fix: str | None = None,
    html: str | None = None,
    out: str | None = None,
    limit: Count = 24,
    answer_tokens: Tokens = 128,
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Find out why a draft accepts less than it should.

    It lists what the draft's files say beside the target; measures acceptance step by step, from what a training
    validates to what an engine serves; and reads the files in other ways, one assumption changed at a time. What
    accepts significantly more than what the files say is named, with what to change.

    If a run is killed, give the same command again: it resumes.

    Args:
        draft: folder, hub id or shipped draft, as for `poss convert`.
        target: "embedded", a local folder or a hub id; the one that the draft is served with.
        input_format: as for `poss convert`.
        allocation: as for `poss convert`.
        prompts: as for `poss benchmark --suites`; the target answers their first turns.
        store: features of the target's own answers instead, as for `poss replay`.
        served: an engine's counters: vLLM's /metrics, SGLang's /server_info, or responses with the acceptance of each.
        fix: folder to write: the draft in our format, read as it accepts most.
        html: file to write: a page with the ladder and the hypotheses as plots.
        out: folder to write; by default one in runs/doctor/ for this draft, its config and these texts.
        limit: prompts or conversations.
        answer_tokens: most tokens of an answer.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    for path in filter(None, (fix, html)):
        check_new(path)
    if served and not Path(served).is_file():
        raise FileNotFoundError(
            f"served is {served}; there is no such file: save an engine's /metrics or responses there"
        )
    engine = read_served(Path(served)) if served else None
    questions = [] if store else [replace(each, turns=each.turns[:1]) for each in read_suites(prompts)]
    features = FeatureStore(store) if store else None
    count = min(limit, len(questions if features is None else features))
    questions = [questions[i * len(questions) // count] for i in range(count)] if questions else []
    if count < MIN_PROMPTS:
        raise ValueError(f"{count} texts show nothing; give {MIN_PROMPTS} or more, and a limit that takes them")
    model = Target.load(target, dtype, device, exact=False)  # no text is drafted here
    if features and (difference := features.target.difference(model.spec)):
        raise ValueError(f"store {store} is of another target than {target}: {difference}")
    try:
        variant = load(draft, input_format, allocation, model)
    except ForeignDraft as error:
        return print(f"{error}\n{FOREIGN}")
    facts = compare_facts(variant.stated, variant.config, model)
    print(Fact("", "draft", "target, or usual", ""), *facts, *variant.description, sep="\n")
    texts = sha256(features.folders[0] / MANIFEST) if features else digest(questions)
    settings = {"limit": limit, "answer_tokens": answer_tokens, "dtype": model.dtype_name, "texts": texts}
    settings |= {"draft": variant.digest, "config": asdict(variant.config), "stated": variant.stated}
    settings |= {"target": asdict(model.spec)}
    folder = Path(out or f"runs/doctor/{Path(draft).name}-{crc32(json.dumps(settings, default=str).encode()):08x}")
    check_folder(folder, MEASURED)
    work = Work(folder / MEASURED, settings)
    with work.exclusive(wait=False):
        if questions and work.receipt(ANSWERS) is None:
            work.write_receipt(ANSWERS, write_answers(model, make_prompts(model, questions), answer_tokens))
        written = work.receipt(ANSWERS) if questions else []
        case = Case(work, Answers(model, written or [], features, count))
        print(f"\n{'step':52} {'τ':20} acceptance by position")
        steps = []
        for step in climb(case, variant):
            steps.append(step)
            _print_step(step.name, step.counts.tau().with_interval(), step.counts.rates()[0])
        if engine:
            _print_step(ENGINE, f"{engine.tau:.2f}", Counts.of_engine(engine).rates()[0])
        losses = "; ".join(step.name for step in steps if step.loses)
        print(f"accepts less: {losses}" if losses else "no step accepts less than the one it is compared with")
        findings = find_causes(case, variant, facts)
        lines = report(variant, findings, steps, facts, limit)
        if engine and findings.reads_target:
            chain = next(step.counts for step in steps if step.name == CHAIN)
            lines += describe_engine(engine, chain, not findings.causes)
    print("", *lines, sep="\n")
    if html:
        _write_page(html, draft, lines, steps, findings)
    if fix and findings.reads_target:
        if not findings.last.is_written():
            raise ValueError(f"fix is {fix}; config and weights of a draft cannot say: {findings.last.description[-1]}")
        write_folder(Path(fix), findings.last.state, findings.last.config.to_json())
        print(f"{fix}: the draft, read as it accepts most")


def _print_step(name: str, tau: str, rates) -> None:
    print(f"{name:52} {tau:20} {' '.join(f'{rate:.2f}' for rate in rates)}", flush=True)


def _write_page(out: str, draft: str, lines: list[str], steps: list[Step], findings: Findings) -> None:
    """Draw the ladder as bars, and the hypotheses that gain most as a forest plot."""
    import pandas as pd

    from poss_lightning import plots
    from poss_lightning.reports.html import write_figures

    gains = {each.variant.description[-1]: each.gain for each in findings.trials}
    most = sorted(gains, key=lambda name: -gains[name].value)[:SHOWN_HYPOTHESES]
    taus = {step.name: step.counts.tau() for step in steps}
    figures = {
        "τ by step": plots.bars(taus, 1.0),
        "τ gained, one assumption changed": plots.forest({name: gains[name] for name in most}),
    }
    rows = [(name, tau.with_interval()) for name, tau in taus.items()]
    write_figures(out, f"poss doctor {draft}", "; ".join(lines), pd.DataFrame(rows, columns=["step", "τ"]), figures)
