"""`poss generate`: print an answer while it is decoded, and then its speed."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import count, zip_longest
from json import dumps
from typing import Any, Literal, NamedTuple

import torch

from poss_lightning.decoding.autoregressive import Autoregressive
from poss_lightning.decoding.decoder import Decoded, Decoder, Progress
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.lookup import choose_lookup
from poss_lightning.decoding.plans import Plan
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.drawing import Guesses, draw
from poss_lightning.evaluation.streaming import Pieces
from poss_lightning.ranges import Lookups, Seed, Temperature, Tokens, TopK, TopP, check_numbers
from poss_lightning.sampling import Sampling
from poss_lightning.target.generation import until_stop
from poss_lightning.target.model import Target
from poss_lightning.target.placement import Parallel
from poss_lightning.terminal import printable

logger = logging.getLogger(__name__)


@check_numbers
def generate(
    prompt: str,
    *,
    draft: str | None = None,
    target: str = "embedded",
    max_new_tokens: Tokens = 256,
    tree: Literal["auto", "fixed"] | None = None,
    lookup: Lookups | None = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    dtype: str = "auto",
    device: str = "auto",
    parallel: Parallel = "none",
    chat_template_kwargs: dict[str, Any] | None = None,
    compare: bool | None = None,
    chat: bool = False,
    show: Literal["tree"] | None = None,
    json: bool = False,
    **plan: Any,
) -> None:
    """Print the answer to a prompt while it is decoded, and then its speed.

    Args:
        prompt: the user's message; - reads it from stdin.
        draft: draft folder, hub id or shipped draft; without one the target decodes alone.
        target: "embedded", a local folder or a hub id.
        max_new_tokens: most tokens of an answer.
        tree: "auto" chooses trees for the most tokens per second on this machine, "fixed" always uses depth and nodes;
            auto by default, but fixed where rounds are drawn, as auto may draft nothing.
        lookup: at most this many tokens that followed the same words earlier in the text join each tree; by default 10
            where trees are auto, and none without a draft. With a number and no draft they are all that is proposed.
        temperature: sampling temperature; 0 takes the most likely token.
        top_k: sample among the k most likely tokens; 0 for all.
        top_p: sample among the most likely tokens that hold this probability.
        seed: seed of sampling.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these.
        parallel: none, where the target fits one device; layers spreads it over all GPUs of this process.
        chat_template_kwargs: variables of the target's chat template, as '{"enable_thinking": false}'.
        compare: decode the answer again by plain decoding, for the speed-up; by default unless decoding is plain
            already, or in a chat.
        chat: read further messages from stdin, one per line, until an empty line or the end; if the prompt is -, the
            first message too.
        show: "tree" draws every round: its tree, the accepted path and the bonus token.
        json: print one JSON object, and nothing else.
        **plan: sizes of trees; see `Plan`.
    """
    options = dict(locals())
    del options["plan"]
    sizes = Plan(lookup=lookup or 0, **plan)
    _check_options(options, sizes)
    sampling = Sampling(temperature, top_k, top_p)
    tree = tree or ("fixed" if show else "auto")
    sizes = replace(sizes, lookup=choose_lookup(lookup, bool(draft), tree))
    loaded = load_draft(draft) if draft else None
    model = Target.load(target, dtype, device, parallel, chat_template_kwargs=chat_template_kwargs)
    config = {name: value for name, value in options.items() if name not in ("compare", "chat", "show", "json")}
    config |= {**asdict(sizes), "dtype": model.dtype_name, "device": str(model.device)}
    decoder: Decoder = Autoregressive(model)
    if loaded or sizes.lookup:
        decoder = Speculative.from_draft(model, loaded, sizes, tree)
    if compare is None:
        compare = isinstance(decoder, Speculative) and not chat

    messages: list[dict[str, str]] = []
    for turn, message in enumerate(_messages(prompt, chat)):
        _check_prompt(message)
        messages.append({"role": "user", "content": message})
        question = Prompt(model.chat.prompt(messages), max_new_tokens, sampling, seed + turn)
        if compare:  # the first forward takes longer, and would count against one of the two
            question._replace(limit=1).answer(Autoregressive(model))
        answer = question.answer(decoder) if json else _print_answer(question, decoder, show)
        plain = question.answer_plainly(model, answer) if compare else None
        if json:
            print(dumps(config | {"prompt": message} | _facts(decoder, answer, plain), ensure_ascii=False))
        else:
            print(f"\n{_speed(answer)}{_comparison(answer, plain, model.dtype_name) if plain else ''}")
            if isinstance(decoder, Speculative) and (why := decoder.why_plain):
                logger.info("%s. --tree fixed drafts nevertheless", why)
        messages.append({"role": "assistant", "content": model.chat.text(answer.tokens)})


class Prompt(NamedTuple):
    """A prompt's tokens, and how to answer it: most tokens, how they are chosen, and with which seed."""

    tokens: list[int]
    limit: int
    sampling: Sampling
    seed: int

    def answer(self, decoder: Decoder, watch: Callable[[Progress], None] | None = None) -> Decoded:
        """Decode the answer; `watch` is as in `Decoder.decode`."""
        generator = torch.Generator().manual_seed(self.seed)
        return decoder.decode([self.tokens], self.limit, sampling=self.sampling, generator=generator, watch=watch)[0]

    def answer_plainly(self, target: Target, answer: Decoded) -> Decoded:
        """Decode as many tokens as `answer` has, without a draft but with the same draws."""
        return self._replace(limit=len(answer.tokens)).answer(Autoregressive(target))


