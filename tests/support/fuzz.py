"""Random command lines: any options of any command, over any corpus, drawn by Hypothesis.

Valid sizes are small, so that a command that runs ends within seconds; everything else must be refused.
"""

import json
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from itertools import cycle
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from hypothesis import strategies as st

from poss_lightning import TreePlan, cli
from poss_lightning.draft.config import DraftOptions
from poss_lightning.evaluation.options import DecodingOptions
from poss_lightning.target_model.options import TargetOptions

SMALL = [1, 2, 3, 5]
NUMBERS = [0, -1, 10**9 + 1, 10**30, -(10**30), 0.5, "1e23", "nan", "inf", "-inf", "1e-40", "1e-320"]
ODD = [*map(str, NUMBERS), "", " ", "null", "nowhere", "a" * 300, "[", "[2,2", "{a: b"]
ODD += ["<|im_end|>", "\x1b[31m", "..", "é\udcff", "a\nb", "%s"]
PLACES = ["corpus.jsonl", "malformed.jsonl", "empty.jsonl", "suite.jsonl", "long.jsonl", "store", "draft", "target"]
PLACES += ["draft-of-another", "another", "no-template", "truncated", "flipped", "contradicting", "no-weights"]
PLACES += ["group.yaml", "tab.yaml", "records", "acceptance.jsonl", "mine"]
OUTS = ["out", "out.jsonl", "out.jsonl.gz", "out.html", "deep/er/out", "", " ", "mine", "mine/notes.txt/x"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "\x00", "\ud800", "\u2028", "<script>", "\x1b[2J", " ", "a" * 3000]


class Command(NamedTuple):
    """A command line, and what it may read."""

    arguments: list[str]
    files: dict[str, bytes]  # below {inputs}/mine
    stdin: str = ""


# --- numbers, texts, places ---


def value(hint: Any) -> st.SearchStrategy[str]:
    """A value for an option of that type, valid or not."""
    inner, kind = get_args(hint), get_origin(hint)
    odd = st.sampled_from(ODD)
    if kind is Annotated:
        return value(inner[0])
    if kind in (Union, UnionType):
        return st.one_of([value(each) for each in inner])
    if kind is Literal:
        return st.sampled_from([*map(str, inner), "tall"])
    if kind in (list, tuple):
        return st.lists(value(inner[0]), max_size=4).map(lambda items: f"[{', '.join(items)}]") | odd
    if hint is int:
        return st.sampled_from(SMALL).map(str) | odd
    if hint is float:
        return st.sampled_from([*SMALL, 0.1, 0.9]).map(str) | odd
    if hint is bool:
        return st.sampled_from(["true", "false", "yes"])
    return odd if hint is type(None) else text()


def text() -> st.SearchStrategy[str]:
    """A text, or the name of something that exists, whole or broken."""
    drawn = st.text(st.characters(exclude_characters="\x00"), max_size=12)
    return st.sampled_from(ODD) | st.sampled_from(PLACES).map("{{inputs}}/{}".format) | drawn


# --- corpora ---


def record() -> st.SearchStrategy[Any]:
    """A conversation or a question, or something similar."""
    content = st.sampled_from(SPECIAL) | st.text(max_size=20) | st.none() | st.integers()
    role = st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool", "", 3])
    dialects = ({"role": role, "content": content}, {"from": role, "value": content})
    turns = st.lists(st.one_of(map(st.fixed_dictionaries, dialects)), max_size=4)
    forms = {"messages": turns, "conversations": turns, "turns": st.lists(content, max_size=3)}
    forms |= dict.fromkeys(("prompt", "id", "question_id"), content)
    texts = st.lists(st.sampled_from(SPECIAL) | st.text(max_size=20), min_size=2, max_size=4)
    good = texts.map(lambda texts: {"messages": [*map(_message, cycle(("user", "assistant")), texts)]})
    anything = st.recursive(content | st.floats(), st.lists)
    return good | st.fixed_dictionaries({}, optional=forms) | anything


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def corpus() -> st.SearchStrategy[bytes]:
    """Lines of records, and some of bytes."""
    line = record().map(lambda each: json.dumps(each).encode()) | st.binary(max_size=20)
    return st.lists(line, min_size=1, max_size=4).map(b"\n".join)


# --- command lines ---

