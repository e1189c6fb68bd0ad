"""Tokens a second of real answers: by suite, in batches, with smaller vocabularies. Methods take turns at a prompt."""

from collections import defaultdict
from statistics import mean, median
from typing import NamedTuple

from tqdm import tqdm

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.corpus.tokens import count_tokens, most_frequent
from poss_lightning.decoding.autoregressive import Autoregressive, Generate
from poss_lightning.decoding.decoder import Decoder, Progress
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.trees import Tree, ancestor_mask
from poss_lightning.demo import CORPUS
from poss_lightning.draft.specialists import Specialists
from poss_lightning.draft.vocabulary import render_answers, restrict_vocabulary
from poss_lightning.evaluation.suites import Question
from poss_lightning.target.model import Target

AUTO, FIXED = TREES = "auto", "fixed"
BASELINES = GENERATE, PLAIN, LOOKUP = "generate", "autoregressive", "prompt_lookup"
SIZES = (4096, 8192, 16384, 32768, None)  # of vocabularies; None is all


class Run(NamedTuple):
    """What one method did with one batch of prompts."""

    tokens: int
    seconds: float
    accepted: list[int]  # of every round of every prompt
    trees: list[tuple[int, float]]  # of every round: the depth of the deepest tree, and nodes of a row on average

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / self.seconds


def run(decoder: Decoder, prompts: list[list[int]], limit: int) -> Run:
    """Decode, and look at the trees while the clock stands."""
    trees: list[tuple[int, float]] = []

    def look(step: Progress) -> None:
        if step.tree:
            trees.append(_size(step.tree))

    decoded = decoder.decode(prompts, limit, watch=look)
    accepted = [count for one in decoded for count in one.accepted]
    return Run(sum(len(one.tokens) for one in decoded), decoded[0].seconds["total"], accepted, trees)


def _size(tree: Tree) -> tuple[int, float]:
    nodes = tree.tokens.shape[1]
    depths = ancestor_mask(tree.parents, nodes - 1).sum(-1) - 1  # (B, N)
    return int(depths.max()), float(nodes)


def first_turns(target: Target, questions: list[Question]) -> list[list[int]]:
    """What the target reads before it answers each question."""
    return [target.chat.prompt(question.first, question.template) for question in questions]


def in_turn(methods: dict[str, Decoder], batches: list[list[list[int]]], limit: int) -> list[dict[str, Run]]:
    """Every batch of prompts by every method, in an order that rotates, after a warm-up on the first."""
    for decoder in methods.values():
        run(decoder, batches[0], min(limit, 16))
    names, runs = list(methods), []
    for number, prompts in enumerate(tqdm(batches, desc=", ".join(names), unit="batch", leave=False)):
        first = number % len(names)
        runs.append({name: run(methods[name], prompts, limit) for name in names[first:] + names[:first]})
    return runs


def figures(runs: list[Run]) -> dict[str, float]:
    """Of one method: rate, and where it drafts, τ (over rounds) and the mean tree."""
    found = {"tokens_per_second": sum(one.tokens for one in runs) / sum(one.seconds for one in runs)}
    if accepted := [count for one in runs for count in one.accepted]:
        depths, nodes = zip(*(tree for one in runs for tree in one.trees), strict=True)
        found |= {"tau": 1 + mean(accepted), "tree_depth": mean(depths), "tree_nodes": mean(nodes)}
    return found


def speed_ratio(runs: list[dict[str, Run]], method: str, other: str) -> float:
    """Median over prompts of how many times faster `method` was."""
    return median(pair[method].rate / pair[other].rate for pair in runs)


def suites(
    target: Target, draft: Specialists, questions: list[Question], max_new_tokens: int, nodes: int = 60
) -> dict[str, dict]:
    """Per suite, and over all: every method's figures, and how many times faster drafting is than each baseline."""
    methods = {
        AUTO: Speculative(target, draft, nodes=nodes, tree="auto"),
        FIXED: Speculative(target, draft, nodes=nodes),
        PLAIN: Autoregressive(target),
        GENERATE: Generate(target),
        LOOKUP: Generate(target, lookup=10),
    }
    prompts = first_turns(target, questions)
    runs = in_turn(methods, [[prompt] for prompt in prompts], max_new_tokens)
    grouped = defaultdict(list)
    for question, one in zip(questions, runs, strict=True):
        grouped[question.suite].append(one)
        grouped["all"].append(one)
    return {
        suite: {name: figures([one[name] for one in own]) for name in methods}
        | {f"{tree}_speedup_vs_{other}": speed_ratio(own, tree, other) for tree in (AUTO, FIXED) for other in BASELINES}
        for suite, own in grouped.items()
    }


def batch(
    target: Target, draft: Specialists, questions: list[Question], size: int, max_new_tokens: int, repeats: int = 3
) -> dict[str, object]:
    """`size` prompts side by side, drafted with every kind of tree, against batched plain decoding."""
    methods = {
        AUTO: Speculative(target, draft, tree="auto"),
        FIXED: Speculative(target, draft),
        PLAIN: Autoregressive(target),
    }
    prompts = first_turns(target, one_of_each(questions, size))
    runs = in_turn(methods, [prompts] * repeats, max_new_tokens)
    found = {name: figures([one[name] for one in runs]) for name in methods}
    return found | {f"{tree}_speedup_vs_{PLAIN}": speed_ratio(runs, tree, PLAIN) for tree in TREES}


def vocabularies(
    target: Target,
    draft: Specialists,
    questions: list[Question],
    max_new_tokens: int,
    sizes: tuple[int | None, ...] = SIZES,
    corpus: str = str(CORPUS),
) -> dict[str, dict[str, float]]:
    """τ and tokens a second of fixed trees, by how many of the corpus' most frequent tokens the draft may propose."""
    counts = count_tokens(render_answers(target.chat, read_conversations(corpus)), target.spec.vocab_size)
    chosen = {size: None if size is None else most_frequent(counts, size, target.chat.stops) for size in sizes}
    methods: dict[str, Decoder] = {
        str(size or "all"): Speculative(target, restrict_vocabulary(draft, tokens)) for size, tokens in chosen.items()
    }
    runs = in_turn(methods, [[prompt] for prompt in first_turns(target, questions)], max_new_tokens)
    return {name: figures([one[name] for one in runs]) for name in methods}


def one_of_each(questions: list[Question], count: int) -> list[Question]:
    """The first question of every suite, then the second of each, and so on: `count`, again from the first if short."""
    suites_of = defaultdict(list)
    for question in questions:
        suites_of[question.suite].append(question)
    longest = max(map(len, suites_of.values()))
    mixed = [own[i] for i in range(longest) for own in suites_of.values() if i < len(own)]
    return [mixed[i % len(mixed)] for i in range(count)]
