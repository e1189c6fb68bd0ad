"""The rounds of stored answers, without the target; `replay.py` says how."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from poss_lightning.decoding.drafter import make_drafter
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.lookup import Lookup, join
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.decoding.trees import ancestor_mask, rerank
from poss_lightning.decoding.verification import judge
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.evaluation.stored import Answer, find_answers
from poss_lightning.features.store import Sample
from poss_lightning.machine import to_device_async
from poss_lightning.sampling import Noise, Sampling, TokenSampler
from poss_lightning.target_model.cache import Slots
from poss_lightning.target_model.spec import EmbedHead

MAX_ROWS, MAX_ROWS_GPU = 16, 64  # answers that are replayed side by side
UNKNOWN = -2  # the token after the end of an answer: no draft proposes it


def replay_rounds(
    draft: DraftModel,  # in the features' dtype
    embed_head: EmbedHead,
    samples: Sequence[Sample],  # with the layers that the draft reads, and no others
    plan: TreePlan,
) -> list[list[list[int]]]:
    """Return what each round would accept, by sample and answer, if the target decoded the answers with this draft.

    The answers must be the target's own, greedy or drawn, as `poss synthesize` writes them; in other texts the
    result says how often the draft hits the text. Rounds whose full depth a cut answer does not show are left out.
    """
    by_sample = [list(find_answers(sample, embed_head)) for sample in samples]
    answers = [answer for own in by_sample for answer in own]
    replayed = iter(replay_answers(make_drafter(draft, embed_head, plan), answers))
    return [[next(replayed) for _ in own] for own in by_sample]


def replay_answers(drafter: TreeDrafter, answers: list[Answer]) -> list[list[int]]:
    """Return what each round of every answer accepts; those of about the same length side by side."""
    alike: dict[Sampling, list[int]] = {}
    on_gpu = drafter.specialists.fc.weight.device.type != "cpu"  # the longest first: if memory is short, at once
    rows, rounds = (MAX_ROWS_GPU if on_gpu else MAX_ROWS), {}
    lengths = [len(answer.tokens) - answer.start for answer in answers]
    for i in sorted(range(len(answers)), key=lengths.__getitem__, reverse=on_gpu):
        alike.setdefault(answers[i].sampling, []).append(i)
    batches = [group[i : i + rows] for group in alike.values() for i in range(0, len(group), rows)]
    for batch in tqdm(batches, desc="replay", unit="batch", delay=5, leave=False):
        rounds |= dict(zip(batch, _replay(drafter, [answers[i] for i in batch]), strict=True))
    return [rounds[i] for i in range(len(answers))]


@torch.inference_mode()
def _replay(drafter: TreeDrafter, answers: list[Answer]) -> list[list[int]]:
    """Return what each round of B answers accepts, side by side."""
    weight, plan, depth = drafter.specialists.fc.weight, drafter.plan, drafter.plan.reach
    device, lookup = weight.device, Lookup(drafter.plan.lookup)
    # Of the host: where an answer ends, and the place in its text of the next round's root, (B,).
    lengths = torch.tensor([len(answer.tokens) for answer in answers])
    root = torch.tensor([answer.start for answer in answers])
    complete = torch.tensor([answer.complete for answer in answers])
    capacity = int(lengths.max()) + depth + 1
    text = _pad([answer.tokens for answer in answers], capacity, UNKNOWN).to(device)  # (B, C)
    draft_input = _pad([answer.draft_input for answer in answers], capacity, 0).to(weight)  # (B, C, R)
    slots, first = Slots(len(answers), capacity + drafter.room, device), int(root.max())
    drafter.start(slots)
    slots.advance_device(root.to(device))
    slots.advance_host(root.tolist())
    drafter.append_context(text[:, 1 : first + 1].clamp(min=0), draft_input[:, :first], root.to(device))
    lookup.start(text, capacity)
    path = torch.arange(depth + 1, device=device)
    sampler = TokenSampler(len(answers), drafter.specialists.config.target.vocab_size, device)
    seeds = [answer.draw.seed if answer.draw else 0 for answer in answers]
    sampler.begin(answers[0].sampling, [[]] * len(answers), seeds=seeds)
    rounds: list[list[int]] = [[] for _ in answers]
    rows = list(rounds)  # those of unfinished answers
    while (active := root < lengths - 1).any():
        if 2 * active.sum() <= len(rows):  # finished rows cost time: drop them when they are many
            unfinished = active.nonzero()[:, 0].tolist()
            for part in (slots, drafter, sampler, lookup):
                part.select(unfinished)
            rows = [rows[i] for i in unfinished]
            state = (text, draft_input, complete, lengths, root, active)
            text, draft_input, complete, lengths, root, active = (values[unfinished] for values in state)
        at, moves = to_device_async(torch.stack([root, active.long()]), device)[..., None]  # (B, 1)
        # 1. Draft, and judge by the text: its next token is the target's choice.
        noise = Noise(sampler, at + path[1:])
        tree = rerank(drafter.draft(text.gather(1, at).clamp(min=0), plan, noise), plan.nodes)
        tree = join(tree, lookup.find(at[:, 0])[0]) if lookup.count else tree
        ancestors = ancestor_mask(tree.parents, depth)
        choice = text.gather(1, (at + ancestors.sum(-1)).clamp(max=capacity - 1))  # (B, N)
        verdict = judge(tree, ancestors, choice, depth)
        # 2. Commit, with the features of the text.
        path_slots = (at + path).clamp(max=capacity - 1)  # (B, K+1)
        on_path = draft_input.gather(1, path_slots[..., None].expand(-1, -1, draft_input.shape[-1]))
        counts = (verdict.accepted + 1) * moves[:, 0]
        slots.advance_device(counts)
        drafter.append_context(verdict.tokens.clamp(min=0), on_path, counts)
        taken = verdict.accepted.cpu()  # the only time in a round that the host waits
        # 3. Count the rounds that the text shows to their full depth.
        counted = active & (complete | (root + depth < lengths))
        accepted = taken.minimum(lengths - 1 - complete.long() - root)  # no bonus after an answer's end
        for row, count in zip(rows, accepted.where(counted, -1).tolist(), strict=True):
            row += [count] * (count >= 0)
        steps = (taken + 1) * active
        slots.advance_host(steps.tolist())
        root = root + steps
    return rounds


def _pad(parts: list[Tensor], length: int, fill: int) -> Tensor:
    """Put tensors side by side, padded on the right: (B, length, …)."""
    longest = parts[0].new_zeros(length, *parts[0].shape[1:])
    return pad_sequence([*parts, longest], batch_first=True, padding_value=fill)[:-1]