TINY = {"target": "{inputs}/target", "dtype": "float32", "device": "cpu"}
LIKELY = {  # by name: places with which a command can run at all, tried as often as any others
    "store": "{inputs}/store",
    "source": "{inputs}/draft",
    "records": "{inputs}/records",
    "corpus": "{inputs}/mine/corpus.jsonl",
    "folder": "{inputs}/mine",
    "out": "out",
}
SUITES, CORPORA = "[{inputs}/suite.jsonl]", "[{inputs}/mine/corpus.jsonl]"
ALWAYS = {  # without which a command may take minutes, or print pages
    "synthesize": {"conversations": "2", "batch_size": "4", "user_tokens": "4", "answer_tokens": "4"},
    "benchmark": {"limit": "1", "max_new_tokens": "4", "drafts.d": "{inputs}/draft", "suites": SUITES},
    "generate": {"max_new_tokens": "4"},
    "convert": {"output_format": "poss"},
    "extract": {"batch_tokens": "64"},
    "replay": {"drafts.d": "{inputs}/draft"},
}
SHORT = ("--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.max_steps=1", "--trainer.logger=false")
FIT = (*SHORT, "--trainer.limit_val_batches=0", "--trainer.callbacks=null", "--trainer.enable_checkpointing=false")


@st.composite
def command_lines(draw: Callable, name: str) -> Command:
    """Any command line of a command."""
    files = {"corpus.jsonl": draw(corpus())}
    if name in cli.TRAINER:
        names = ["model", "model.depth", "data", "data.limit", "trainer", "modle", "seed_everything", "ckpt_path"]
        arguments = [name, *FIT, *draw(_training())]
    else:
        names, arguments = draw(_options(name))
    if (config := draw(_config(names))) is not None:
        arguments, files["options.yaml"] = [*arguments, "--config={inputs}/mine/options.yaml"], config
    return Command(arguments, files, draw(st.text(max_size=20)))


@st.composite
def _options(draw: Callable, name: str) -> tuple[list[str], list[str]]:
    """Names of a tool's options, and a command line of it."""
    parameters = _parameters(getattr(import_module(cli.TOOLS[name][0]), name))
    needed = [each for each in parameters.values() if each.default is Parameter.empty]
    ending = ".jsonl" if name == "synthesize" else ""
    arguments = [name, *(draw(_argument(each)) + ending for each in needed)]
    given = {option: text for option, text in TINY.items() if option in parameters} | ALWAYS.get(name, {})
    optional = {each.name: each.annotation for each in parameters.values() if each not in needed}
    for option in draw(st.lists(st.sampled_from([*optional, "wrong"]), max_size=draw(st.integers(0, 3)), unique=True)):
        given[option] = draw(value(optional[option])) if option in optional else "1"
    if draw(st.booleans()):
        given |= dict.fromkeys({"prompts", "suites"} & parameters.keys(), CORPORA)
    arguments += [f"--{option}={text}" for option, text in given.items()]
    return [*parameters, "wrong"], arguments


def _parameters(owner: Callable) -> dict[str, Parameter]:
    """Options of a function or class; its keywords are those of a plan, a target or a draft."""
    found = signature(owner).parameters
    named = {name: each for name, each in found.items() if each.kind is not Parameter.VAR_KEYWORD}
    passed_on = {"plan": TreePlan, "decoding": DecodingOptions, "target": TargetOptions, "draft": DraftOptions}
    keywords = {
        name: each for own in found.keys() - named.keys() for name, each in signature(passed_on[own]).parameters.items()
    }
    return keywords | named


def _config(names: list[str]) -> st.SearchStrategy[bytes | None]:
    """A config with some of these options, or bytes; mostly None."""
    leaf = st.none() | st.booleans() | st.sampled_from([*SMALL, *ODD])
    option = st.recursive(leaf, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner))
    good = st.dictionaries(st.sampled_from(names), option, max_size=2).map(lambda options: json.dumps(options).encode())
    return st.one_of(st.none(), st.none(), st.none(), good, st.binary(max_size=9))


def _argument(parameter: Parameter) -> st.SearchStrategy[str]:
    odd = value(parameter.annotation) | st.sampled_from(OUTS if parameter.name == "out" else [""])
    likely = st.just(LIKELY[parameter.name]) if parameter.name in LIKELY else odd
    drawn = st.one_of(odd, *[likely] * 5)
    return drawn.map(lambda text: text if text[:1] != "-" else "x")


def _training() -> st.SearchStrategy[list[str]]:
    """Options of a training of one step, most of them out of range."""
    from poss_lightning.features.datamodule import FeatureDataModule
    from poss_lightning.training.module import DraftModule

    options = {}
    for part, made in (("model", DraftModule), ("data", FeatureDataModule)):
        options |= {f"--{part}.{name}": each.annotation for name, each in _parameters(made).items()}
    del options["--model.store"], options["--data.store"]
    one = st.sampled_from([*options]).flatmap(lambda name: value(options[name]).map(f"{name}={{}}".format))
    start = ["--data.store={inputs}/store", "--data.validation=0.2", "--model.allocation=[1, 1]"]
    return st.lists(one, max_size=3).map(lambda more: [*start, *more])
