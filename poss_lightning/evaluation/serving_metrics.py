"""What other engines counted, in their responses and metrics: one reader for `poss compare` and `poss doctor`.

Every figure is by rounds: a round is one forward pass of the target that verifies a draft. A mean that a file states is
weighted by its rounds, and refused where it does not say how many.
"""

import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from poss_lightning.corpus.formats import CorpusError, file_records, parse_line

if TYPE_CHECKING:
    from poss_lightning.evaluation.rounds import AnswerRow

HISTOGRAMS = "acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram"  # the last two SGLang's
MEANS = {"spec_verify_ct": "spec_accept_length", "num_spec_steps": "mean_acceptance_length"}  # weights, and of what
HOW = (
    "give responses of vLLM's server started with --per-request-spec-decode-metrics detailed, of SGLang's /generate "
    "with spec_correct_drafts_histogram, or AIPerf's profile_export.jsonl of --export-level records"
)
STREAM = b"data:"  # before each event
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens(?:_per_pos)?)_total\{(.*)\} (\S+)", re.MULTILINE)
LABEL = re.compile(r'(model_name|position)="([^"]*)"')
GAUGE = re.compile(r'(?:^sglang:spec_accept_length(?:\{.*\})?|"avg_spec_accept_length":) *([\d.e+-]+)', re.MULTILINE)


class Served(NamedTuple):
    """What an engine accepted.

    Attributes:
        tau: tokens per round.
        passed: for each answer, or for all together: its rounds, and those that accepted at least 1, 2, … tokens; []
            where the file has a mean alone.
    """

    tau: float
    passed: list[list[int]]


def read_served(file: Path) -> Served:
    """Read what an engine accepted from responses, as `read_engine`; vLLM's /metrics; SGLang's /metrics, /server_info.

    Raises:
        ValueError: the file does not say so, or for several models, or by means that nothing weights.
    """
    text = file.read_text(errors="replace")
    if counters := COUNTER.findall(text):
        return _read_counters(file, counters)
    if gauges := GAUGE.findall(text):
        return _read_gauges(file, gauges)
    answers = [known for _, _, found in _answers(file) for known in found]
    histograms = [rounds for known in answers if (rounds := _accepted(known))]
    means = [known for known in answers if _has_mean_alone(known)]
    weighted = [(known[rounds], known[mean]) for known in means for rounds, mean in MEANS.items() if known.get(rounds)]
    weighted += [(len(rounds), 1 + sum(rounds) / len(rounds)) for rounds in histograms]
    if total := sum(rounds for rounds, _ in weighted):
        most = max(map(max, histograms), default=0)
        passed = [[sum(count >= k for count in rounds) for k in range(most + 1)] for rounds in histograms]
        return Served(sum(rounds * mean for rounds, mean in weighted) / total, [] if means else passed)
    raise ValueError(f"{file}: no answer says what each round accepted: {HOW}; or save /metrics of vLLM or SGLang")


def read_engine(file: Path) -> "list[AnswerRow]":
    """Read a row for each answer of an engine's responses, which names the method.

    Three forms are known: vLLM's responses (`--per-request-spec-decode-metrics`), SGLang's, and AIPerf's
    profile_export.jsonl (`--export-level records`); JSON lines, one array or a saved stream, gzipped or not.

    Answers without rounds, such as failed requests, are skipped. No engine says how long the prompt was, so
    `prompt_tokens` is 0, and histograms do not give the order of an answer's rounds.

    Raises:
        ValueError: no answer says what its rounds accepted; the message names file and line, and how to get one.
    """
    rows: list[AnswerRow] = []
    for number, request, found in _answers(file):
        if accepted := [count for known in found for count in _accepted(known)]:
            row: AnswerRow = {
                "method": f"{file.stem} (engine)",
                "suite": "requests",
                "id": str(request.get("session_num", number)),
                "turn": request.get("turn_index") or 0,
                "repeat": 0,
                "prompt_tokens": 0,
                "new_tokens": 1 + sum(accepted) + len(accepted),
                "accepted": accepted,
                "seconds": {},
                "tokens": [],
            }
            rows.append(row)
        elif any(map(_has_mean_alone, found)):
            raise ValueError(f"{file}, line {number}: the answer has a mean, not what each round accepted: {HOW}")
    if not rows:
        raise ValueError(f"{file}: no answer says what each round accepted: {HOW}")
    return rows


