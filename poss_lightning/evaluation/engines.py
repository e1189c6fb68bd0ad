"""What engines say of their rounds, answer by answer, as lines of records: `poss compare FILE` shows their acceptance.

Read are vLLM's responses (`--per-request-spec-decode-metrics`) and AIPerf's profile_export.jsonl (`--export-level
records`), one JSON object a line, or all in an array.
"""

import json
import random
import re
import reprlib
from pathlib import Path
from typing import Any

AIPERF, VLLM = ("spec_decode_acceptance",), ("metrics", "speculative_decoding")
MARKS = {"spec_decode_acceptance", "metrics", "metadata", "choices", "meta_info"}  # an engine's line has one of these
PROMETHEUS = re.compile(rb"# (HELP|TYPE) |(vllm|sglang):\w+")
HOW = (
    "give responses of vLLM's server started with --per-request-spec-decode-metrics detailed, or AIPerf's "
    "profile_export.jsonl of --export-level records"
)
MOST = 1024  # tokens that a round may accept


def engine_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The place and the fields of a record for each answer of an engine's file; [] where the file is not an engine's.

    Lines without rounds, as of failed requests, are passed over. A histogram does not tell the order of an answer's
    rounds, so they are shuffled; token ids that are not told are 0.

    Raises:
        ValueError: no answer has rounds, or one has something else in their place; the message says what writes them.
    """
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    if PROMETHEUS.match(content):
        raise ValueError(f"{file} is Prometheus text, which adds up all requests: {HOW}")
    try:
        first = content if content.startswith(b"[") else content.partition(b"\n")[0]
        values = json.loads(first)
        if not isinstance(values, list):
            values = [json.loads(line) for line in content.split(b"\n") if line.strip()] if MARKS & set(values) else []
    except (ValueError, TypeError):
        return []  # it is named when it is read as records
    objects = [value for value in values if isinstance(value, dict)]
    if not any(MARKS & value.keys() for value in objects):
        return []
    lines = [_fields(f"{file}, answer {number}", value, number, file.stem) for number, value in enumerate(objects, 1)]
    if not any(lines):
        raise ValueError(f"{file}: no answer says what each round accepted: {HOW}")
    return [line for line in lines if line is not None]


def _fields(place: str, values: dict[str, Any], number: int, name: str) -> tuple[str, dict[str, Any]] | None:
    """Of one answer; None where it has no rounds."""
    found: Any = values
    for key in AIPERF if AIPERF[0] in values else VLLM:
        found = found.get(key) if isinstance(found, dict) else None
    if not found:
        return None
    accepted = _accepted(place, found)
    metadata: dict[str, Any] = given if isinstance(given := values.get("metadata"), dict) else {}
    total = 1 + sum(accepted) + len(accepted)
    return place, {
        "suite": str(metadata.get("suite") or "requests"),
        "id": metadata.get("id") or number,
        "turn": metadata.get("turn") or 0,
        "method": str(metadata.get("method") or f"{name} (engine)"),
        "repeat": metadata.get("repeat") or 0,
        "seed": 0,
        "prompt_tokens": 0,
        "new_tokens": total,
        "accepted": accepted,
        "seconds": {},
        "tokens": [0] * total,
        "text": "",
    }


def _accepted(place: str, found: dict[str, Any]) -> list[int]:
    """Accepted tokens, round by round."""
    counts, rounds = found.get("acceptance_histogram"), found.get("per_step_accepted")
    try:
        if not rounds:
            pairs = counts.items() if isinstance(counts, dict) else enumerate(counts or ())
            times = {int(accepted): int(count) for accepted, count in pairs}
            rounds = [each for each, count in times.items() for _ in range(count)] if min(times.values()) >= 0 else [-1]
            random.Random(0).shuffle(rounds)
        rounds = [int(accepted) for accepted in rounds]
    except (TypeError, ValueError):
        rounds = [-1]
    if not all(0 <= accepted <= MOST for accepted in rounds):
        raise ValueError(
            f"{place}: acceptance_histogram is {reprlib.repr(counts)}; it must be a list of how many rounds accepted "
            f"0, 1, … tokens, or an object of such by numbers of accepted tokens, up to {MOST}"
        )
    return rounds
