"""vLLM and our engine draft the same chains over questions: rounds, drafted tokens, acceptance by position.

It needs vLLM, and so the environment of `make test-vllm`:

    .venv-vllm/bin/python -m benchmarks.vllm_rounds --suites chat code --limit 2
"""

import argparse
import tempfile
from pathlib import Path

from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.interop.convert import convert
from poss_lightning.target import embedded
from poss_lightning.target.model import Target
from tests.support.serving import Answer, draft_here, serve


def acceptance(answers: list[Answer], depth: int) -> str:
    """The share of all rounds in which each position was accepted."""
    accepted = [count for answer in answers for count in answer.accepted]
    shares = [sum(count >= position for count in accepted) / len(accepted) for position in range(1, depth + 1)]
    return " ".join(f"{share:.3f}" for share in shares)


def count_equal(some: list, others: list) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", default="embedded-poss2", help="of the embedded target")
    parser.add_argument("--suites", nargs="*", help="our own, or files; all of our own by default")
    parser.add_argument("--limit", type=int, default=4, help="questions of each suite")
    parser.add_argument("--first", type=int, help="only so many questions in all")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--depth", type=int, default=6)
    given = parser.parse_args()
    target = Target.load("embedded", "float32", "cpu")
    draft = Specialists.from_pretrained(given.draft)
    questions = read_suites(given.suites, given.limit)[: given.first]
    prompts = [target.chat.prompt(question.first, question.template) for question in questions]
    print(f"{len(prompts)} prompts, {given.new} tokens, {given.draft}, {given.depth} drafted a round, float32")
    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "served"
        convert(given.draft, str(served), output_format="vllm")
        there = serve(embedded.folder(), prompts, given.new, served, "eagle", given.depth)
    report("vLLM", there, given.depth)
    here = draft_here(target, draft, prompts, given.new, given.depth)
    report("ours", here, given.depth)
    print(f"{count_equal(there, here)} answers with the same rounds and drafted tokens", flush=True)
    plain = serve(embedded.folder(), prompts, given.new)
    print(f"{count_equal([each.tokens for each in there], [each.tokens for each in plain])} answers as without a draft")


def report(name: str, answers: list[Answer], depth: int) -> None:
    rounds = sum(len(answer.rounds) for answer in answers)
    print(f"{name}: {rounds} rounds, accepted by position {acceptance(answers, depth)}", flush=True)


if __name__ == "__main__":
    main()
