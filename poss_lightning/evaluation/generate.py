"""`poss generate`: an answer while it is decoded, and how fast it came."""

import os
import sys
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from json import dumps
from typing import Literal

import torch

from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Decoded, Decoder, Progress
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.drawing import Guesses, draw
from poss_lightning.evaluation.streaming import Pieces
from poss_lightning.sampling import Sampling
from poss_lightning.target.generation import until_stop
from poss_lightning.target.model import Target


def generate(
    prompt: str,
    draft: str | None = None,
    target: str = "embedded",
    max_new_tokens: int = 256,
    tree: Literal["auto", "fixed"] = "auto",
    depth: int | None = None,
    nodes: int = 60,
    tree_width: int = 10,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    compare: bool | None = None,
    chat: bool = False,
    show: Literal["tree"] | None = None,
    json: bool = False,
) -> None:
    """Answer a prompt while you read, and say how fast it was.

    Args:
        prompt: what the user asks; - reads it from stdin.
        draft: draft folder, hub id or shipped head; without one the target decodes alone.
        target: "embedded", a local folder or a hub id.
        max_new_tokens: at most that many an answer.
        tree: "auto" sizes trees by expected tokens a second on this machine, "fixed" takes all of depth and nodes.
        depth: draft positions K, at most; the draft's own (the sum of its allocation) by default.
        nodes: of a tree, root included, at most.
        tree_width: children tried a node; 1 drafts chains.
        temperature: of drawing tokens; 0 takes the likeliest.
        top_k: draw among so many likeliest tokens; 0 for all.
        top_p: draw among the likeliest tokens that hold this mass.
        seed: of what is drawn.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
        compare: decode the answer once more without the draft, for the speed-up; by default wherever there is a draft,
            but not in a chat.
        chat: go on asking, line by line, up to an empty one or the end of stdin; with - for a prompt, from the first.
        show: "tree" draws what was drafted, accepted and added in every round, in colour unless NO_COLOR is set.
        json: print one JSON object, and nothing else.
    """
    config = {name: value for name, value in locals().items() if name not in ("compare", "chat", "show", "json")}
    _refuse(draft, top_k, compare, chat, show, json)
    sampling = Sampling(temperature, top_k, top_p)
    if prompt == "-" and not chat:
        prompt = config["prompt"] = sys.stdin.read().strip()
    if not prompt.strip():
        raise ValueError("the prompt is empty: say something, or - to read it from stdin")
    loaded = Specialists.from_pretrained(draft) if draft else None
    model = Target.load(target, dtype, device)
    config |= {"dtype": model.dtype_name, "device": str(model.device)}
    decoder = Speculative(model, loaded, depth, nodes, tree_width, tree) if loaded else Autoregressive(model)
    if compare is None:
        compare = loaded is not None and not chat

    messages: list[dict[str, str]] = []
    for turn, question in enumerate(_questions(prompt, chat)):
        messages.append({"role": "user", "content": question})
        ask = Ask(model.chat.prompt(messages), max_new_tokens, sampling, seed + turn)
        if json:
            answer = ask.of(decoder)
            plain = ask.plain(model, answer) if compare else None
            print(dumps(config | _trees(decoder) | _facts(model, answer, plain), ensure_ascii=False))
        else:
            answer = _tell(ask, decoder, show)
            print(f"\n{_speed(answer)}", end="", flush=True)
            print(_comparison(answer, ask.plain(model, answer), model.dtype_name) if compare else "")
        messages.append({"role": "assistant", "content": model.chat.text(answer.tokens)})


class Ask:
    """One prompt, and how it is to be answered.

    Args:
        prompt: token ids.
        limit: new tokens, at most.
        sampling: how they are chosen.
        seed: of what is drawn.
    """

    def __init__(self, prompt: list[int], limit: int, sampling: Sampling, seed: int):
        self.prompt, self.limit, self.sampling, self.seed = prompt, limit, sampling, seed

    def of(self, decoder: Decoder, watch: Callable[[Progress], None] | None = None) -> Decoded:
        """The answer; `watch` is as in `Decoder.decode`."""
        drawn = torch.Generator().manual_seed(self.seed)
        return decoder.decode([self.prompt], self.limit, None, self.sampling, drawn, watch)[0]

    def plain(self, target: Target, answer: Decoded) -> Decoded:
        """As many tokens by plain decoding, with the same draws."""
        return Ask(self.prompt, len(answer.tokens), self.sampling, self.seed).of(Autoregressive(target))


