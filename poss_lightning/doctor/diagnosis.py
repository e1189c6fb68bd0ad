"""What was measured of a draft's variants, and what follows: the ladder, and screen, confirm and report."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from poss_lightning.doctor.answers import ANSWERS, DRAWN, LONG, SWITCHES, Answers
from poss_lightning.doctor.hypotheses import Hypothesis, bfloat16, neighbours, pairs
from poss_lightning.doctor.load import CONTEXT, Fact
from poss_lightning.doctor.measure import blind, misplaced, replayed, screened, unrolled
from poss_lightning.doctor.variants import Changes, Variant, differences
from poss_lightning.evaluation.serving_metrics import Served
from poss_lightning.interop.layouts import check_expressible, find_layout
from poss_lightning.interop.settings import publish
from poss_lightning.interop.tensors import Draft, sort_layers
from poss_lightning.reports.acceptance import Counts, compare, positions_below
from poss_lightning.reports.statistics import LEVEL, Comparison
from poss_lightning.work import Work

MIN_GAIN, MIN_GAIN_LATE = 0.02, 0.1  # of τ, as a share, above which a cause is named; where position 1 gains nothing
MAX_CAUSES, MIN_PROMPTS, FINALISTS = 4, 6, 4  # that are looked for; that show anything; variants that are tested
LADDER_PROMPTS = 12  # prompts at most of steps that take long
SCREEN, SCREEN_PAIRS = (8, 3), (3, 1)  # prompts, at most a third, and positions that show which may be best; of pairs
FORCED, CHAIN, ENGINE = "teacher-forced", "chain", "the engine"
FORCED_LONG, CLAMPED = f"{FORCED}, {LONG}", f"{FORCED}, {LONG}, angles clamped"
COUPLED = f"{CHAIN}, {DRAWN}, drafts see the noise"
NOTHING = "nothing found: no other reading accepts significantly more than what the files say"
FOREIGN = "not this target's draft, by any reading tried"
Measure = Callable[..., Counts]


def _clamped(variant: Variant) -> Changes:
    """Read angles as engines do that compute only as many as config.json says; {} where that is no fewer."""
    context = variant.target.spec.context
    stated = variant.stated.get(CONTEXT) or context
    return {"texts": LONG, "max_positions": stated} if stated < context else {}


class Rung(NamedTuple):
    """A step of the ladder, from what a training validates to what an engine serves."""

    name: str
    base: str  # the step that it is compared with; "" for none
    measure: Measure
    change: Callable[[Variant], Changes]  # of what the files say; {} where there is no such step
    prompts: int | None = None  # at most


RUNGS = [
    Rung(FORCED, "", unrolled, lambda v: {"texts": ANSWERS}),
    Rung(FORCED_LONG, FORCED, unrolled, lambda v: {"texts": LONG}),
    Rung(CLAMPED, FORCED_LONG, unrolled, _clamped),
    Rung(CHAIN, "", replayed, lambda v: {"texts": ANSWERS}),
    Rung("tree of 60", CHAIN, partial(replayed, nodes=60), lambda v: {"texts": ANSWERS}, LADDER_PROMPTS),
    Rung(f"{CHAIN}, bfloat16", CHAIN, replayed, bfloat16, LADDER_PROMPTS),
    Rung(COUPLED, CHAIN, replayed, lambda v: {"texts": DRAWN}),
    Rung(
        f"{CHAIN}, {DRAWN}, drafts by argmax", COUPLED, partial(replayed, is_coupled=False), lambda v: {"texts": DRAWN}
    ),
    *[Rung(f"{CHAIN}, {name}", CHAIN, replayed, lambda v, name=name: {"texts": name}) for name in SWITCHES],
]


class Step(NamedTuple):
    """What a step of the ladder accepts, and whether significantly less than its base."""

    name: str
    counts: Counts
    loses: bool


class Trial(NamedTuple):
    """A variant, the assumption that it contradicts, and what it accepts and gains on some of the prompts."""

    variant: Variant
    hypothesis: Hypothesis
    counts: Counts
    gain: Comparison
    place: int = 0  # among those that were tried: usual faults, and usual values, come first


class Findings(NamedTuple):
    """The variant that accepts most, what led to it in words, all that was tried, and whether it reads this target."""

    last: Variant
    causes: list[str]
    trials: list[Trial]
    reads_target: bool


@dataclass(frozen=True)
class Case:
    """The table of what was measured so far, by what and on which prompts, and the texts of these."""

    work: Work
    answers: Answers

    def measured(self, name: str, variant: Variant, measure: Measure, every: int = 1) -> Counts:
        """Measure a variant on every n-th prompt, unless that was done before the command was killed."""
        part = f"{crc32('; '.join([name, variant.texts, str(every), *variant.description]).encode()):08x}"
        if (receipt := self.work.receipt(part)) is None:
            samples = self.answers.samples(variant.texts)
            numbers = [number for number in samples if number % every == 0]
            receipt = [numbers, *(each.tolist() for each in measure(variant, [samples[number] for number in numbers]))]
            self.work.write_receipt(part, receipt)
        numbers, *rows = receipt
        counts = Counts(*np.zeros((2, self.answers.count, len(rows[0][0]))))
        for whole, own in zip(counts, rows, strict=True):
            whole[numbers] = own
        return counts


def climb(case: Case, variant: Variant) -> Iterator[Step]:
    """Measure the steps of the ladder, one after another."""
    measured = dict[str, Counts]()
    for rung in RUNGS:
        if changes := rung.change(variant):
            read = variant.with_changes(**changes)
            if read.texts in case.answers.forms:
                every = max(1, case.answers.count // (rung.prompts or case.answers.count))
                measured[rung.name] = own = case.measured(rung.name, read, rung.measure, every)
                loses = bool(rung.base) and compare(own, measured[rung.base]).direction == "smaller"
                yield Step(rung.name, own, loses)


def find_causes(case: Case, found: Variant, facts: Sequence[Fact]) -> Findings:
    """Find what accepts significantly more, one cause after the other."""
    variant, base, causes, trials = found, case.measured(FORCED, found, unrolled), [*found.description], list[Trial]()
    differing = [fact.name for fact in facts if fact.verdict == "differs"]
    for _ in range(MAX_CAUSES):
        best = _next_cause(case, variant, base, neighbours(variant), SCREEN, differing, trials)
        if not best and not _reads_target(case, variant, base):  # two faults may each prevent all acceptance
            best = _next_cause(case, variant, base, pairs(variant), SCREEN_PAIRS, differing, trials)
        if not best:
            break
        before, after = (counts.rates()[0, 0] for counts in (base, best[0].counts))
        gained = f"position 1 from {before:.2f} to {after:.2f}, τ {best[0].gain.with_interval('+.2f')}"
        causes += best[0].variant.description[len(variant.description) :]
        causes[-1] = "; as good: ".join(
            [f"{causes[-1]}: {gained}", *(each.variant.description[-1] for each in best[1:])]
        )
        variant, base = best[0].variant, best[0].counts
    return Findings(variant, causes, trials, _reads_target(case, variant, base))


def _reads_target(case: Case, variant: Variant, counts: Counts) -> bool:
    """Return whether position 1 accepts more than where the draft reads nothing of the target but its tokens."""
    without = (case.measured(each.__name__, variant, each) for each in (blind, misplaced))
    return all(compare(counts, each).direction == "larger" for each in without)


def _next_cause(
    case: Case,
    variant: Variant,
    base: Counts,
    others: Iterable[tuple[Hypothesis, Variant]],
    size: tuple[int, int],
    differing: Sequence[str],
    trials: list[Trial],
) -> list[Trial]:
    """Screen others on some prompts, positions and tokens, noting each in `trials`; confirm the best on the rest."""
    every, few = max(3, case.answers.count // size[0]), partial(screened, depth=size[1])
    before, tried = case.measured("screen", variant, few, every), list[Trial]()
    there = [(hypothesis, other) for hypothesis, other in others if other.texts in case.answers.forms]
    for place, (hypothesis, other) in enumerate(tqdm(there, desc="hypotheses", leave=False)):
        after = case.measured("screen", other, few, every)
        tried.append(Trial(other, hypothesis, after, compare(after, before), place))
    trials += tried
    held_out = np.arange(case.answers.count) % every > 0

    def on_all_prompts(chosen: Iterable[Trial]) -> Iterator[Trial]:
        return (each._replace(counts=case.measured(FORCED, each.variant, unrolled)) for each in chosen)

    sure = confirm(on_all_prompts(screen(tried)), base, held_out, differing)
    usual = [each for each in tried if sure and each.hypothesis is sure[0].hypothesis][:1]
    if usual and usual[0].place < sure[0].place:  # of rotary bases near each other the target's own is meant
        sure = confirm(on_all_prompts([*sure, *usual]), base, held_out, differing)
    return sure


def screen(trials: Sequence[Trial]) -> list[Trial]:
    """Choose those that accept most, the best first."""
    return sorted(trials, key=lambda each: -each.counts.tau().value)[:FINALISTS]


def confirm(
    trials: Iterable[Trial], base: Counts, held_out: NDArray[np.bool_], differing: Sequence[str]
) -> list[Trial]:
    """Test trials on prompts that had no part in choosing them, up to the first that gains too little.

    In such a fixed sequence each test has the full level. Return those that gain as much as the best, but for 2 % of τ:
    what contradicts a fact that differs comes first, then what was tried first.
    """
    sure, tau = list[Trial](), base.tau().value
    for trial in trials:
        gain = compare(trial.counts.of(held_out), base.of(held_out))
        gains_at_once = trial.counts.rates()[0, 0] > base.rates()[0, 0]
        if not (gain.p < LEVEL and gain.value > (MIN_GAIN if gains_at_once else MIN_GAIN_LATE) * tau):
            break
        sure.append(trial._replace(gain=gain))
    most = max((each.gain.value for each in sure), default=0.0)
    equal = [each for each in sure if each.gain.value > most - MIN_GAIN * tau]
    return sorted(equal, key=lambda each: (each.hypothesis.fact not in differing, each.place))


def report(found: Variant, findings: Findings, steps: Sequence[Step], facts: Sequence[Fact], limit: int) -> list[str]:
    """Say what was found, and what to change."""
    if not findings.reads_target:
        return [FOREIGN]
    lines = [*findings.causes]
    if any(step.name == CLAMPED and step.loses for step in steps):
        stated, context = found.stated[CONTEXT], found.target.spec.context
        lines.append(f"{CONTEXT} {stated} → {context}: engines give all later positions the angles of {stated - 1}")
    if not lines:
        known = [f"{each.name} ({each.draft} for {each.target})" for each in facts if each.verdict == "differs"]
        differing = f"; what differs: {', '.join(known)}" if known else ""
        lines.append(f"{NOTHING}{differing}; --limit {2 * limit} shows smaller faults")
    return lines + [*_engine_keys(found, findings.last)]


def describe_engine(served: Served, chain: Counts, is_healthy: bool) -> list[str]:
    """Compare what an engine accepted with the replay of the files, and say what to look at; [] where it is as much."""
    files = "the files are right" if is_healthy else "beside what the files say"
    if not served.passed and served.tau < chain.tau().low:
        return [f"{files}, the engine accepts less; vLLM's /metrics, or responses with histograms, show where"]
    if not (below := positions_below(Counts.of_engine(served), chain)):
        return []
    if below[0] > 1:
        return [f"{files}, the engine accepts less at positions ≥ {below[0]}: look at its feedback"]
    feeds = "look at the layers and norms that it feeds the draft, then at dtype and chat template"
    return [f"{files}, the engine accepts less from position 1 on: {feeds}"]


def _engine_keys(*variants: Variant) -> Iterator[str]:
    """Describe which keys of an engine's config.json change from one variant to the other."""
    for engine in ("vllm", "sglang"):
        with suppress(ValueError):  # it cannot express one of them
            keys = []
            for variant in variants:
                config, state, *_ = sort_layers(Draft(variant.config, variant.state))
                check_expressible(config, layout := find_layout(engine, config))
                keys.append(publish(config, layout, state, variant.embed_head.tied))
            if changed := differences(*keys):
                yield f"config.json for {engine}: {', '.join(changed)}"
