"""Rounds as other engines report them, as records: `poss compare FILE` shows their acceptance.

Two forms are known: vLLM's responses (`--per-request-spec-decode-metrics`) and AIPerf's profile_export.jsonl
(`--export-level records`).
"""

import random
import reprlib
from pathlib import Path
from typing import Any

AIPERF, VLLM = ("spec_decode_acceptance",), ("metrics", "speculative_decoding")  # the path to an answer's rounds
MARKS = {"spec_decode_acceptance", "metrics", "metadata", "choices", "meta_info"}  # an engine's object has one of these
HOW = (
    "give responses of vLLM's server started with --per-request-spec-decode-metrics detailed, or AIPerf's "
    "profile_export.jsonl of --export-level records"
)

MOST = 1024  # accepted tokens of a round


def engine_records(objects: list[tuple[str, dict[str, Any]]], file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The place and the fields of a record for each answer of an engine's file; [] where the file is not an engine's.

    Answers without rounds, such as failed requests, are skipped. A histogram does not give the order of an answer's
    rounds, so they are shuffled; token ids are unknown, and 0.

    Args:
        objects: those of the file, each with its place.
        file: names the method, unless an answer does.

    Raises:
        ValueError: no answer has rounds, or one has something else in their place; the message says what writes them.
    """
    if not any(MARKS & values.keys() for _, values in objects):
        return []
    found = []
    for number, (place, values) in enumerate(objects, 1):
        rounds: Any = values
        for key in AIPERF if AIPERF[0] in values else VLLM:
            rounds = rounds.get(key) if isinstance(rounds, dict) else None
        if rounds:
            metadata = values.get("metadata")
            known = metadata if isinstance(metadata, dict) else {}
            found.append((place, _fields(known, _accepted(place, rounds), number, file.stem)))
    if not found:
        raise ValueError(f"{file}: no answer says what each round accepted: {HOW}")
    return found


def _fields(metadata: dict[str, Any], accepted: list[int], number: int, name: str) -> dict[str, Any]:
    total = 1 + sum(accepted) + len(accepted)
    return {
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


def _accepted(place: str, found: Any) -> list[int]:
    """Accepted tokens per round."""
    if not isinstance(found, dict):
        raise ValueError(f"{place}: {reprlib.repr(found)} says nothing of rounds: {HOW}")
    counts, rounds = found.get("acceptance_histogram"), found.get("per_step_accepted")
    try:
        if not rounds:
            pairs = counts.items() if isinstance(counts, dict) else enumerate(counts or ())
            times = {int(accepted): int(count) for accepted, count in pairs}
            if min(times.values()) < 0:
                raise ValueError("a negative number of rounds")
            rounds = [accepted for accepted, count in times.items() for _ in range(count)]
            random.Random(0).shuffle(rounds)
        rounds = [int(accepted) for accepted in rounds]
        if not 0 <= min(rounds) <= max(rounds) <= MOST:
            raise ValueError("not a number of accepted tokens")
    except (TypeError, ValueError):
        name, value = ("acceptance_histogram", counts) if counts else ("per_step_accepted", rounds)
        raise ValueError(
            f"{place}: {name} is {reprlib.repr(value)}; acceptance_histogram must list how many rounds accepted "
            "0, 1, … tokens, or be an object of these by numbers of accepted tokens; per_step_accepted lists these "
            f"numbers, {MOST} at most"
        ) from None
    return rounds
