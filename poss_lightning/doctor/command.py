"""`poss doctor`: why a draft accepts less than it should."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from poss_lightning.doctor.files import Draft, ForeignDraft, facts, load
from poss_lightning.doctor.measure import SURE, Counts, above_chance, compare, engine_acceptance, replayed, unrolled
from poss_lightning.doctor.readings import HYPOTHESES, Reading, bfloat16, edit, others
from poss_lightning.doctor.texts import DIALOGUE, DRAWN, SWITCHES, SampleSource, ask
from poss_lightning.evaluation.suites import digest, read_suites
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.features.store import FeatureStore
from poss_lightning.files import check_folder, check_new, sha256
from poss_lightning.interop.checkpoints import write_folder
from poss_lightning.interop.layouts import check_expressible, find_layout
from poss_lightning.interop.settings import publish
from poss_lightning.ranges import Count, Position, Tokens, check_numbers
from poss_lightning.reports.statistics import interval, mean_over
from poss_lightning.target.model import Target
from poss_lightning.work import Work

LEAST, MOST = 0.02, 4  # gain in τ above which a cause is named, as a share; causes that are looked for
SOME, FEW, FULL = 3, 8, 3  # a third of the texts, for pairs an eighth, shows which readings are measured on all
MEASURED, FORCED, CHAIN = "measured", "teacher-forced", "chain"
NOTHING = "nothing found: no other reading accepts significantly more than what the files say"
FOREIGN = "not this target's draft, by any reading tried"
RUNGS = [  # from what a training validates to what an engine serves: name, what it is compared with, measure, change
    (FORCED, "", unrolled, edit()),
    (f"{FORCED}, 8-bit cache", FORCED, unrolled, edit(eight_bits=True)),
    (CHAIN, "", replayed, edit()),
    ("tree of 60", CHAIN, partial(replayed, nodes=60, width=10), edit()),
    (f"{CHAIN}, bfloat16", CHAIN, replayed, bfloat16),
    *[(f"{CHAIN}, {name}", CHAIN, replayed, edit(texts=name)) for name in (DRAWN, *SWITCHES, DIALOGUE)],
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
        draft: folder or hub id; in our format also the name of a shipped draft.
        target: "embedded", a local folder or a hub id; the one that the draft is served with.
        input_format: format of the draft, as for `poss convert`.
        allocation: positions served by each specialist where the files do not state it, as for `poss convert`.
        prompts: files, folders or suites of prompts, as for `poss benchmark --suites`; the project's own by default.
            The target answers their first turns.
        store: features of the target's own answers instead, as for `poss replay`.
        served: an engine's counters: vLLM's /metrics, SGLang's /server_info, or responses with the acceptance of each.
        fix: folder to write: the draft in our format, read as it accepts most.
        out: folder to write; by default one in runs/doctor/ for this draft, and one for the target's answers.
        limit: prompts or conversations.
        answer_tokens: most tokens of an answer.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
    """
    if fix:
        check_new(fix)
    engine = engine_acceptance(served) if served else None
    questions = [] if store else [replace(each, turns=each.turns[:1]) for each in read_suites(prompts)]
    questions = questions[:: max(len(questions) // limit, 1)][:limit]
    model = Target.load(target, dtype, device)
    try:
        found = load(draft, input_format, allocation, model)
    except ForeignDraft as error:
        return print(f"{error}\n{FOREIGN}")
    print("\n".join(facts(found)))
    asked = [model.spec.fingerprint, model.spec.template, model.dtype_name, answer_tokens]
    asked += [sha256(Path(store, MANIFEST)), limit] if store else [digest(questions)]
    made_of = {"texts": _digest(asked), "draft": _digest([found.reading.config.to_json(), _weigh(found.reading)])}
    folder = Path(out or f"runs/doctor/{Path(draft).name}-{_digest(made_of)}")
    check_folder(folder, MEASURED)
    work = Work(folder / MEASURED)
    with work.exclusive(wait=False):
        work.claim(made_of)
        answers = folder if out else folder.parent / f"answers-{made_of['texts']}"
        stored = FeatureStore(store) if store else None
        case = Case(
            work, SampleSource(model, answers, {} if store else ask(model, questions), answer_tokens, stored, limit)
        )
        _climb(case, found.reading, engine)
        reading = find_causes(case, found)
    if fix and reading:
        if not reading.is_written():
            raise ValueError(f"fix is {fix}; config and weights of a draft cannot say what was found")
        write_folder(Path(fix), reading.state, reading.config.to_json())
        print(f"{fix}: the draft, read as it accepts most")


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def _weigh(reading: Reading) -> list[Any]:
    """Names and digests of all tensors."""
    tensors = sorted((reading.state | reading.frozen).items())
    return [
        (name, hashlib.sha256(each.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
        for name, each in tensors
    ]


@dataclass(frozen=True)
class Case:
    """What was measured so far, and on which texts."""

    work: Work
    texts: SampleSource

    def measured(
        self, name: str, reading: Reading, measure: Callable[..., Counts] = unrolled, every: int = 1
    ) -> Counts:
        """Measure a reading on all texts or some, unless that was done before the command was killed."""
        if (receipt := self.work.receipt(name)) is None:
            samples = self.texts.samples(reading.texts, reading.eight_bits)[::every]
            receipt = [counts.tolist() for counts in measure(reading, samples)]
            self.work.write_receipt(name, receipt)
        return Counts(*map(np.array, receipt))

    def is_of_target(self, counts: Counts) -> bool:
        return above_chance(counts, self.texts.samples())


# --- the ladder: from what a training validates to what an engine serves ---


def _climb(case: Case, reading: Reading, engine: tuple[float, list[float]] | None) -> None:
    """Print what each step accepts, and which lose more than their interval."""
    rungs: dict[str, Counts] = {}
    losses = []
    print(f"\n{'step':28} {'τ':20} acceptance by position")
    for name, base, measure, change in RUNGS:
        if case.texts.has((changed := change(reading)).texts):
            rungs[name] = own = case.measured(f"rung-{name.replace(' ', '-')}", changed, measure)
            _print_rung(name, interval(mean_over([own.tau()])).with_interval(), own.rates()[0])
            losses += [name] if base and compare({0: own}, rungs[base])[0].direction == "smaller" else []
    if engine:
        tau, rates = engine
        _print_rung("the engine", f"{tau:.2f}", rates)
        expected = rungs[CHAIN].up_to(len(rates) or reading.depth).tau()
        losses += ["the engine"] if tau < interval(mean_over([expected])).low else []
    print(f"accepts less: {'; '.join(losses)}" if losses else "no step accepts less than the one it is compared with")


def _print_rung(name: str, tau: str, rates: Sequence[float]) -> None:
    print(f"{name:28} {tau:20} {' '.join(f'{rate:.2f}' for rate in rates)}", flush=True)


# --- counterfactuals, and what follows from them ---

Step = tuple[int, Reading]  # a hypothesis, by its number, and what it makes of the reading before


def find_causes(case: Case, draft: Draft) -> Reading | None:
    """Print what accepts significantly more, one after the other; the last reading, None if it accepts by chance."""
    reading, base, causes = draft.reading, case.measured("base", draft.reading), list[str]()
    for number in range(MOST):
        singles = [[step] for step in _steps(case, reading)]
        found = _best(case, f"{number}", base, singles, SOME)
        if found is None and not case.is_of_target(base):  # as two faults that each prevent all acceptance
            pairs = [[one, two] for (one,) in singles for two in _steps(case, one[1]) if two[0] > one[0]]
            found = _best(case, f"{number}-pair", base, pairs, FEW, depth=1)
        if found is None:
            break
        steps, counts = found
        for i, other in steps:
            causes.append(_describe(HYPOTHESES[i][0], reading, other))
            reading = other
        before, after = (own.rates()[0, 0] for own in (base, counts))
        gain = compare({0: counts}, base)[0].with_interval("+.2f")
        causes[-1] += f": position 1 from {before:.2f} to {after:.2f}, τ {gain}"
        base = counts
    if not case.is_of_target(base):
        return print(f"\n{FOREIGN}")
    print("", *([*draft.refused, *causes] or [NOTHING]), *_keys(draft.reading, reading), sep="\n")
    return reading


def _steps(case: Case, reading: Reading) -> list[Step]:
    """The hypotheses that make a difference, and for which there are texts."""
    return [(i, other) for i, other in others(reading) if case.texts.has(other.texts)]


def _best(
    case: Case, name: str, base: Counts, candidates: list[list[Step]], every: int, depth: int | None = None
) -> tuple[list[Step], Counts] | None:
    """Find the steps that accept most, and what they accept; None if none accept significantly more.

    Some of the texts, and some positions, show which candidates are measured on all.
    """
    few, measure = Counts(*(part[::every] for part in base)), partial(unrolled, depth=depth)
    bar = tqdm(enumerate(candidates), total=len(candidates), desc="hypotheses", leave=False)
    some = compare({i: case.measured(f"{name}-{i}-some", steps[-1][1], measure, every) for i, steps in bar}, few)
    counts = {
        i: case.measured(f"{name}-{i}", candidates[i][-1][1])
        for i in sorted(some, key=lambda i: some[i].value, reverse=True)[:FULL]
    }
    gains = compare({i: counts.get(i, base) for i in some}, base)
    sure = [i for i in counts if gains[i].p < SURE and gains[i].value > LEAST * base.tau().values[0]]
    best = max(sure, key=lambda i: gains[i].value, default=None)
    return None if best is None else (candidates[best], counts[best])


def _describe(words: str, before: Reading, after: Reading) -> str:
    """What is read differently, with the values of the config that change."""
    old, new = (vars(each.config) | {"inner_layers": each.sources} for each in (before, after))
    changed = [f"{name} {_plain(old[name])} → {_plain(new[name])}" for name in old if old[name] != new[name]]
    return ", ".join([words, *changed])


def _plain(value: Any) -> str:
    return "the target's" if value is None else ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _keys(before: Reading, after: Reading) -> Iterator[str]:
    """Keys of an engine's config that change."""
    for engine in ("vllm", "sglang"):
        with suppress(ValueError):
            old, new = (_published(engine, each) for each in (before, after))
            if changed := _changed(old, new):
                yield f"config.json for {engine}: {json.dumps(changed)[1:-1]}"


def _changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The entries of `new` that `old` does not have, at all levels."""
    return {
        name: _changed(old[name], value) if isinstance(value, dict) and isinstance(old.get(name), dict) else value
        for name, value in new.items()
        if old.get(name) != value
    }


def _published(engine: str, reading: Reading) -> dict[str, Any]:
    layout = find_layout(engine, reading.config)
    check_expressible(reading.config, layout)
    return publish(reading.config, layout, reading.state, reading.embed_head.tied)
