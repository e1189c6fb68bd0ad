"""`poss doctor`: why a draft accepts less than it should."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np
from tqdm import tqdm

from poss_lightning.doctor.files import facts, load
from poss_lightning.doctor.measure import (
    Counts,
    blind,
    compare,
    engine_acceptance,
    replayed,
    screened,
    unrolled,
)
from poss_lightning.doctor.readings import HYPOTHESES, WHOLE, Reading, changes
from poss_lightning.doctor.texts import ANSWERS, DRAWN, FROM_STORE, LONG, SWITCHES, TargetAnswers, ask
from poss_lightning.evaluation.provenance import describe_draft
from poss_lightning.evaluation.suites import digest, read_suites
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import check_folder, check_new, sha256
from poss_lightning.interop.checkpoints import write_folder
from poss_lightning.interop.layouts import check_expressible, find_layout
from poss_lightning.interop.problems import ForeignDraft
from poss_lightning.interop.settings import publish
from poss_lightning.ranges import Count, Position, Tokens, check_numbers
from poss_lightning.reports.statistics import LEVEL, Comparison, interval, mean_over
from poss_lightning.target_model.model import Target
from poss_lightning.work import Work

LEAST, LATER = 0.02, 0.1  # gain in τ above which a cause is named, as a share; where position 1 gains nothing
MOST, FEWEST = 4, 6  # causes that are looked for; texts, of which a third chooses and the others test
SOME, FEW, FULL = (8, 3), (3, 1), 4  # texts, at most a third, and positions that show which 4 may be best; of pairs
MEASURED, FORCED, CHAIN = "measured", "teacher-forced", "chain"
NOTHING = "nothing found: no other reading accepts significantly more than what the files say"
FOREIGN = "not this target's draft, by any reading tried"
RUNGS = [  # from what a training validates to what an engine serves: name, what it is compared with, measure, texts
    (FORCED, "", unrolled, ANSWERS),
    (f"{FORCED}, {LONG}", FORCED, unrolled, LONG),
    (CHAIN, "", replayed, ANSWERS),
    ("tree of 60", CHAIN, partial(replayed, nodes=60, width=10), ANSWERS),
    (f"{CHAIN}, bfloat16", CHAIN, partial(replayed, is_rounded=True), ANSWERS),
    *[(f"{CHAIN}, {name}", CHAIN, replayed, name) for name in (DRAWN, *SWITCHES)],
]


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
        out: folder to write; by default one in runs/doctor/ for this draft, its config and these texts.
        limit: prompts or conversations.
        answer_tokens: most tokens of an answer.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    if fix:
        check_new(fix)
    engine = engine_acceptance(served) if served else None
    questions = [] if store else [replace(each, turns=each.turns[:1]) for each in read_suites(prompts)]
    stored = FeatureStore(store) if store else None
    given = min(limit, len(questions if stored is None else stored))
    questions = [questions[i * len(questions) // given] for i in range(given)] if questions else []
    if given < FEWEST:
        raise ValueError(f"{given} texts show nothing; give {FEWEST} or more, and a limit that takes them")
    model = Target.load(target, dtype, device)
    if stored and (difference := stored.target.difference(model.spec)):
        raise ValueError(f"store {store} is of another target than {target}: {difference}")
    try:
        found, said = load(draft, input_format, allocation, model)
    except ForeignDraft as error:
        return print(f"{error}\n{FOREIGN}")
    print(*facts(found, said), *found.words, sep="\n")
    texts = sha256(stored.folders[0] / MANIFEST) if stored else digest(questions)
    settings = {"limit": limit, "answer_tokens": answer_tokens, "dtype": model.dtype_name, "texts": texts}
    settings |= {"draft": describe_draft(found.draft), "config": asdict(found.config), "words": found.words}
    settings |= {"hypotheses": len(HYPOTHESES), "target": asdict(model.spec)}  # measurements have numbers of the former
    digits = f"{crc32(json.dumps(settings, default=str).encode()):08x}"
    folder = Path(out or f"runs/doctor/{Path(draft).name}-{digits}")
    check_folder(folder, MEASURED)
    work = Work(folder / MEASURED, settings)
    asked = ask(model, questions) if questions else FROM_STORE
    case = Case(work, TargetAnswers(model, folder, asked, answer_tokens, stored, limit))
    with work.exclusive(wait=False):
        _climb(case, found, engine)
        reading = find_causes(case, found)
    if fix and reading:
        if not reading.is_written():
            raise ValueError(f"fix is {fix}; config and weights of a draft cannot say what was found")
        write_folder(Path(fix), reading.state, reading.config.to_json())
        print(f"{fix}: the draft, read as it accepts most")


@dataclass(frozen=True)
class Case:
    """What was measured so far, and on which texts."""

    work: Work
    texts: TargetAnswers

    def measured(
        self, name: str, reading: Reading, measure: Callable[..., Counts] = unrolled, every: int = 1
    ) -> Counts:
        """Measure a reading on all texts or some, unless that was done before the command was killed."""
        if (receipt := self.work.receipt(name)) is None:
            receipt = [part.tolist() for part in measure(reading, self.texts.samples(reading.texts)[::every])]
            self.work.write_receipt(name, receipt)
        return Counts(*map(np.array, receipt))

    def others(self, reading: Reading) -> Iterator[Reading]:
        """Yield the readings in which one more assumption differs, and for which there are texts."""
        return (other for other in reading.others() if other.texts in self.texts.asked)


# --- the ladder: from what a training validates to what an engine serves ---


def _climb(case: Case, reading: Reading, engine: tuple[float, list[float]] | None) -> None:
    """Print what each step accepts, and which lose more than their interval."""
    rungs, losses = dict[str, Counts](), list[str]()
    print(f"\n{'step':32} {'τ':20} acceptance by position")
    for name, base, measure, texts in RUNGS:
        if texts in case.texts.asked:
            rungs[name] = own = case.measured(name.replace(" ", "-"), replace(reading, texts=texts), measure)
            _print_rung(name, interval(mean_over([own.tau()])).with_interval(), own.rates()[0])
            losses += [name] if base and compare(own, rungs[base]).direction == "smaller" else []
    if engine:
        tau, rates = engine
        _print_rung("the engine", f"{tau:.2f}", rates)
        expected = rungs[CHAIN].first(case.texts.limit, len(rates) or reading.depth).tau()
        losses += ["the engine"] if tau < interval(mean_over([expected])).low else []
    print(f"accepts less: {'; '.join(losses)}" if losses else "no step accepts less than the one it is compared with")


def _print_rung(name: str, tau: str, rates: Sequence[float]) -> None:
    print(f"{name:32} {tau:20} {' '.join(f'{rate:.2f}' for rate in rates)}", flush=True)


# --- counterfactuals, and what follows from them ---


def find_causes(case: Case, found: Reading) -> Reading | None:
    """Print what accepts significantly more, one after the other; the last reading, None if it is blind."""
    reading, base, causes = found, case.measured(FORCED, found), [*found.words]
    for _ in range(MOST):
        best = _best(case, base, case.others(reading), *SOME)
        if best is None and not _reads_target(case, reading, base):
            best = _best(case, base, _pairs(case, reading), *FEW)  # two faults may each prevent all acceptance
        if best is None:
            break
        other, counts, gain = best
        before, after = (own.rates()[0, 0] for own in (base, counts))
        causes += other.words[len(reading.words) :]
        causes[-1] += f": position 1 from {before:.2f} to {after:.2f}, τ {gain.with_interval('+.2f')}"
        reading, base = other, counts
    if not _reads_target(case, reading, base):
        return print(f"\n{FOREIGN}")
    print("", *(causes or [NOTHING]), *_keys(found, reading), sep="\n")
    return reading


def _reads_target(case: Case, reading: Reading, counts: Counts) -> bool:
    """Return whether position 1 accepts more than if the draft read nothing of the target but its tokens."""
    gain = compare(counts, case.measured(f"blind{reading.name}", reading, blind))
    return gain.p < LEVEL and gain.value > 0


def _pairs(case: Case, reading: Reading) -> Iterator[Reading]:
    def singles(reading: Reading) -> Iterator[Reading]:
        return takewhile(lambda one: one.steps[-1] < WHOLE, case.others(reading))

    return (two for one in singles(reading) for two in singles(one) if two.steps[-1] > one.steps[-1])


def _best(
    case: Case, base: Counts, candidates: Iterator[Reading], texts: int, depth: int
) -> tuple[Reading, Counts, Comparison] | None:
    """Find the reading that accepts most, what it accepts, and its gain; None if none accepts significantly more.

    Some of the texts, positions and tokens show which candidates may be best. On the other texts, which had no part in
    that, they are tested one after the other, up to the first that gains too little. In such a fixed sequence each test
    has the full level. Of those within 2 % of the best the first in the table counts: many a large rotary base accepts
    as much as the target's scaling, which stands before them.
    """
    every, few = max(3, len(base.reached) // texts), partial(screened, depth=depth)
    top: list[tuple[float, int, Reading]] = []
    for number, each in enumerate(tqdm(candidates, desc="hypotheses", leave=False)):
        accepted = case.measured(f"{each.name}-of-{every}", each, few, every).tau().values[0]
        top = sorted([*top, (-accepted, number, each)])[:FULL]  # the others are not kept: a pair may have large tensors
    tau, sure = base.tau().values[0], dict[int, tuple[Reading, Counts, Comparison]]()
    for _, number, each in top:
        counts = case.measured(each.name, each)
        gain = compare(counts.without(every), base.without(every))
        gains_at_once = counts.rates()[0, 0] > base.rates()[0, 0]
        if not (gain.p < LEVEL and gain.value > (LEAST if gains_at_once else LATER) * tau):
            break
        sure[number] = each, counts, gain
    most = max((gain.value for *_, gain in sure.values()), default=0.0)
    return next((sure[i] for i in sorted(sure) if sure[i][2].value > most - LEAST * tau), None)


def _keys(*readings: Reading) -> Iterator[str]:
    """Describe which keys of an engine's config.json change from one reading to the other."""
    for engine in ("vllm", "sglang"):
        with suppress(ValueError):  # it cannot express one of them
            keys = []
            for each in readings:
                layout = find_layout(engine, each.config)
                check_expressible(each.config, layout)
                keys.append(publish(each.config, layout, each.state, each.embed_head.tied))
            if changed := changes(*keys):
                yield f"config.json for {engine}: {', '.join(changed)}"
