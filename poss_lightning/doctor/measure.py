"""What a reading of a draft accepts, and what an engine has counted, by prompt and position, with paired intervals."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from poss_lightning.decoding.plans import Plan
from poss_lightning.doctor.readings import Reading, bfloat16
from poss_lightning.doctor.texts import LONG
from poss_lightning.draft.attention import Packing
from poss_lightning.evaluation.engines import read_engine
from poss_lightning.evaluation.replay import replay_rounds
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import collate
from poss_lightning.ranges import MAX_POSITIONS
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import Comparison, Floats, Jackknife

COUNTER = re.compile(r'num_(?:drafts|accepted_tokens_per_pos)_total\{(?:.*position="(\d+)")?.*\} (\S+)')  # vLLM's
AVERAGE = re.compile(r'spec_accept_length(?:\{.*\} |": ?)(\d[\d.e+]*)')  # SGLang's


class Counts(NamedTuple):
    """Chains or rounds of each prompt that reached, and that passed, each position: (Q, K) each."""

    reached: Floats
    passed: Floats

    def first(self, prompts: int, depth: int) -> "Counts":
        """The same of the first prompts and positions."""
        return Counts(*(part[:prompts, :depth] for part in self))

    def without(self, every: int) -> "Counts":
        """The same without every n-th prompt, from the first on."""
        return Counts(*(np.delete(part, slice(None, None, every), 0) for part in self))

    def rates(self) -> Floats:
        """pos-acc of all prompts, then without each in turn: (1+Q, K)."""
        every = statistics.leave_one_out(len(self.reached))
        return statistics.ratio(every @ self.passed, every @ self.reached)

    def tau(self) -> Jackknife:
        """Tokens a round."""
        return Jackknife(1 + np.nan_to_num(self.rates()).cumprod(1).sum(1), self.reached[:, 0] > 0)


def compare(counts: Counts, base: Counts) -> Comparison:
    """Difference in τ from `base`, over prompts and positions that both have."""
    sizes = [*map(min, counts.reached.shape, base.reached.shape)]
    means = statistics.mean_over([counts.first(*sizes).tau()], [base.first(*sizes).tau()])
    return statistics.compare_means({"": means})[""]


def as_read(samples: Sequence[Sample], reading: Reading) -> list[Sample]:
    """Samples with what a reading reads, as a store has them."""
    places = [source - 1 for source in reading.sources]
    return [sample._replace(layers=sample.layers[:, places].roll(-reading.features, 0)) for sample in samples]


@torch.inference_mode()
def unrolled(reading: Reading, samples: Sequence[Sample], depth: int = MAX_POSITIONS) -> Counts:
    """Count chains that begin at every slot of the answers, teacher-forced, as a validation does."""
    draft, depth, weight = reading.draft, min(depth, reading.depth), reading.draft.fc.weight
    embed_head, batch = reading.embed_head.restrict(draft.vocabulary), collate([as_read(samples, reading)])
    tokens, greedy, counts = (part[0].to(weight.device) for part in (batch.tokens, batch.greedy, batch.counts))
    counts, positions = counts[:-1], batch.positions[:, :-1].to(weight.device)  # (T,), T slots
    chains = counts.nonzero()[:, 0]  # the slots where they begin
    texts = torch.arange(len(samples)).repeat_interleave(torch.tensor(batch.lengths[0])).to(weight.device)
    one = Packing.one_per_row(1, len(counts), weight.device)
    packing = one if reading.texts == LONG else Packing(batch.lengths, positions)
    embedded = embed_head.embed(tokens[None, 1:]).roll(-reading.tokens, 1) * reading.scale
    predictions = draft(embedded, batch.draft_input[:, :-1].to(weight), depth, packing, chains)
    greedy, text = greedy[1:].roll(-reading.labels), tokens[1:].roll(-1 - reading.labels)
    counts, by_text = pad(counts, (0, depth)), []
    for k, predicted in enumerate(predictions):
        chains = chains[counts[chains + k] > k]
        slots = chains + k
        proposed = draft.token_ids(draft.logits(predicted[0, slots], embed_head).argmax(-1))
        hit = proposed == greedy[slots]
        by_text.append([texts[part].bincount(minlength=len(samples)).tolist() for part in (slots, slots[hit])])
        chains = chains[hit & (proposed == text[slots])]
    return Counts(*np.array(by_text, float).transpose(1, 2, 0))


def screened(reading: Reading, samples: Sequence[Sample], depth: int) -> Counts:
    """Count as `unrolled` where no token but those of the answers is proposed: the head is most of its work."""
    return unrolled(reading.proposing(torch.cat([sample.greedy for sample in samples]).unique()), samples, depth)


def blind(reading: Reading, samples: Sequence[Sample]) -> Counts:
    """Count position 1 where the draft reads nothing of the target but its tokens."""
    return unrolled(reading, [sample._replace(layers=torch.zeros_like(sample.layers)) for sample in samples], 1)


def replayed(
    reading: Reading, samples: Sequence[Sample], nodes: int = 1, width: int = 1, is_rounded: bool = False
) -> Counts:
    """Count what rounds accept, as `poss replay` does; by default chains, and in the dtype of the target."""
    depth, reading = reading.depth, reading.changed(**bfloat16(reading)) if is_rounded else reading
    plan = Plan(depth, max(nodes, depth + 1), width)
    rounds = replay_rounds(reading.draft, reading.embed_head, as_read(samples, reading), plan)
    accepted = [np.array([count for answer in own for count in answer], int)[:, None] for own in rounds]
    places = np.arange(1, depth + 1)
    return Counts(*(np.array([(own >= places - less).sum(0) for own in accepted], float) for less in (1, 0)))


def engine_acceptance(path: str) -> tuple[float, list[float]]:
    """Read what an engine has counted: τ, and pos-acc by position, [] where it gives an average alone.

    The file holds vLLM's /metrics, SGLang's /metrics or /server_info, or responses with the acceptance of each.

    Raises:
        ValueError: nothing in the file says how many tokens were accepted.
    """
    text, sums = Path(path).read_text(errors="replace"), Counter[int]()
    for place, value in COUNTER.findall(text):
        sums[int(place or -1) + 1] += int(float(value))
    if sums:
        reached = np.array([sums[place] for place in range(len(sums))])
    elif averages := AVERAGE.findall(text):
        return fmean(map(float, averages)), []
    else:
        try:
            rounds = np.concatenate([row["accepted"] for row in read_engine(Path(path))])
        except ValueError as error:
            raise ValueError(f"{error}; or a saved /metrics of vLLM or SGLang") from None
        reached = np.array([(rounds >= place).sum() for place in range(rounds.max() + 1)])
    if not reached[0]:
        raise ValueError(f"{path} has counters of no draft: save /metrics after the engine has answered")
    return float(reached.sum() / reached[0]), statistics.ratio(reached[1:], reached[:-1]).tolist()