def _answers(file: Path) -> list[tuple[int, dict[str, Any], list[dict[str, Any]]]]:
    """List the answers of a file: number, AIPerf's metadata, and the objects that say what its rounds accepted.

    Chunks of a stream have the id of their answer, and the last of them counts.
    """
    found: dict[Any, tuple[int, dict[str, Any], list[dict[str, Any]]]] = {}
    for number, line in _records(file):
        try:
            values: Any = parse_line(line) if isinstance(line, bytes) else line
            known = _find_counts([values])
            [_accepted(each) for each in known]
            key = values.get("id") or (values.get("meta_info") or {}).get("id") or number
            found[key] = number, values.get("metadata") or {}, known  # which has the order of completion
        except (AttributeError, TypeError, ValueError) as error:
            words = f"{file}, line {number}: {reprlib.repr(line)} does not say what each round accepted"
            raise ValueError(f"{words} ({error}): {HOW}") from None
    return list(found.values())


def _records(file: Path) -> Iterator[tuple[int, object]]:
    """Yield the records of a file, or of a saved stream, whose lines begin with `data:`."""
    with file.open("rb") as lines:
        if lines.read(len(STREAM)) == STREAM:
            events = (line.removeprefix(STREAM).strip() for line in (STREAM + lines.read()).splitlines())
            yield from ((number, event) for number, event in enumerate(events, 1) if event not in (b"", b"[DONE]"))
            return
    try:
        yield from file_records(file)
    except CorpusError as error:
        raise ValueError(f"{error}: {HOW}") from error


def _find_counts(level: list[Any]) -> list[dict[str, Any]]:
    """Find the objects of a response that count rounds: those of the highest level that has any."""
    objects = [each for each in level if isinstance(each, dict)]
    if found := [each for each in objects if each.keys() & {*HISTOGRAMS, *MEANS, "per_step_accepted"}]:
        return found
    deeper = [value for each in objects for value in each.values()]
    deeper += [value for each in level if isinstance(each, list) for value in each]
    return _find_counts(deeper) if deeper else []


def _accepted(known: dict[str, Any]) -> list[int]:
    """Return accepted tokens per round; [] where nothing was drafted, or the object has means alone."""
    counts = next((known[name] for name in HISTOGRAMS if known.get(name)), [])
    times = counts.items() if isinstance(counts, dict) else enumerate(counts)
    return known.get("per_step_accepted") or [int(accepted) for accepted, n in times for _ in range(int(n))]


def _has_mean_alone(known: dict[str, Any]) -> bool:
    return not _accepted(known) and any(known.get(rounds) for rounds in MEANS)


def _read_counters(file: Path, counters: list[tuple[str, str, str]]) -> Served:
    """Sum vLLM's counters over its engines."""
    sums: dict[str, Counter[str]] = {}
    for name, labels, value in counters:
        known = dict(LABEL.findall(labels))
        key = known.get("position", name)
        sums.setdefault(known.get("model_name", ""), Counter())[key] += int(float(value))
    used = {model: own for model, own in sums.items() if own["drafts"]}
    if len(used) != 1:
        what = f"counters of {' and '.join(used)}: keep the lines of one" if used else "counters of no draft yet"
        raise ValueError(f"{file} has {what}; save /metrics after the engine has answered")
    ((_, own),) = used.items()
    places = [own[str(place)] for place in range(sum(key.isdigit() for key in own))]
    accepted = own["accepted_tokens"] or sum(places)
    return Served(1 + accepted / own["drafts"], [[own["drafts"], *places]] if places else [])


def _read_gauges(file: Path, gauges: list[str]) -> Served:
    """Return the mean that all of SGLang's schedulers state; 0 is that of a scheduler without a draft yet."""
    values = sorted({round(float(mean), 6) for mean in gauges if float(mean)})
    if len(values) == 1:
        return Served(values[0], [])
    said = f"different means of its schedulers, {values}, and not of how many rounds" if values else "no draft yet"
    raise ValueError(f"{file} has {said}: {HOW}")
