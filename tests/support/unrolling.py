"""The unroll beside what it must equal, on the target's device: drafting, and its conversations one by one."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.draft.attention import Packing
from poss_lightning.draft.config import RopeScaling
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.target_model.cache import Slots
from poss_lightning.target_model.model import Target

# of a context so short that the tiny target's four frequencies are kept, mixed and slowed
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=80)
KINDS = [
    *(pytest.param(allocation, {}, id=str(allocation)) for allocation in ([6], [1] * 6, [1, 3, 2])),
    pytest.param([1, 3, 2], {"kv": "shared"}, id="one cache for all"),
    pytest.param([8], {"kind": "eagle3"}, id="EAGLE-3"),
    pytest.param([1, 3, 2], {"kind": "eagle3"}, id="EAGLE-3, specialists"),
    pytest.param([2, 2, 2], {"kind": "eagle3", "kv": "shared"}, id="SPEED, in runs of two"),
    pytest.param([2, 2, 2], {"window": 8}, id="a window"),
    pytest.param([3, 3], {"kind": "eagle3", "kv": "shared", "window": 8}, id="SPEED with a window"),
    pytest.param([3], {"kind": "eagle3", "fc_norm": True, "norm_output": True}, id="EAGLE-3.1"),
    pytest.param([1, 3, 2], {"kind": "eagle3", "norm_output": True}, id="specialists that read normed outputs"),
    pytest.param([1, 3, 2], {"kind": "eagle3", "norm_before_residual": True}, id="a normed residual"),
    pytest.param([3, 3], {"kind": "eagle3", "norm_before_fc": True, "rope_scaling": LLAMA3}, id="Llama 3.1's angles"),
]
BLOCKS = [
    pytest.param([6], {"kind": "block", "inner_layers": (1, 5), "mask_token": 3}, id="a block"),
    pytest.param([6], {"kind": "block", "block_layers": 2, "window": 8}, id="a block with a window"),
]

HEAD = ("norm.weight", "lm_head.weight")  # of an own head, which the unroll does not ask


def inputs(target, count=12, batch=1, seed=1, draft=None):
    """Tokens, their embeddings, and what a draft reads of the target."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, target.spec.vocab_size, (batch, count), generator=generator).to(target.device)
    width = target.spec.hidden_size * (len(draft.config.aux_layers) if draft and draft.config.aux_layers else 1)
    features = torch.randn(batch, count, width, generator=generator).to(target.device)
    return tokens, target.embed_head.embed(tokens), features


def packed(rows: list[list[int]], count: int, device: torch.device | str = "cpu") -> Packing:
    """Conversations of these lengths in rows of `count` slots."""
    positions = [[i for length in lengths for i in range(length)] for lengths in rows]
    return Packing(rows, torch.tensor([(row + [0] * count)[:count] for row in positions], device=device))


def append(drafter: TreeDrafter, tokens: Tensor, draft_input: Tensor, counts: list[int]) -> None:
    """Let verified slots arrive: the first so many of each row."""
    on_device = torch.tensor(counts, device=tokens.device)
    drafter.slots.advance_device(on_device)
    drafter.slots.advance_host(counts)
    drafter.append_context(tokens, draft_input, on_device)


def unroll_what_is_drafted(target: Target, draft: DraftModel) -> tuple[Tensor, Tensor, bool]:
    """Let the Drafter draft a chain, and feed its tokens to the unroll.

    Returns:
        The unroll's features there and the Drafter's own (K, D), and whether the unroll would draft the same tokens.
    """
    start, depth, device = 11, 6, target.device
    tokens, _, features = inputs(target, start + 1, draft=draft)
    plan = TreePlan(depth, depth + 1, tree_width=1)
    drafter = TreeDrafter(draft, target.embed_head, plan)
    drafter.start(Slots(1, 64, device))
    for first, last in ((0, 7), (7, start + 1)):  # in two rounds; how slots arrive makes no difference
        if first:
            drafter.draft(tokens[:, first - 1 : first], plan)
        append(drafter, tokens[:, first:last], features[:, first:last], [last - first])
    stepped, step = [], drafter.step
    drafter.step = lambda *arguments: stepped.append(step(*arguments)) or stepped[-1]
    chain = drafter.draft(tokens[:, -1:], plan).tokens[:, 1:]  # (1, K)
    padded = torch.cat([features, features.new_zeros(1, depth, features.shape[-1])], dim=1)
    passes = draft(target.embed_head.embed(torch.cat([tokens, chain], dim=1)), padded, depth)
    unrolled = torch.stack([output[0, start + k] for k, output in enumerate(passes)])  # (K, D)
    drafted = torch.stack([features[0, 0] for features, _ in stepped])
    return unrolled, drafted, torch.equal(draft.logits(unrolled, target.embed_head).argmax(-1), chain[0])


class Learnt(NamedTuple):
    """Of three conversations."""

    outputs: list[Tensor]  # (K, slots that are real in every pass, D) each
    gradients: list[Tensor]  # of every parameter but an own head's, summed


def packed_padded_alone(target: Target, draft: DraftModel) -> tuple[Learnt, Learnt, Learnt]:
    """Three conversations in one row, one a row, and each by itself."""
    lengths, depth = [7, 12, 9], 6
    texts = [inputs(target, length, seed=length, draft=draft)[1:] for length in lengths]  # (1, T, D) and (1, T, R)

    def run(embedded: Tensor, features: Tensor, packing: Packing | None, places: list[tuple[int, slice]]) -> Learnt:
        draft.zero_grad()
        passes = draft(embedded, features, depth, packing)
        real = [torch.stack([p[row, slots][depth - 1 :] for p in passes]) for row, slots in places]
        sum(part.square().sum() for part in real).backward()
        return Learnt(real, [p.grad.clone() for name, p in draft.named_parameters() if name not in HEAD])

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, max(lengths) - x.shape[1]))

    own = [(0, slice(0, n)) for n in lengths]
    in_one, one_a_row = (
        packed(rows, max(map(sum, rows)), target.device) for rows in ([lengths], [[n] for n in lengths])
    )
    edges = [(0, slice(0, 7)), (0, slice(7, 19)), (0, slice(19, 28))]
    together = run(*(torch.cat(x, 1) for x in zip(*texts, strict=True)), in_one, edges)
    below = [torch.cat([*map(padded, x)]) for x in zip(*texts, strict=True)]
    rows = run(*below, one_a_row, [(row, slots) for row, (_, slots) in enumerate(own)])
    singles = [run(*text, None, [place]) for text, place in zip(texts, own, strict=True)]
    summed = [sum(parts) for parts in zip(*(single.gradients for single in singles), strict=True)]
    return together, rows, Learnt([single.outputs[0] for single in singles], summed)
