"""Rounds as other engines report them, as records: `poss compare FILE` shows their acceptance.

Three forms are known: vLLM's responses (`--per-request-spec-decode-metrics`), SGLang's, and AIPerf's
profile_export.jsonl (`--export-level records`).
"""

import reprlib
from pathlib import Path
from typing import Any

MARKS = {"metadata", "choices", "metrics", "meta_info", "spec_decode_acceptance"}  # an engine's object has one of these
HISTOGRAMS = "acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram"  # the last two SGLang's
HOW = (
    "give responses of vLLM's server started with --per-request-spec-decode-metrics detailed, of SGLang's /generate "
    "with spec_correct_drafts_histogram, or AIPerf's profile_export.jsonl of --export-level records"
)


def engine_records(objects: list[tuple[str, dict[str, Any]]], file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The place and the fields of a record for each answer of an engine's file; [] where the file is not an engine's.

    Answers without rounds, such as failed requests, are skipped. A histogram does not give the order of an answer's
    rounds, and no engine says how long the prompt was: `prompt_tokens` is 0, and tables by position or length leave
    these answers out. Token ids are unknown, and 0.

    Args:
        objects: those of the file, each with its place.
        file: names the method.
    """
    if not any(MARKS & values.keys() for _, values in objects):
        return []
    found = []
    for number, (place, values) in enumerate(objects, 1):
        if accepted := _accepted(place, values):
            request = values.get("metadata") or {}  # AIPerf's, as lines may stand in order of completion
            total = 1 + sum(accepted) + len(accepted)
            fields = {
                "suite": "requests",
                "id": request.get("session_num", number),
                "turn": request.get("turn_index") or 0,
                "method": f"{file.stem} (engine)",
                "prompt_tokens": 0,
                "new_tokens": total,
                "accepted": accepted,
                "tokens": [0] * total,
            }
            found.append((place, fields))
    if not found:
        raise ValueError(f"{file}: no answer says what each round accepted: {HOW}")
    return found


def _accepted(place: str, values: dict[str, Any]) -> list[int]:
    """Accepted tokens per round of an answer; [] where nothing was drafted."""
    try:
        vllm = (values.get("metrics") or {}).get("speculative_decoding")
        known = vllm or values.get("meta_info") or values.get("spec_decode_acceptance") or {}
        rounds = known.get("per_step_accepted")
        if not rounds:
            counts = next((known[name] for name in HISTOGRAMS if known.get(name)), [])
            times = counts.items() if isinstance(counts, dict) else enumerate(counts)
            rounds = [accepted for accepted, count in times for _ in range(int(count))]
        return [int(accepted) for accepted in rounds]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{place}: {reprlib.repr(values)} does not say what each round accepted: {HOW}") from None
