"""Rounds as other engines report them: `poss compare FILE` shows their acceptance.

Three forms are known: vLLM's responses (`--per-request-spec-decode-metrics`), SGLang's, and AIPerf's
profile_export.jsonl (`--export-level records`); JSON lines or one array, gzipped or not.
"""

import reprlib
from pathlib import Path
from typing import Any

from poss_lightning.corpus.formats import Malformed, file_records, parse_line

HISTOGRAMS = "acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram"  # the last two SGLang's
HOW = (
    "give responses of vLLM's server started with --per-request-spec-decode-metrics detailed, of SGLang's /generate "
    "with spec_correct_drafts_histogram, or AIPerf's profile_export.jsonl of --export-level records"
)


def read_engine(file: Path) -> list[dict[str, Any]]:
    """Read a row for each answer of an engine's file, which names the method.

    Answers without rounds, such as failed requests, are skipped. No engine says how long the prompt was, and histograms
    do not give the order of an answer's rounds: `prompt_tokens` is 0, and tables by length leave these answers out.

    Raises:
        ValueError: no answer says what its rounds accepted; the message names file and line, and how to get one.
    """
    rows = []
    for number, line in file_records(file):
        place = f"{file}, line {number}"
        try:
            values = parse_line(line) if isinstance(line, bytes) else line
        except Malformed as error:
            raise ValueError(f"{place}: {error}; {HOW}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{place}: {reprlib.repr(values)} is not a JSON object; {HOW}")
        if not (accepted := _accepted(place, values)):
            continue
        request = values.get("metadata") or {}  # AIPerf's, as lines may stand in order of completion
        row = {
            "suite": "requests",
            "id": str(request.get("session_num", number)),
            "turn": request.get("turn_index") or 0,
            "repeat": 0,
            "method": f"{file.stem} (engine)",
            "prompt_tokens": 0,
            "new_tokens": 1 + sum(accepted) + len(accepted),
            "accepted": accepted,
            "answer": 0,  # its tokens are unknown
        }
        rows.append(row)
    if not rows:
        raise ValueError(f"{file}: no answer says what each round accepted: {HOW}")
    return rows


def _accepted(place: str, values: dict[str, Any]) -> list[int]:
    """Accepted tokens per round of an answer; [] where nothing was drafted."""
    try:
        vllm = (values.get("metrics") or {}).get("speculative_decoding")
        known = vllm or values.get("meta_info") or values.get("spec_decode_acceptance") or {}
        counts = next((known[name] for name in HISTOGRAMS if known.get(name)), [])
        times = counts.items() if isinstance(counts, dict) else enumerate(counts)
        return known.get("per_step_accepted") or [int(accepted) for accepted, n in times for _ in range(int(n))]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{place}: {reprlib.repr(values)} does not say what each round accepted: {HOW}") from None
