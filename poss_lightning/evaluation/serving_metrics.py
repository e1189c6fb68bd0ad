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
MEANS = {"spec_verify_ct": "spec_accept_length", "num_spec_steps": "mean_acceptance_length"}  # rounds, and their mean
HOW = (
    "give responses of vLLM's server started with --per-request-spec-decode-metrics detailed, of SGLang's /generate "
    "with spec_correct_drafts_histogram, or AIPerf's profile_export.jsonl of --export-level records"
)
DATA = b"data:"  # before each event of a saved stream, which may have other lines
STREAM = re.compile(rb"(data|event|id|retry)?:")
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens(?:_per_pos)?)_total\{([^}]*)\} (\S+)", re.MULTILINE
)
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


class Answer(NamedTuple):
    """What a response says of its rounds."""

    number: int  # of its line
    metadata: dict[str, Any]  # AIPerf's
    accepted: list[int]  # by each round, in any order
    means: list[tuple[int, float]]  # rounds and their mean tokens, where it has no histogram


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
    answers = _read_answers(file)
    histograms = [answer.accepted for answer in answers if answer.accepted]
    means = [mean for answer in answers for mean in answer.means]
    weighted = means + [(len(accepted), 1 + sum(accepted) / len(accepted)) for accepted in histograms]
    if total := sum(rounds for rounds, _ in weighted):
        most = max(map(max, histograms), default=0)
        passed = [[sum(count >= k for count in accepted) for k in range(most + 1)] for accepted in histograms]
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
    answers = _read_answers(file)
    for number in (answer.number for answer in answers if answer.means and not answer.accepted):
        raise ValueError(f"{file}, line {number}: the answer has a mean, not what each round accepted: {HOW}")
    rows: list[AnswerRow] = [
        {
            "method": f"{file.stem} (engine)",
            "suite": "requests",
            "id": str(metadata.get("session_num", number)),
            "turn": metadata.get("turn_index") or 0,
            "repeat": 0,
            "prompt_tokens": 0,
            "new_tokens": 1 + sum(accepted) + len(accepted),
            "accepted": accepted,
            "seconds": {},
            "tokens": [],
        }
        for number, metadata, accepted, _ in answers
        if accepted
    ]
    if not rows:
        raise ValueError(f"{file}: no answer says what each round accepted: {HOW}")
    return rows


def _read_answers(file: Path) -> list[Answer]:
    """Read the answers of a file. Chunks of a stream have the id of their answer, and the last of them counts.

    Each has the rounds of those before it. What has the same id and lacks some of these rounds is a different answer.
    """
    answers: dict[Any, Answer] = {}
    for number, line in _records(file):
        try:
            response: Any = parse_line(line) if isinstance(line, bytes) else line
            id = response.get("id") or (response.get("meta_info") or {}).get("id") or number
            answer = Answer(number, response.get("metadata") or {}, *_count([response]))
            is_other = id in answers and Counter(answers[id].accepted) - Counter(answer.accepted)
            answers[(id, number) if is_other else id] = answer
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}, line {number}: {reprlib.repr(line)} does not say what each round accepted ({error}): {HOW}"
            ) from None
    return list(answers.values())


def _records(file: Path) -> Iterator[tuple[int, object]]:
    """Yield the records of a file, or of a saved stream, of which they are the lines that begin with `data:`."""
    with file.open("rb") as lines:
        if STREAM.match(lines.readline()):
            lines.seek(0)
            events = ((number, line[len(DATA) :].strip()) for number, line in enumerate(lines, 1) if line[:5] == DATA)
            yield from ((number, event) for number, event in events if event not in (b"", b"[DONE]"))
            return
    try:
        yield from file_records(file)
    except CorpusError as error:
        raise ValueError(f"{error}: {HOW}") from error


def _count(level: list[Any]) -> tuple[list[int], list[tuple[int, float]]]:
    """Return what rounds accepted, and means without that, from the highest level of a response that has any."""
    objects = [each for each in level if isinstance(each, dict)]
    accepted, means = [], []
    for each in (each for each in objects if each.keys() & {*HISTOGRAMS, *MEANS, "per_step_accepted"}):
        counts = next((each[name] for name in HISTOGRAMS if each.get(name)), [])
        times = counts.items() if isinstance(counts, dict) else enumerate(counts)
        rounds = [*map(int, each.get("per_step_accepted") or ())]
        rounds = rounds or [int(accepted) for accepted, n in times for _ in range(int(n))]
        accepted += rounds
        stated = {n: mean for n, mean in MEANS.items() if each.get(n) and each.get(mean) and not rounds}
        means += [(int(each[n]), float(each[mean])) for n, mean in stated.items()]
    deeper = [value for each in objects for value in each.values()]
    deeper += [value for each in level if isinstance(each, list) for value in each]
    return (accepted, means) if accepted or means or not deeper else _count(deeper)


def _read_counters(file: Path, counters: list[tuple[str, str, str]]) -> Served:
    """Sum vLLM's counters over its engines; of a counter that is there twice, as in two scrapes, the last counts."""
    sums: dict[str, Counter[str]] = {}
    for (name, labels), value in {(name, labels): value for name, labels, value in counters}.items():
        stated = dict(LABEL.findall(labels))
        key = stated.get("position", name)
        sums.setdefault(stated.get("model_name", ""), Counter())[key] += int(float(value))
    used = {model: own for model, own in sums.items() if own["drafts"]}
    if len(used) != 1:
        what = f"counters of {' and '.join(used)}: keep the lines of one" if used else "counters of no draft yet"
        raise ValueError(f"{file} has {what}; save /metrics after the engine has answered")
    ((_, own),) = used.items()
    by_position = [own[str(k)] for k in range(sum(key.isdigit() for key in own))]
    accepted = own["accepted_tokens"] or sum(by_position)
    return Served(1 + accepted / own["drafts"], [[own["drafts"], *by_position]] if by_position else [])


def _read_gauges(file: Path, gauges: list[str]) -> Served:
    """Return the mean that all of SGLang's schedulers state; 0 is that of a scheduler without a draft yet."""
    means = sorted({round(float(mean), 6) for mean in gauges if float(mean)})
    if len(means) == 1:
        return Served(means[0], [])
    what = f"different means of its schedulers, {means}, and not of how many rounds" if means else "no draft yet"
    raise ValueError(f"{file} has {what}: {HOW}")