def _check_options(options: dict[str, Any], plan: Plan) -> None:
    """Raise ValueError where options contradict each other."""
    if options["json"] and (options["chat"] or options["show"]):
        raise ValueError("json prints one object and nothing else: leave out chat and show")
    given, defaults = options | asdict(plan), {"show": None, "tree": None} | asdict(Plan(lookup=plan.lookup))
    for name, default in defaults.items():
        if given[name] != default and not options["draft"]:
            raise ValueError(f"{name} is {given[name]}, but without --draft there is no tree")
    _check_prompt(options["prompt"])


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise ValueError("the prompt is empty: say something, or - to read it from stdin")
    try:
        prompt.encode()  # some locales turn bytes that are not text into half surrogates
    except UnicodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error}") from None


def _messages(prompt: str, chat: bool) -> Iterator[str]:
    """The prompt, or what stdin has; in a chat the lines of stdin, to an empty one or the end."""
    if prompt != "-":
        yield prompt
    elif not chat:
        yield sys.stdin.read().strip()
    while chat:
        try:
            line = input("> ").strip()
        except EOFError:
            print()  # where the terminal's own line ended
            return
        if not sys.stdin.isatty():
            print(line)  # as a terminal shows what is typed
        if not line:
            return
        yield line


def _print_answer(question: Prompt, decoder: Decoder, show: str | None) -> Decoded:
    """Print the answer while its tokens are accepted; or draw each round, and then print the answer."""
    chat, number = decoder.target.chat, count(1)
    pieces = Pieces(chat.text)

    def print_tokens(step: Progress) -> None:
        print(printable(pieces.add(step.tokens[0])), end="", flush=True)

    def draw_round(step: Progress) -> None:
        if step.tree is not None:
            guesses = guesses_of(step, chat.stops)
            drafted, accepted = len(guesses.tokens) - 1, len(guesses.path) - 1
            print(f"round {next(number)}: {drafted} drafted, {accepted} accepted")
            print(draw(guesses, lambda token: str(decoder.target.tokenizer.decode([token]))), end="\n\n")

    answer = question.answer(decoder, draw_round if show else print_tokens)
    print(printable(chat.text(answer.tokens) if show else pieces.rest()))
    return answer


def guesses_of(step: Progress, stops: frozenset[int]) -> Guesses[int]:
    """The tree of a round's first text, with its accepted path and bonus token."""
    tree, verdict = step.tree, step.verdict
    assert tree is not None and verdict is not None, "a step without a draft has no tree"
    accepted = int(verdict.accepted[0])
    emitted = until_stop(verdict.tokens[0, : accepted + 1].tolist(), stops)
    path = verdict.path[0, : min(accepted, len(emitted)) + 1].tolist()
    bonus = emitted[accepted] if len(emitted) > accepted else None
    return Guesses(tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.scores[0].tolist(), path, bonus)


def _rate(answer: Decoded) -> float:
    return len(answer.tokens) / answer.seconds["total"]


def _tau(answer: Decoded) -> float | None:
    return sum(answer.accepted) / len(answer.accepted) + 1 if answer.accepted else None


def _speed(answer: Decoded) -> str:
    tau = "" if (mean := _tau(answer)) is None else f", τ {mean:.2f}"
    prepared = sum(answer.seconds.get(part, 0) for part in ("measure", "capture"))
    first = f" (after {prepared:.1f} s of preparation)" if prepared else ""
    return f"{len(answer.tokens)} tokens, {_rate(answer):.1f} tokens/s{first}{tau}"


def _comparison(answer: Decoded, plain: Decoded, dtype: str) -> str:
    """The speed-up, and whether the tokens are those of plain decoding."""
    speed = f", {_rate(answer) / _rate(plain):.2f} × plain decoding ({_rate(plain):.1f} tokens/s)"
    if answer.tokens == plain.tokens:
        return f"{speed}, same tokens"
    pairs = zip_longest(answer.tokens, plain.tokens)
    first = next(number for number, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs)
    why = "where two all but tied in " + dtype + ", which is very rare: please report it" * (dtype == "float32")
    return f"{speed}, different tokens from number {first}, {why}"


def _facts(decoder: Decoder, answer: Decoded, plain: Decoded | None) -> dict[str, Any]:
    """What --json prints besides the options; resolved sizes of trees are None in plain decoding."""
    trees: dict[str, Any] = dict.fromkeys(("tree", "depth", "nodes", "tree_width"))
    if isinstance(decoder, Speculative):
        trees = {"tree": decoder.tree, **asdict(decoder.plan)}
    return trees | {
        "text": decoder.target.chat.text(answer.tokens),
        "tokens": answer.tokens,
        "accepted": answer.accepted,
        "tau": _tau(answer),
        "seconds": answer.seconds,
        "tokens_per_second": _rate(answer),
        "speed_up": plain and _rate(answer) / _rate(plain),
        "equal": plain and answer.tokens == plain.tokens,
    }