def _refuse(
    draft: str | None, top_k: int, compare: bool | None, chat: bool, show: str | None, json: bool
) -> None:
    """Raise ValueError where options contradict each other."""
    if chat and json:
        raise ValueError("chat and json are both true: a chat is read and json is one object, so choose one")
    if show and json:
        raise ValueError(f"show is {show} and json true: drawings are no JSON, so choose one")
    if show and not draft:
        raise ValueError(f"show is {show}, but without --draft there is none")
    if compare and not draft:
        raise ValueError("compare is true, but without --draft decoding is plain already")
    if top_k < 0:
        raise ValueError(f"top_k is {top_k}; it must be 0 (all tokens) or a positive number of them")


def _questions(prompt: str, chat: bool) -> Iterator[str]:
    """The prompt, and in a chat what is asked after the answer to it."""
    if not chat or prompt != "-":
        yield prompt
    while chat and (line := _line()):
        yield line


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()  # where the terminal's own line ended
        return ""


def _tell(ask: Ask, decoder: Decoder, show: str | None) -> Decoded:
    """The answer, said as it is accepted; or each round drawn, and then the answer."""
    chat, number = decoder.target.chat, count(1)
    pieces = Pieces(chat.text)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def say(step: Progress) -> None:
        print(pieces.add(step.tokens[0]), end="", flush=True)

    def picture(step: Progress) -> None:
        if step.tree is not None:
            guesses = guesses_of(step, chat.stops)
            drafted, accepted = len(guesses.tokens) - 1, len(guesses.path) - 1
            print(f"round {next(number)}: {drafted} drafted, {accepted} accepted")
            print(draw(guesses, lambda token: decoder.target.tokenizer.decode([token]), colour), end="\n\n")

    answer = ask.of(decoder, picture if show else say)
    print(chat.text(answer.tokens) if show else pieces.rest())
    return answer


def guesses_of(step: Progress, stops: frozenset[int]) -> Guesses:
    """What the first row of a round's tree says, to draw it."""
    accepted = int(step.verdict.accepted[0])
    emitted = until_stop(step.verdict.tokens[0, : accepted + 1].tolist(), stops)
    path = step.verdict.path[0, : min(accepted, len(emitted)) + 1].tolist()
    bonus = emitted[accepted] if len(emitted) > accepted else None
    return Guesses(*(part[0].tolist() for part in step.tree), path, bonus)


def _rate(answer: Decoded) -> float:
    return len(answer.tokens) / answer.seconds["total"]


def _tau(answer: Decoded) -> float | None:
    return sum(answer.accepted) / len(answer.accepted) + 1 if answer.accepted else None


def _speed(answer: Decoded) -> str:
    tau = f", τ {_tau(answer):.2f}" if answer.accepted else ""
    first = f" (after {measured:.1f} s to measure this machine)" if (measured := answer.seconds.get("measure")) else ""
    return f"{len(answer.tokens)} tokens, {_rate(answer):.1f} tokens/s{first}{tau}"


def _comparison(answer: Decoded, plain: Decoded, dtype: str) -> str:
    """What follows `_speed`: the speed-up, and whether the tokens are plain decoding's."""
    speed = f", {_rate(answer) / _rate(plain):.2f} × plain decoding ({_rate(plain):.1f} tokens/s)"
    if answer.tokens == plain.tokens:
        return f"{speed}, same tokens"
    pairs = zip_longest(answer.tokens, plain.tokens)
    first = next(number for number, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs)
    why = "which float32 should not: please report it" if dtype == "float32" else "where two all but tied in " + dtype
    return f"{speed}, other tokens from number {first} on, {why}"


def _trees(decoder: Decoder) -> dict:
    """The tree's settings as they are: nothing of a tree without a draft."""
    if not isinstance(decoder, Speculative):
        return dict.fromkeys(("tree", "depth", "nodes", "tree_width"))
    drafter = decoder.drafter
    return {"tree": decoder.tree, "depth": drafter.depth, "nodes": decoder.nodes, "tree_width": drafter.tree_width}


def _facts(target: Target, answer: Decoded, plain: Decoded | None) -> dict:
    return {
        "text": target.chat.text(answer.tokens),
        "tokens": answer.tokens,
        "accepted": answer.accepted,
        "tau": _tau(answer),
        "seconds": answer.seconds,
        "tokens_per_second": _rate(answer),
        "speed_up": plain and _rate(answer) / _rate(plain),
        "equal": plain and answer.tokens == plain.tokens,
    }
