"""Prompts of the kinds that people write, from word lists (prompts.yaml) and the documentation that Python brings.

python experiments/data/prompts.py people.jsonl 2000 [seed] [kind ...]
poss answer people.jsonl.gz --suites "[people.jsonl]"

Tasks, sums in words, short questions, functions to finish and texts to sum up (or the kinds named, chats among them),
in turn, as long as there are new ones, 2,000 less what shows this machine. Functions and texts are those of the Python
that runs this.
"""

import importlib
import inspect
import json
import random
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import yaml

LISTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES = {"a": (20, 90), "b": (11, 30), "c": (2, 9), "d": (100, 400), "e": (400, 900), "f": (3, 10)}  # in sums
SKIPPED = ("_", "antigravity", "this", "idlelib", "tkinter", "turtle", "lib2to3", "test", "ensurepip", "distutils")
TRIES = 50  # of a kind for a prompt that is new
MACHINE = re.compile(r" at 0x|environ\(")  # addresses and environments, in signatures: nobody else's prompt; left out


def tasks(draw: random.Random) -> Iterator[str]:
    while True:
        asked = draw.choice(LISTS["tasks"])
        yield asked.format(*draw.sample(LISTS["subjects"], asked.count("{}")))


def chats(draw: random.Random) -> Iterator[str]:
    while True:
        yield draw.choice(LISTS["chats"]).format(**{kind: draw.choice(words) for kind, words in LISTS["kinds"].items()})


def sums(draw: random.Random) -> Iterator[str]:
    while True:
        n, m = draw.sample(LISTS["names"], 2)
        numbers = {name: draw.randint(*size) for name, size in SIZES.items()}
        numbers["p"] = draw.choice((10, 20, 25, 40, 50))
        yield draw.choice(LISTS["sums"]).format(n=n, m=m, t=draw.choice(LISTS["things"]), **numbers)


def questions(draw: random.Random) -> Iterator[str]:
    while True:
        asked, things = draw.choice(list(LISTS["questions"].items()))
        question = asked.format(draw.choice(things))
        yield draw.choice((question, question + "?", question[0].upper() + question[1:] + "?"))


def functions(draw: random.Random) -> Iterator[str]:
    """Heads of documented functions of the standard library."""
    heads = []
    for name in sorted(sys.stdlib_module_names):
        if name.startswith(SKIPPED):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                module = importlib.import_module(name)
        except ImportError:  # of another system
            continue
        for own in filter(inspect.isfunction, vars(module).values()):
            known = own.__module__ == name and not own.__name__.startswith("_")
            if known and 40 < len(own.__doc__ or "") < 900:
                said = textwrap.indent(f'"""{inspect.cleandoc(own.__doc__)}\n"""', "    ")
                heads.append(f"def {own.__name__}{inspect.signature(own)}:\n{said}")
    draw.shuffle(heads)
    return (draw.choice(LISTS["finish"]).format(head) for head in heads)


def texts(draw: random.Random) -> Iterator[str]:
    """Pieces of Python's reference, of 800 to 3,200 characters and what is left of a paragraph."""
    pieces = []
    for name in sorted(topics):
        piece, size = "", draw.randint(800, 3200)
        for paragraph in topics[name].split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) >= size:
                pieces.append(piece.strip())
                piece, size = "", draw.randint(800, 3200)
    draw.shuffle(pieces)
    return (draw.choice(LISTS["read"]).format(piece) for piece in pieces)


KINDS = {kind.__name__: kind for kind in (tasks, sums, questions, functions, texts, chats)}


def main(out: str, count: str = "2000", seed: str = "0", *named: str) -> None:
    if unknown := set(named) - KINDS.keys():
        sys.exit(f"kinds are {', '.join(KINDS)}; {', '.join(sorted(unknown))} is none of them")
    draw = random.Random(int(seed))
    kinds = [KINDS[name](draw) for name in named or ("tasks", "sums", "questions", "functions", "texts")]
    prompts: dict[str, None] = {}  # each once
    while kinds and len(prompts) < int(count):
        for kind in list(kinds):
            fresh = next((prompt for prompt in islice(kind, TRIES) if prompt not in prompts), None)
            if fresh is None:
                kinds.remove(kind)
            else:
                prompts[fresh] = None
    told = [prompt for prompt in islice(prompts, int(count)) if not MACHINE.search(prompt)]
    alike = sorted(told, key=len)  # of like length side by side, where they are answered
    lines = [json.dumps({"id": number, "prompt": prompt}) for number, prompt in enumerate(alike)]
    Path(out).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
