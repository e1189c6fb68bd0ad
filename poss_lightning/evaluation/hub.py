"""Questions from data sets on the hub, streamed: the papers' six suites, SPEED-Bench, speculators' nine, any other."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from poss_lightning.corpus.formats import without_nulls
from poss_lightning.terminal import announced, without_retries


@dataclass(frozen=True)
class HubSuite:
    """A split of a data set, and how its rows become questions."""

    repo: str  # a hub id, or a folder that `datasets` can load
    revision: str | None = None  # a commit; None for the newest
    config: str | None = None  # of the data set; None for its default
    split: str | None = None  # None for `test`, else `validation`, else the only one
    questions: int | None = 80  # asked where the user sets no limit; None for all
    make_record: Callable[[dict], dict | None] = lambda row: row  # in a form of `forms.py`; None for no question
    file: str | None = None  # of the data set, where its files are different suites


def _record(question: str, category: str = "", question_id: str | None = None) -> dict:
    return {"question_id": question_id, "category": category, "turns": [question]}


def _sentence(question: str) -> str:
    """A question of Natural Questions with the capital and the question mark that it lacks."""
    return question[:1].upper() + question[1:].removesuffix("?") + "?"


# The suites of EAGLE and PosS, pinned, worded as in their published question.jsonl files of 80 questions each.
SIX = {
    "mt_bench": HubSuite(
        "HuggingFaceH4/mt_bench_prompts",
        "e3a795c5e9a82ee40611c416b8a7786c73198991",
        split="train",
        make_record=lambda row: {"question_id": row["prompt_id"], "category": row["category"], "turns": row["prompt"]},
    ),
    "humaneval": HubSuite(
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        split="test",
        make_record=lambda row: _record("Complete the code I provided." + row["prompt"], "code", row["task_id"]),
    ),
    "gsm8k": HubSuite(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        config="main",
        split="test",
        make_record=lambda row: _record(row["question"], "math"),
    ),
    "alpaca": HubSuite(
        "tatsu-lab/alpaca",
        "dce01c9b08f87459cf36a430d809084718273017",
        split="train",
        # the published file omits inputs, and many of its instructions ask about one
        make_record=lambda row: None if row["input"] else _record(row["instruction"]),
    ),
    "qa": HubSuite(
        "google-research-datasets/nq_open",
        "5dd9790a83002ad084ddeb7c420dc716852c6f28",
        split="validation",
        make_record=lambda row: _record(_sentence(row["question"]), "qa"),
    ),
    "sum": HubSuite(
        "abisee/cnn_dailymail",
        "96df5e686bee6baa90b8bee7c28b81fa3fa6223d",
        config="3.0.0",
        split="test",
        make_record=lambda row: _record("Summarize: " + row["article"], "summarization", row["id"]),
    ),
}

# SPEED-Bench (arXiv 2604.09557), pinned: 80 questions on each of 11 subjects; and 1,536 of each input length, a third
# easy to guess, a third hard, a third mixed. The hub's copy omits some texts; see `forms.WITHHELD`.
SPEED_BENCH = {
    name: HubSuite("nvidia/SPEED-Bench", "487aa718444e816458d1a0a52bfce7a454285cf4", config, "test", questions)
    for name, config, questions in (
        ("speed_bench", "qualitative", 880),
        *((f"speed_bench_{length}", f"throughput_{length}", 1536) for length in ("1k", "2k", "8k", "16k", "32k")),
    )
}
# The nine sets that vLLM's speculators reports on, pinned: all questions of each, 80 to 164, one prompt a row.
NINE = "HumanEval", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation", "writing"
SPECULATORS = {
    f"speculators_{name.lower()}": HubSuite(
        "RedHatAI/speculator_benchmarks",
        "2ae86affa2cb97a972b7fc681dd51c04fbff083e",
        file=f"{name}.jsonl",
        questions=None,
    )
    for name in NINE
}
KNOWN = SIX | SPEED_BENCH | SPECULATORS


def stream(source: str, suite: HubSuite) -> tuple[str, Iterator[tuple[int, dict]]]:
    """Where the rows of a suite come from, `repo@commit config split`; and the rows as records, numbered from 1.

    A row is downloaded when it is iterated to. Errors name `source`, as the user gave it.
    """
    import datasets  # takes a second, and files do without it

    with announced(f"asking for the data set {suite.repo}"), _explain_errors(source):
        builder = datasets.load_dataset_builder(
            suite.repo, suite.config, revision=suite.revision, data_files=suite.file
        )
        splits = builder.as_streaming_dataset()
    assert isinstance(splits, dict)  # as no split was asked for
    usual = ("test", "validation", *(splits if len(splits) == 1 else ()))
    split = suite.split or next((name for name in usual if name in splits), "test")
    if split not in splits:
        raise ValueError(f"suite {source!r} has no split {split!r}: choose ?split= of {', '.join(splits)}")
    commit = f"@{builder.hash}" if builder.repo_id else ""  # a folder's hash is of its path
    return f"{suite.repo}{commit} {builder.config.name} {split}", _records(source, suite, splits[split])


def _records(source: str, suite: HubSuite, rows: Iterable[dict]) -> Iterator[tuple[int, dict]]:
    with _explain_errors(source):
        for number, row in enumerate(rows, 1):
            try:
                record = suite.make_record(row)
            except KeyError as error:
                raise ValueError(f"row {number} has no {error}; it has {', '.join(row)}") from None
            if record is not None:
                yield number, without_nulls(record)


@contextmanager
def _explain_errors(source: str) -> Iterator[None]:
    """Within it, an error says in one line why a data set cannot be read."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] of the hub's client

    try:
        with without_retries():
            yield
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        fault = " ".join(str(error.__cause__ or error).split())
        hint = "; `poss list` shows suites that need no network" if isinstance(error, ConnectionError) else ""
        raise ValueError(f"suite {source!r} cannot be read: {fault}{hint}") from error
