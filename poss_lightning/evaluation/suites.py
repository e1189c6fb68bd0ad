"""Suites of prompts: JSON lines with question_id, category and turns, the form of MT-Bench and Spec-Bench."""

import json
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
    files = [path for source in sources or own_suites() for path in _files(source)]
    return [question for path in files for question in _read(path)[:limit]]


def _files(source: str) -> list[Path]:
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir() and (inside := sorted(path.glob("*.jsonl"))):
        return inside
    if source in own_suites():
        return [OWN / f"{source}.jsonl"]
    raise FileNotFoundError(f"suite {source!r} is no .jsonl file, no folder of them, and none of the project's own: {', '.join(own_suites())}")


def _read(path: Path) -> list[Question]:
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        turns = record.get("turns") if isinstance(record, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f"{path}:{number} has no `turns`, a list of one or more texts")
        questions.append(Question(path.stem, record.get("question_id", number), str(record.get("category", "")), turns))
    if not questions:
        raise ValueError(f"{path} has no questions")
    return questions
