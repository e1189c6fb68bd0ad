"""How often one of n drafted tokens is what the target draws: by published rules, by ours, and at best.

With the target's distribution p and the draft's q over V tokens, at one place (arXiv 2502.18779):

    unseeing       the n most likely of q, whatever is drawn: Σ p over them
    replaced       n drawn from q, each accepted or rejected in turn (recursive rejection, arXiv 2305.09781)
    distinct       the same without replacement (arXiv 2402.14160)
    greedy         the n - 1 most likely and one drawn from the rest: Σ_top p + Σ_rest min(p, q / z), z the rest's mass
    coupled        ours: the n largest of log q + g, where the target takes the largest of log p + g
    optimum        the most that any judge can accept of n independent draws from q

Like `distinct`, `coupled` may exceed that optimum, as its children differ. Letters: V tokens, "..." places.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.stored import Answer
from poss_lightning.sampling import TokenSampler
from poss_lightning.target.spec import EmbedHead

RULES = ("unseeing", "replaced", "distinct", "greedy", "coupled", "optimum")
COMPARED_PLACES = 256  # of all answers, at which p and q are compared
TINY = 1e-300


def unseeing(p: Tensor, q: Tensor, n: int) -> Tensor:
    """(..., V) twice -> (...,)"""
    return p.gather(-1, q.topk(n).indices).sum(-1)


def greedy(p: Tensor, q: Tensor, n: int) -> Tensor:
    """(..., V) twice -> (...,)"""
    top = q.topk(n - 1).indices
    rest = q.scatter(-1, top, 0)
    one = torch.minimum(p, rest / rest.sum(-1, keepdim=True).clamp(min=TINY)).scatter(-1, top, 0)
    return p.gather(-1, top).sum(-1) + one.sum(-1)


def replaced(p: Tensor, q: Tensor, n: int) -> Tensor:
    """(..., V) twice -> (...,): after a rejection the target is left with max(p - q, 0), normalised."""
    missed = torch.ones_like(p[..., 0])
    for _ in range(n):
        missed = missed * (1 - torch.minimum(p, q).sum(-1))
        p = _residual(p, q)
    return 1 - missed


def distinct(p: Tensor, q: Tensor, children: Tensor) -> Tensor:
    """How often one of these children (..., n), drawn one by one without replacement, is accepted: (...,)."""
    missed = torch.ones_like(p[..., 0])
    for child in children.split(1, dim=-1):
        chance = (p.gather(-1, child) / q.gather(-1, child).clamp(min=TINY))[..., 0]
        missed = missed * (1 - chance.clamp(max=1))
        p, q = _residual(p, q), q.scatter(-1, child, 0)
        q = q / q.sum(-1, keepdim=True).clamp(min=TINY)
    return 1 - missed


def optimum(p: Tensor, q: Tensor, n: int) -> Tensor:
    """1 + min of p(H) - q(H)^n over sets H, of which only the prefixes in the order of p / q matter: (...,)."""
    order = (p / q.clamp(min=TINY)).argsort(-1)
    within = p.gather(-1, order).cumsum(-1) - q.gather(-1, order).cumsum(-1) ** n
    return 1 + within.amin(-1).clamp(max=0)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0)
    return rest / rest.sum(-1, keepdim=True).clamp(min=TINY)


@torch.inference_mode()
def acceptance_rates(
    draft: Specialists, embed_head: EmbedHead, answers: Sequence[Answer], depth: int, counts: Sequence[int]
) -> Tensor:
    """Means over some places of the answers, all drawn alike: (depth, len(counts), len(RULES)).

    Position k is drafted from the text itself, so only its own distribution differs from the target's.
    """
    head = embed_head if draft.config.own_head else embed_head.restrict(draft.vocabulary)
    proposed = slice(None) if draft.vocabulary is None else draft.vocabulary
    weight = draft.fc.weight
    step = max(1, sum(len(answer.tokens) - answer.start for answer in answers) // COMPARED_PLACES)
    generator, total = torch.Generator().manual_seed(0), [0] * depth
    sums = torch.zeros(depth, len(counts), len(RULES)).double()
    for answer in answers:
        sampling = answer.sampling
        tokens, features, read = (x.to(weight.device) for x in (answer.tokens, answer.features, answer.draft_input))
        sampler = TokenSampler(1, draft.config.target.vocab_size, weight.device)
        sampler.begin(sampling, [[]], seeds=[answer.draw.seed if answer.draw else 0])
        embedded = embed_head.embed(tokens[1:])[None].to(weight.dtype)
        outputs = draft(embedded, read[None, :-1].to(embedded), depth)
        for k, output in enumerate(outputs):
            for places in torch.arange(answer.start + k + 1, len(tokens), step, device=weight.device).split(16):
                drafted = draft.logits(output[0, places - 2], head).float()  # of the slots that propose these tokens
                logits = torch.full((len(places), sampler.ids.shape[0]), -torch.inf, device=drafted.device)
                logits[:, proposed] = drafted  # (places, V)
                p = sampling.probabilities(embed_head.logits(features[places - 1])).cpu().double()
                q = (logits / sampling.temperature).cpu().double().softmax(-1)
                noise = sampler.noise(places[None])
                assert noise is not None, "greedy answers have no noise"
                seeing = (logits + noise[0]).topk(max(counts)).indices.cpu()
                hit = seeing == tokens[places].cpu()[:, None]  # (places, n)
                drawn = torch.empty_like(q).exponential_(generator=generator).reciprocal_().mul_(q)
                drawn = drawn.topk(max(counts)).indices  # (places, n)
                sums[k] += torch.stack([_rates(p, q, drawn[:, :n], hit[:, :n]).sum(0) for n in counts])
                total[k] += len(places)
    return sums / torch.tensor(total)[:, None, None]


def _rates(p: Tensor, q: Tensor, drawn: Tensor, hit: Tensor) -> Tensor:
    """(places, V) twice, n children drawn from q, whether n of ours were right -> (places, len(RULES))"""
    n = drawn.shape[1]
    coupled = hit.any(-1).double()
    rates = unseeing(p, q, n), replaced(p, q, n), distinct(p, q, drawn), greedy(p, q, n), coupled, optimum(p, q, n)
    return torch.stack(rates, -1)


def table(rates: Tensor, counts: Sequence[int]) -> str:
    """Lines of text, one per position and n."""
    lines = ["position   n  " + "".join(f"{rule:>10}" for rule in RULES)]
    for k, of_position in enumerate(rates, 1):
        for n, row in zip(counts, of_position, strict=True):
            lines.append(f"{k:>8} {n:>3}  " + "".join(f"{rate:>10.3f}" for rate in row))
    return "\n".join(lines)
