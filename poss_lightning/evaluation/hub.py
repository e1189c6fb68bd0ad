"""Questions from data sets on the hub, streamed: those that `suites.yaml` names, and any other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from poss_lightning.corpus.formats import without_nulls
from poss_lightning.terminal import announced


@dataclass(frozen=True)
class HubSuite:
    """A split of a data set, and how its rows become questions."""

    repo: str  # a hub id, or a folder that `datasets` can load
    revision: str | None = None  # a commit; None for the newest
    config: str | None = None  # of the data set; None for its default
    split: str | None = None  # None for `test`, else `validation`, else the only one
    file: str | None = None  # of the data set, where its files are different suites
    questions: int | None = 80  # asked where the user sets no limit; None for all
    fields: dict[str, str] = field(default_factory=dict)  # of a record, made from those of a row
    without: str = ""  # a field of rows that are no questions if it has a value


KNOWN = {
    name: HubSuite(**suite)
    for name, suite in yaml.safe_load(Path(__file__).with_name("suites.yaml").read_text()).items()
}


def stream(suite: HubSuite) -> tuple[str, Iterator[tuple[int, dict]]]:
    """Where the rows of a suite come from, `repo@commit config split`; and the rows as records, numbered from 1.

    A row is downloaded when it is iterated to.
    """
    import datasets  # takes a second, and files do without it

    with announced(f"asking for the data set {suite.repo}"):
        builder = datasets.load_dataset_builder(
            suite.repo, suite.config, revision=suite.revision, data_files=suite.file
        )
        splits = builder.as_streaming_dataset()
    assert isinstance(splits, dict)  # as no split was asked for
    usual = ("test", "validation", *(splits if len(splits) == 1 else ()))
    split = suite.split or next((name for name in usual if name in splits), "test")
    if split not in splits:
        raise ValueError(f"{suite.repo} has no split {split!r}: choose ?split= of {', '.join(splits)}")
    commit = f"@{builder.hash}" if builder.repo_id else ""  # a folder's hash is of its path
    return f"{suite.repo}{commit} {builder.config.name} {split}", _records(suite, splits[split])


def _records(suite: HubSuite, rows: Iterable[dict]) -> Iterator[tuple[int, dict]]:
    for number, row in enumerate(rows, 1):
        if not row.get(suite.without):
            question = str(row.get("question", ""))
            sentence = question[:1].upper() + question[1:].removesuffix("?") + "?"
            try:
                made = {name: form.format(**row, sentence=sentence) for name, form in suite.fields.items()}
            except KeyError as error:
                raise ValueError(f"row {number} of {suite.repo} has no {error}; it has {', '.join(row)}") from None
            yield number, without_nulls(row) | made
