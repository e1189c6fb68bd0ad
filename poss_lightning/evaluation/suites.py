"""Suites of prompts: JSON lines with question_id, category and turns, the form of MT-Bench and Spec-Bench."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

OWN = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Question:
    """One prompt of a suite, in one or more user turns."""

    suite: str
    id: int | str
    category: str
    turns: list[str]


def own_suites() -> list[str]:
    """Names of the project's own suites."""
    return sorted(path.stem for path in OWN.glob("*.jsonl"))


def read_suites(sources: list[str] | None = None, limit: int | None = None) -> list[Question]:
    """Questions of several suites, in order.

    Args:
        sources: files (`.jsonl`), folders of such, or names of the project's own suites; None for all of these.
        limit: the first so many questions of each suite.

    Raises:
        FileNotFoundError: a source is none of them.
        ValueError: a malformed line; the message names file, line and field.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    files = [path for source in sources or own_suites() for path in _files(source)]
    questions = [question for path in files for question in _read(path)[:limit]]
    for name, times in Counter((question.suite, question.id) for question in questions).items():
        if times > 1:
            raise ValueError(f"suite {name[0]} has {times} questions with question_id {name[1]!r}; records go by it")
    return questions


def _files(source: str) -> list[Path]:
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir() and (inside := sorted(path.glob("*.jsonl"))):
        return inside
    if source in own_suites():
        return [OWN / f"{source}.jsonl"]
    own = ", ".join(own_suites())
    raise FileNotFoundError(
        f"suite {source!r} is no .jsonl file, no folder of them, and none of the project's own: {own}"
    )


def _read(path: Path) -> list[Question]:
    questions = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            questions.append(_question(path, number, line))
    if not questions:
        raise ValueError(f"{path} has no questions")
    return questions


def _question(path: Path, number: int, line: bytes) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:  # bytes that are not UTF-8 too
        raise ValueError(f"{path}:{number} is not JSON: {error}") from error
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{path}:{number} has no `turns`, a list of one or more texts")
    name = record.get("question_id", number)
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise ValueError(f"{path}:{number}: question_id is {name!r}; it must be a number or a name")
    return Question(path.stem, name, str(record.get("category", "")), turns)
