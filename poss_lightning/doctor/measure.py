"""What a variant of a draft accepts, by prompt and position."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from poss_lightning.decoding.plans import TreePlan
from poss_lightning.doctor.answers import LONG
from poss_lightning.doctor.variants import Variant
from poss_lightning.draft.attention import Packing
from poss_lightning.evaluation.serving_metrics import read_served
from poss_lightning.evaluation.stored_rounds import replay_rounds
from poss_lightning.features.store import Sample
from poss_lightning.features.stream import collate
from poss_lightning.ranges import MAX_POSITIONS
from poss_lightning.reports.acceptance import Counts


def as_read(samples: Sequence[Sample], variant: Variant) -> list[Sample]:
    """Return samples with what a variant reads of the target, as a store has them."""
    layers = [source - 1 for source in variant.sources]
    return [sample._replace(layers=sample.layers[:, layers].roll(-variant.features, 0)) for sample in samples]


@torch.inference_mode()
def unrolled(variant: Variant, samples: Sequence[Sample], depth: int = MAX_POSITIONS) -> Counts:
    """Count chains that begin at every slot of the answers, teacher-forced, as a validation does."""
    draft, depth, weight = variant.draft, min(depth, variant.depth), variant.draft.fc.weight
    embed_head, batch = variant.embed_head.restrict(draft.vocabulary), collate([as_read(samples, variant)])
    parts = batch.tokens, batch.target_argmax, batch.mask.passes
    tokens, greedy, counts = (part[0].to(weight.device) for part in parts)  # of T slots in (T + 1,), (T + 1,), (T,)
    positions = batch.positions[:, :-1].to(weight.device)
    chains = counts.nonzero()[:, 0]  # the slots where they begin
    texts = torch.arange(len(samples)).repeat_interleave(torch.tensor(batch.lengths[0])).to(weight.device)
    whole = Packing.one_per_row(1, len(counts), weight.device)
    packing = whole if variant.texts == LONG else Packing(batch.lengths, positions)
    embedded = embed_head.embed(tokens[None, 1:]).roll(-variant.tokens, 1) * variant.scale
    predictions = draft(embedded, batch.draft_input[:, :-1].to(weight), depth, packing, chains)
    greedy, text = greedy[1:].roll(-variant.labels), tokens[1:].roll(-1 - variant.labels)
    counts, by_text = pad(counts, (0, depth)), []
    for k, predicted in enumerate(predictions):
        chains = chains[counts[chains + k] > k]
        slots = chains + k
        proposed = draft.token_ids(draft.logits(predicted[0, slots], embed_head).argmax(-1))
        hit = proposed == greedy[slots]
        by_text.append([texts[part].bincount(minlength=len(samples)).tolist() for part in (slots, slots[hit])])
        chains = chains[hit & (proposed == text[slots])]
    return Counts(*np.array(by_text, float).transpose(1, 2, 0))


def screened(variant: Variant, samples: Sequence[Sample], depth: int) -> Counts:
    """Count as `unrolled` where no token but those of the answers is proposed: the head is most of its work."""
    return unrolled(variant.proposing(torch.cat([sample.greedy for sample in samples]).unique()), samples, depth)


def blind(variant: Variant, samples: Sequence[Sample]) -> Counts:
    """Count position 1 where the draft reads zeros for the target's layers."""
    return unrolled(variant, [sample._replace(layers=torch.zeros_like(sample.layers)) for sample in samples], 1)


def misplaced(variant: Variant, samples: Sequence[Sample]) -> Counts:
    """Count position 1 where the draft reads the target's layers half a text further on."""
    turned = [sample._replace(layers=sample.layers.roll(len(sample.layers) // 2, 0)) for sample in samples]
    return unrolled(variant, turned, 1)


def replayed(variant: Variant, samples: Sequence[Sample], nodes: int = 1, is_coupled: bool = True) -> Counts:
    """Count what rounds accept, as `poss replay` does, in chains or in trees of `nodes` and width 10.

    For answers that were drawn, drafts see the noise of the draw; or, not coupled, draft what is most likely.
    """
    plan = TreePlan(variant.depth, max(nodes, variant.depth + 1), 10 if nodes > 1 else 1)
    read = [each._replace(draws=each.draws if is_coupled else ()) for each in as_read(samples, variant)]
    rounds = replay_rounds(variant.draft, variant.embed_head, read, plan)
    accepted = [np.array([count for answer in own for count in answer], int)[:, None] for own in rounds]
    positions = np.arange(1, variant.depth + 1)
    return Counts(*(np.array([(own >= positions - less).sum(0) for own in accepted], float) for less in (1, 0)))


def engine_acceptance(path: str) -> tuple[float, list[float]]:
    """Return what an engine accepted, as `read_served` reads it: τ, and pos-acc by position; [] of a mean alone."""
    served = read_served(Path(path))
    return served.tau, Counts.of_engine(served).rates()[0].tolist()
