"""Rounds as other engines report them: `poss compare FILE` shows their acceptance.

Three forms are known: vLLM's responses (`--per-request-spec-decode-metrics`), SGLang's, and AIPerf's
profile_export.jsonl (`--export-level records`); JSON lines or one array, gzipped or not.
"""

import reprlib
from pathlib import Path
from typing import Any

from poss_lightning.corpus.formats import file_records, parse_line

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
        try:
            values: Any = parse_line(line) if isinstance(line, bytes) else line
            accepted, request = _accepted(values), values.get("metadata") or {}  # AIPerf's, in order of completion
        except (AttributeError, TypeError, ValueError) as error:
            known = f"{file}, line {number}: {reprlib.repr(line)} does not say what each round accepted"
            raise ValueError(f"{known} ({error}): {HOW}") from None
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
        rows += [row] if accepted else []
    if not rows:
        raise ValueError(f"{file}: no answer says what each round accepted: {HOW}")
    return rows


def _accepted(values: dict[str, Any]) -> list[int]:
    """Return accepted tokens per round of an answer; [] where nothing was drafted."""
    vllm = (values.get("metrics") or {}).get("speculative_decoding")
    known = vllm or values.get("meta_info") or values.get("spec_decode_acceptance") or {}
    counts = next((known[name] for name in HISTOGRAMS if known.get(name)), [])
    times = counts.items() if isinstance(counts, dict) else enumerate(counts)
    return known.get("per_step_accepted") or [int(accepted) for accepted, n in times for _ in range(int(n))]
