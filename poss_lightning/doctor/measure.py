"""What a reading of a draft accepts, and what an engine has counted, by prompt and position, with paired intervals."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from poss_lightning.corpus.draws import Draw
from poss_lightning.decoding.plans import Plan
from poss_lightning.doctor.readings import Reading
from poss_lightning.evaluation.engines import read_engine
from poss_lightning.evaluation.replay import replay_rounds
from poss_lightning.features.shards import TokenizedText
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import counted_passes
from poss_lightning.metrics import UnrollAcceptance
from poss_lightning.reports import statistics
from poss_lightning.reports.statistics import Comparison, Floats, Jackknife
from poss_lightning.target.model import Target

COUNTER = re.compile(r'num_(drafts|accepted_tokens_per_pos)(?:_total)?(?:\{(.*)\}|")\D*?[ :](\d[\d.e+]*|\[[^]]*\])')


SURE = 0.01  # p below which something accepts more


class Counts(NamedTuple):
    """Chains or rounds of each prompt that reached, and that passed, each position: (Q, K) each."""

    reached: Floats
    passed: Floats

    def up_to(self, depth: int) -> "Counts":
        return Counts(self.reached[:, :depth], self.passed[:, :depth])

    def rates(self) -> Floats:
        """pos-acc of all prompts, then without each in turn: (1+Q, K)."""
        every = statistics.leave_one_out(len(self.reached))
        return statistics.ratio(every @ self.passed, every @ self.reached)

    def tau(self) -> Jackknife:
        """Tokens a round."""
        return Jackknife(1 + np.nan_to_num(self.rates()).cumprod(1).sum(1), self.reached[:, 0] > 0)


def compare(counts: Mapping[Any, Counts], base: Counts) -> dict[Any, Comparison]:
    """Differences in τ from `base`, over the positions that both have, by Holm's correction for all of them."""
    means = {}
    for name, own in counts.items():
        depth = min(own.reached.shape[1], base.reached.shape[1])
        means[name] = statistics.mean_over([own.up_to(depth).tau()], [base.up_to(depth).tau()])
    return statistics.compare_means(means)


def above_chance(counts: Counts, samples: Sequence[Sample]) -> bool:
    """Whether position 1 accepts more than the most common token as every proposal."""
    choices = [sample.greedy[sample.greedy >= 0] for sample in samples]
    common = torch.cat(choices).mode().values
    parts = (len, lambda own: int((own == common).sum()))
    guess = Counts(*(np.array([[part(own)] for own in choices], float) for part in parts))
    gain = compare({0: counts.up_to(1)}, guess)[0]
    return gain.p < SURE and gain.value > 0


@torch.inference_mode()
def read(target: Target, text: TokenizedText) -> Sample:
    """A text with the outputs of all of the target's layers, and its feature as one more: (T, L+1, D)."""
    tokens = torch.tensor(text.tokens, device=target.device)
    features, inner = target.text_layers(tokens[None], tuple(range(1, target.spec.layers + 1)))
    greedy = torch.full_like(tokens, -1)
    for start, stop in text.spans:
        slots = slice(max(start, 1) - 1, stop - 1)
        greedy[slots] = target.embed_head.logits(features[0, slots]).max(-1).indices
    layers = torch.cat([inner[0], features[0, :, None]], dim=1)
    return Sample(
        text.id,
        tokens,
        greedy,
        text.spans,
        features[0],
        layers,
        [Draw.of(draw) if draw else None for draw in text.draws],
    )


def as_read(samples: Sequence[Sample], reading: Reading) -> list[Sample]:
    """Samples with what a reading reads, as a store has them."""
    places = [source - 1 for source in reading.sources]
    return [sample._replace(layers=sample.layers[:, places].roll(-reading.features, 0)) for sample in samples]


@torch.inference_mode()
def unrolled(reading: Reading, samples: Sequence[Sample], depth: int | None = None) -> Counts:
    """Chains that begin at every slot of the answers, teacher-forced, as a validation counts them."""
    draft, depth, rows = reading.draft(), depth or reading.depth, []
    embed_head = reading.embed_head if draft.config.own_head else reading.embed_head.restrict(draft.vocabulary)
    weight = draft.fc.weight
    for sample in samples:
        tokens, greedy = sample.tokens.to(weight.device), sample.greedy.to(weight.device)
        counts = counted_passes(len(tokens), np.array(sample.spans))[None, :-1].to(weight.device)
        embedded = embed_head.embed(tokens[None, 1:]).roll(-reading.tokens, 1)
        inputs = sample.draft_input[None, :-1].to(weight)
        predictions, counts = draft(embedded, inputs, depth, None, counts[0].nonzero()[:, 0]), counts[:, :-1]
        greedy, text = (each.roll(-reading.labels)[None] for each in (greedy[1:-1], tokens[2:]))
        proposals, alive = greedy.new_full((depth, *counts.shape), -1), counts[0] > 0
        for k in range(min(depth, len(alive))):  # the head is read where a chain has come so far
            slots = k + alive.nonzero()[:, 0]
            proposals[k, 0, slots] = draft.token_ids(draft.logits(predictions[k][0, slots], embed_head).argmax(-1))
            alive = (alive & (proposals[k, 0, k:] == text[0, k:]))[:-1]
        metric = UnrollAcceptance(depth).to(weight.device)
        metric.update(proposals, greedy, text, counts)
        rows.append(torch.stack([metric.reached, metric.passed]).cpu().numpy())
    return Counts(*np.stack(rows, axis=1).astype(float))


def replayed(reading: Reading, samples: Sequence[Sample], nodes: int = 1, width: int = 1) -> Counts:
    """What rounds accept, as `poss replay` counts it; chains by default."""
    plan = Plan(reading.depth, max(nodes, reading.depth + 1), width)
    rounds = replay_rounds(reading.draft(), reading.embed_head, samples, plan)
    return _of_rounds([[count for answer in own for count in answer] for own in rounds], reading.depth)


def _of_rounds(rounds: Sequence[Sequence[int]], depth: int) -> Counts:
    accepted, places = [np.array(own, int)[:, None] for own in rounds], np.arange(1, depth + 1)
    return Counts(*(np.array([(own >= places - less).sum(0) for own in accepted], float) for less in (1, 0)))


def served_counts(path: str) -> Counts:
    """The rounds that an engine has counted, of vLLM's /metrics or `get_metrics()`, or of answers with their rounds.

    Raises:
        ValueError: nothing in the file says how many tokens were accepted.
    """
    sums: Counter[str] = Counter()
    for name, labels, value in COUNTER.findall(Path(path).read_text()):
        place = re.search(r'position="(\d+)"', labels)
        values = json.loads(value) if value[0] == "[" else [float(value)]
        sums.update(
            {place[1] if place else str(i) if name != "drafts" else name: count for i, count in enumerate(values)}
        )
    if not sums:
        rounds = [row["accepted"] for row in read_engine(Path(path))]
        return _of_rounds(rounds, max(max(own, default=1) for own in rounds))
    passed = [sums[str(place)] for place in range(len(sums) - 1)]
    return Counts(np.array([[sums["drafts"], *passed[:-1]]], float), np.array([passed], float))
