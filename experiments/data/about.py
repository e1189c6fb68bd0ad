"""Prompts about long texts: answers of a corpus, one or several joined, become the text that a question is about.

python experiments/data/about.py articles.jsonl.gz about.jsonl
python experiments/data/about.py sampled.jsonl.gz joined.jsonl 4
poss answer about.jsonl.gz --suites "[about.jsonl]"
"""

import json
import sys
from pathlib import Path

from poss_lightning.corpus.readers import read_conversations

ASKED = (
    "Summarize this text:\n\n{}",
    "{}\n\nWrite a short summary of the text above.",
    "What are the main points of the following?\n\n{}",
    "Read this text.\n\n{}\n\nWho and what is it about?",
    "Rewrite this text in simple words:\n\n{}",
    "Continue this text:\n\n{}",
)


def main(corpus: str, out: str, joined: str = "1") -> None:
    answers, size = [chat.messages[-1]["content"] for chat in read_conversations(corpus)], int(joined)
    texts = ["\n\n".join(answers[start : start + size]) for start in range(0, len(answers), size)]
    prompts = [ASKED[number % len(ASKED)].format(text) for number, text in enumerate(texts)]
    lines = [json.dumps({"id": number, "prompt": prompt}) for number, prompt in enumerate(prompts)]
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
