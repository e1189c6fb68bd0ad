"""`poss generate`: print an answer while it is decoded, and then its speed."""

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any, Literal

import torch

from poss_lightning.corpus.turns import read_message
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.decoder import Decoded, Decoder, Progress
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import DEFAULT_LOOKUP
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.options import DecodingOptions
from poss_lightning.evaluation.streaming import IncrementalDetokenizer
from poss_lightning.evaluation.tree_view import drafted_tree, draw
from poss_lightning.ranges import Lookups, Tokens, check_numbers
from poss_lightning.sampling import GREEDY, Sampling
from poss_lightning.target_model.template import Message
from poss_lightning.terminal import printable

logger = logging.getLogger(__name__)


@check_numbers
def generate(
    prompt: str,
    *,
    draft: str | None = None,
    max_new_tokens: Tokens = 256,
    lookup: Lookups | None = None,
    compare: bool = True,
    chat: bool = False,
    show: Literal["tree"] | None = None,
    **decoding: Any,
) -> None:
    """Print the answer to a prompt while it is decoded, then its speed and, unless in a chat, that of plain decoding.

    Args:
        prompt: the user's message; - reads it from stdin.
        draft: draft folder, hub id or shipped draft; without one the target decodes alone.
        max_new_tokens: most tokens of an answer.
        lookup: at most this many tokens that followed the same words earlier in the text join each tree; by default 10,
            and none without a draft. With a number and no draft they are all that is proposed.
        compare: decode the answer again by plain decoding, for the speed-up.
        chat: read further messages from stdin, one per line, until an empty line or the end; if the prompt is -, the
            first message too.
        show: "tree" draws every round: its tree, the accepted path and the bonus token; with --tree fixed, whole trees.
        **decoding: target, sizes of trees and sampling; see `DecodingOptions`.
    """
    options = DecodingOptions(lookup=DEFAULT_LOOKUP * bool(draft) if lookup is None else lookup, **decoding)
    if prompt == "-" and not chat:
        prompt = sys.stdin.read().strip()
    if not prompt.strip():
        raise ValueError("the prompt is empty: say something, or - to read it from stdin")
    loaded = load_draft(draft) if draft else None
    model = options.load(options.exact)
    alone = Autoregressive(model)
    decoder = Speculative.from_draft(model, loaded, options.plan) if loaded or options.lookup else alone

    messages: list[Message] = []
    for turn, text in enumerate(_ask(prompt) if chat else [prompt]):
        text.encode()  # a terminal's bytes may be no text: an error here names them
        messages.append(read_message({"role": "user", "content": text}, "the prompt"))
        ask = partial(answer, prompt=model.chat.prompt(messages), sampling=options.sampling, seed=options.seed + turn)
        is_compared = compare and decoder is not alone and not chat
        if is_compared:  # the first forward takes longer, and would count against one of the two
            ask(alone, limit=1)
        detokenizer = IncrementalDetokenizer(model.chat.text)
        decoded = ask(decoder, limit=max_new_tokens, watch=_watch(decoder, detokenizer, show))
        content = model.chat.text(decoded.tokens)
        plain = ask(alone, limit=len(decoded.tokens)) if is_compared else None
        print(f"{printable(content if show else detokenizer.rest())}\n\n{_speed(decoded, plain, decoder)}")
        if isinstance(decoder, Speculative) and decoder.auto and (why := decoder.auto.why_plain):
            logger.info("%s. --tree fixed drafts nevertheless", why)
        messages.append({"role": "assistant", "content": content})


def answer(
    decoder: Decoder,
    prompt: list[int],
    limit: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    watch: Callable[[Progress], None] | None = None,
) -> Decoded:
    """Decode the answer to a prompt's tokens; `watch` is as in `Decoder.decode`."""
    generator = torch.Generator().manual_seed(seed)
    return decoder.decode([prompt], limit, sampling=sampling, generator=generator, watch=watch)[0]


def _ask(prompt: str) -> Iterator[str]:
    """Yield the prompt, unless it is -, and the lines of stdin, to an empty one or the end."""
    if prompt != "-":
        yield prompt
    try:
        while line := input("> ").strip():
            if not sys.stdin.isatty():
                print(line)  # as a terminal shows what is typed
            yield line
    except EOFError:
        print()  # where the terminal's own line ended


def _watch(decoder: Decoder, detokenizer: IncrementalDetokenizer, show: str | None) -> Callable[[Progress], None]:
    """Return what prints tokens while they are accepted, or draws each round."""
    number = count(1)

    def print_tokens(step: Progress) -> None:
        print(printable(detokenizer.add(step.tokens[0])), end="", flush=True)

    def draw_round(step: Progress) -> None:
        if step.tree is not None:
            drawn_tree = drafted_tree(step, decoder.target.chat.stops)
            drafted, accepted = len(drawn_tree.tokens) - 1, len(drawn_tree.path) - 1
            print(f"round {next(number)}: {drafted} drafted, {accepted} accepted")
            print(draw(drawn_tree, lambda token: str(decoder.target.tokenizer.decode([token]))), end="\n\n")

    return draw_round if show else print_tokens


def _speed(decoded: Decoded, plain: Decoded | None, decoder: Decoder) -> str:
    """Describe how fast an answer was decoded, with τ, and compared with plain decoding."""
    rate, base = (len(one.tokens) / one.seconds["total"] if one else 0.0 for one in (decoded, plain))
    line = f"{len(decoded.tokens)} tokens, {rate:.1f} tokens/s"
    if prepared := sum(decoded.seconds.get(part, 0) for part in ("measure", "capture")):
        line += f" (after {prepared:.1f} s of preparation)"
    if decoded.accepted:
        line += f", τ {fmean(decoded.accepted) + 1:.2f}"
    if plain:
        same = decoded.tokens == plain.tokens
        output = "same tokens" if same else f"output differs (near-ties under {decoder.target.dtype_name} rounding)"
        if decoder.exact:
            output = "the same tokens, bit for bit" if same else "output differs, which is a bug: please report it"
        line += f", {rate / base:.2f} × plain decoding ({base:.1f} tokens/s), {output}"
    return line
