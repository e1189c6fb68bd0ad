"""What a reading of a draft accepts, and what an engine has counted, by prompt and position, with paired intervals."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from poss_lightning.decoding.plans import TreePlan
from poss_lightning.doctor.readings import Reading, bfloat16
from poss_lightning.doctor.texts import LONG
from poss_lightning.draft.attention import Packing
from poss_lightning.evaluation.replay import replay_rounds
from poss_lightning.evaluation.serving_metrics import read_served
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import collate
from poss_lightning.ranges import MAX_POSITIONS
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import Comparison, Floats, Jackknife


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
    given = batch.tokens, batch.target_argmax, batch.mask.passes
    tokens, greedy, counts = (part[0].to(weight.device) for part in given)  # of T slots in (T + 1,), (T + 1,), (T,)
    positions = batch.positions[:, :-1].to(weight.device)
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
    plan = TreePlan(depth, max(nodes, depth + 1), width)
    rounds = replay_rounds(reading.draft, reading.embed_head, as_read(samples, reading), plan)
    accepted = [np.array([count for answer in own for count in answer], int)[:, None] for own in rounds]
    places = np.arange(1, depth + 1)
    return Counts(*(np.array([(own >= places - less).sum(0) for own in accepted], float) for less in (1, 0)))


def engine_acceptance(path: str) -> tuple[float, list[float]]:
    """Return what an engine accepted, as `read_served` reads it: τ, and pos-acc by position; [] of a mean alone."""
    tau, passed = read_served(Path(path))
    reached = np.sum(passed, 0) if passed else np.ones(1)
    return tau, statistics.ratio(reached[1:], reached[:-1]).tolist()
