"""Answers in a feature store: where they are, how they were drawn, and whether the target wrote them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poss_lightning.features.store import Sample
from poss_lightning.sampling import GREEDY, Draw, Sampling, TokenSampler
from poss_lightning.target_model.spec import EmbedHead

# Measured with the embedded target in bfloat16. Where it reads its own greedy answers, ties make it choose a different
# token at 0.5 to 2 % of all tokens, and within the first 8 tokens of 7 to 13 % of the answers. In texts that others
# wrote: 17 and 51 %.
MAX_MISMATCH = 0.05  # of all tokens
OPENING, MAX_OPENING_MISMATCH = 8, 0.25  # first tokens of an answer; of the answers with a mismatch there


class Answer(NamedTuple):
    """One assistant's answer of a stored sample, without an end that the target did not write."""

    conversation: str
    turn: int  # of the conversation's answers, from 0
    tokens: Tensor  # (T,) prompt and answer
    draft_input: Tensor  # (T, R), what the draft reads after each token
    choices: Tensor  # (T - start,), what the target chooses at the answer's places, given the text before each
    start: int  # of the answer
    complete: bool  # the target ended it; otherwise it was cut, and the token after it is unknown
    draw: Draw | None  # how the target drew it; None where it is greedy

    @property
    def sampling(self) -> Sampling:
        """How its tokens were chosen."""
        return self.draw.sampling if self.draw else GREEDY


def find_answers(sample: Sample, embed_head: EmbedHead) -> Iterator[Answer]:
    """Yield the sample's answers, without the template's own end where the target did not end them.

    An answer at the sample's end counts as cut, since `poss extract` may have cut it. `embed_head` is the target's: it
    says what would be drawn.
    """
    spans = zip(sample.spans, sample.draws or [None] * len(sample.spans), strict=True)
    with_rounds = ((start, stop, draw) for (start, stop), draw in spans if start >= 1 and stop - start >= 2)
    for turn, (start, stop, draw) in enumerate(with_rounds):
        choices = sample.greedy[start - 1 : stop - 1]
        if draw:
            features = sample.features[start - 1 : stop - 1].to(embed_head.head.device)
            choices = _draw_again(draw, embed_head.logits(features), start)
        complete = bool(choices[-1] == sample.tokens[stop - 1]) and stop < len(sample.tokens)
        end = stop if complete else stop - 1
        tokens, draft_input = sample.tokens[:end], sample.draft_input[:end]
        yield Answer(sample.id, turn, tokens, draft_input, choices[: end - start], start, complete, draw)


def _draw_again(draw: Draw, logits: Tensor, start: int) -> Tensor:
    """Return the tokens drawn from logits (n, V) at n places of a text, the first of which is `start`: (n,)."""
    sampler, chosen = TokenSampler(1, logits.shape[-1], logits.device), []
    sampler.begin(draw.sampling, [[]], seeds=[draw.seed])
    for some in torch.arange(len(logits), device=logits.device).split(64):  # noise is as large as logits
        noise = sampler.noise(start + some[None])
        chosen.append(sampler.choose(logits[None, some], noise, some[None] - some[0])[0])
    return torch.cat(chosen).cpu()


def sampling_settings(answers: Sequence[Answer]) -> dict[str, Any]:
    """Describe how all answers were chosen, as run.json says it; raises ValueError where they differ."""
    kinds = {answer.sampling for answer in answers} or {GREEDY}
    if len(kinds) > 1:
        ways = ", ".join(map(str, kinds))
        raise ValueError(f"the store's answers were chosen in {len(kinds)} ways: {ways}; give a store of each")
    (sampling,) = kinds
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}


def describe_mismatch(answers: Sequence[Answer]) -> str | None:
    """Describe how far the answers are from the target's own, in words; None where they are its own.

    Others may have written them, they may have been drawn without saying how, or a template changes them when it
    renders them: that of Qwen3 puts an empty thought before an answer that was cut in the middle of one.
    """
    differs = [answer.choices != answer.tokens[answer.start :] for answer in answers]
    if not differs:
        return None
    share = float(torch.cat(differs).float().mean())
    openings = sum(bool(tokens[:OPENING].any()) for tokens in differs) / len(differs)
    if share <= MAX_MISMATCH and openings <= MAX_OPENING_MISMATCH:
        return None
    kind = "own" if answers[0].draw else "own greedy"
    return (
        f"the answers are not the target's {kind} ones: {100 * share:.1f} % of their tokens are not what it would "
        f"write there, and {100 * openings:.0f} % of them differ within {OPENING} tokens; acceptance is that of this "
        "text"
    )
