"""vLLM's server on the prompts of a benchmark, with its drafts and without, at several loads.

    poss benchmark OURS --drafts.hass DRAFT --tree_width 1 --dtype float32
    python -m benchmarks.serve OURS OUT --loads 1 4 16 -- --enforce-eager

OUT/load-4/records.jsonl   4 requests at a time: `vllm` without a draft, and `vllm-hass`
OUT/load-4/run.json        settings, machine; and of each method the seconds and tokens of all requests together

Prompts, target, dtype and limits are those of OURS, so `poss compare "[OURS,OUT/load-4]"` shows both side by side. A
draft is served as a chain of its depth in OURS. What follows `--` goes to `vllm serve`. It runs where vLLM does.
"""

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import write
from poss_lightning.draft.kinds import load_draft
from poss_lightning.evaluation.provenance import describe_draft
from poss_lightning.evaluation.records import Record, Source, read_sources, to_line
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.files import atomic
from poss_lightning.interop.convert import convert
from poss_lightning.interop.layouts import METHODS
from poss_lightning.machine import choose_device
from poss_lightning.target.model import Target

# not `vllm serve`, which needs a package named vllm: the one for CPUs has a different name
VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
HOST = "127.0.0.1"
START, ANSWER, END = 900, 900, 30  # seconds to start, to answer, and to end by itself
SLACK = 64  # vLLM drafts nothing that might exceed the longest text


class ServedAnswer(NamedTuple):
    """A greedy answer."""

    tokens: list[int]  # new ones, a stop token included
    text: str
    accepted: list[int]  # drafted tokens that each round accepted, as a `Record` counts them; empty without a draft
    seconds: float  # from the request to the answer


Served = dict[str, tuple[float, list[ServedAnswer]]]  # by method, seconds from the first request to the last answer


class Server:
    """A server in a process group of its own, which ends with the context.

    Args:
        arguments: the target, and options of `vllm serve`; the option that reports accepted tokens is added.
        log: file for its output.
        program: what is started.

    Raises:
        ValueError: it ended before it answered, or does not answer in time; the message has the last error of its log.
    """

    def __init__(self, arguments: Sequence[str], log: Path, program: Sequence[str] = VLLM):
        self.log = log
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        counting = ["--per-request-spec-decode-metrics", "detailed"] if "--speculative-config" in arguments else []
        self._command = [*program, *arguments, "--host", HOST, "--port", str(self.port), *counting]

    def __enter__(self) -> "Server":
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def version(self) -> str:
        """vLLM's version."""
        return self._request("GET", "/version")["version"]

    def answer(self, prompt: list[int], max_new_tokens: int, stops: Sequence[int]) -> ServedAnswer:
        """The greedy answer to a prompt, up to and including its first stop token."""
        asked = {"prompt": prompt, "max_tokens": max_new_tokens, "stop_token_ids": list(stops)}
        began = time.perf_counter()
        given = self._request("POST", "/v1/completions", asked | {"temperature": 0, "return_token_ids": True})
        seconds = time.perf_counter() - began
        (choice,), metrics = given["choices"], given.get("metrics") or {}
        accepted = (metrics.get("speculative_decoding") or {}).get("per_step_accepted") or []
        tokens = choice["token_ids"]
        return ServedAnswer(
            tokens, choice["text"], count_accepted(accepted, len(tokens), choice["finish_reason"] == "stop"), seconds
        )

    def _wait(self) -> None:
        began = time.monotonic()
        while True:
            if self._process.poll() is not None or time.monotonic() - began > START:
                lines = [line.strip() for line in self.log.read_text(errors="replace").split("\n")]
                errors = [line for line in lines if re.search("[Ee]rror[:,] ", line)]
                how = "does not answer" if self._process.poll() is None else "ended"
                raise ValueError(f"the server {how}, see {self.log}" + "".join(f": {line}" for line in errors[-1:]))
            try:
                return self._request("GET", "/health")
            except ConnectionError:
                time.sleep(0.5)

    def _request(self, method: str, path: str, content: Any = None) -> Any:
        """The answer's JSON, None where it is empty; no proxy is used."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER)
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        connection.close()
        if response.status != 200:
            raise ValueError(f"the server answers {path} with {response.status} ({self.log}): {text[:200]}")
        return json.loads(text) if text else None

    def _end(self) -> None:
        """End the server and its workers."""
        for how, seconds in ((signal.SIGTERM, END), (signal.SIGKILL, None)):
            try:
                os.killpg(self._process.pid, how)
                self._process.wait(seconds)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def count_accepted(accepted: list[int], new_tokens: int, stopped: bool) -> list[int]:
    """vLLM's counts as a `Record` has them: none after a stop token, which takes the place of its round's bonus."""
    if not stopped or not accepted:
        return accepted
    return [*accepted[:-1], new_tokens - 2 - sum(count + 1 for count in accepted[:-1])]


class Prompt(NamedTuple):
    """A prompt, and our own loop's record of its answer."""

    tokens: list[int]
    plain: Record

    def record(self, method: str, answer: ServedAnswer) -> Record:
        """The record of a served answer."""
        return replace(
            self.plain,
            method=method,
            new_tokens=len(answer.tokens),
            accepted=answer.accepted,
            seconds={"total": round(answer.seconds, 6)},
            tokens=answer.tokens,
            text=answer.text,
            pieces=None,
        )


def prompts_of(source: Source, target: Target) -> list[Prompt]:
    """The prompts of a benchmark: later turns follow our own loop's answers.

    Raises:
        ValueError: the suites have changed since.
    """
    config = (source.run or {})["config"]
    questions = {(each.suite, each.id): each for each in read_suites(config["suites"], config["limit"])}
    plain = {
        (record.suite, record.id, record.turn): record
        for record in source.records
        if (record.method, record.repeat) == ("plain", 0)
    }
    prompts = []
    for (suite, name, turn), record in plain.items():
        messages: list[dict[str, str]] = []
        for number, text in enumerate(questions[suite, name].turns[: turn + 1]):
            before = [{"role": "assistant", "content": plain[suite, name, number - 1].text}] if number else []
            messages += [*before, {"role": "user", "content": text}]
        tokens = target.chat.prompt(messages)
        if len(tokens) != record.prompt_tokens:
            raise ValueError(f"{suite} {name}, turn {turn}: the prompt differs from that in {source.folder}")
        prompts.append(Prompt(tokens, record))
    return prompts


def serve_draft(name: str, run: dict[str, Any], folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Arguments with which vLLM drafts like a method of a benchmark's run.json, and the method's facts."""
    address, depth = run["config"]["drafts"][name], run["methods"][name]["depth"]
    draft = load_draft(address)
    convert(address, str(folder / name), output_format="vllm", target=run["config"]["target"])
    speculation = {"method": METHODS[draft.config.kind], "model": str(folder / name), "num_speculative_tokens": depth}
    facts = {"depth": depth, "nodes": depth + 1, "tree_width": 1, **describe_draft(draft)}
    return ["--speculative-config", json.dumps(speculation)], facts


def write_load(out: Path, facts: dict[str, Any], served: Served, prompts: list[Prompt]) -> None:
    """Write records and run.json of one load, and print a line for each method."""
    sums = {name: sum(len(answer.tokens) for answer in answers) for name, (_, answers) in served.items()}
    lines = []
    for name, (seconds, answers) in served.items():
        records = [prompt.record(name, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        lines += [f"{to_line(record)}\n" for record in records]
        same = sum(record.tokens == prompt.plain.tokens for record, prompt in zip(records, prompts, strict=True))
        rate, load = sums[name] / seconds, facts["config"]["load"]
        print(f"load {load:>2}  {name:<16} {rate:7.1f} tokens/s, {same} of {len(prompts)} answers as our own loop's")
    out.mkdir(parents=True, exist_ok=True)
    totals = {name: {"seconds": round(seconds, 3), "tokens": sums[name]} for name, (seconds, _) in served.items()}
    # vLLM's device; the target here gives its template alone
    write(out / "run.json", facts | {"served": totals}, choose_device())
    with atomic(out / "records.jsonl") as path:
        path.write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str], program: tuple[str, ...] = VLLM) -> None:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="benchmarks.serve")
    parser.add_argument("ours", type=Path, help="folder of `poss benchmark`")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16], help="requests at a time")
    options, extra = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    (source,) = read_sources(options.ours)
    run: dict[str, Any] = source.run or {}
    config, version = run["config"], ""
    target = Target.load(config["target"], config["dtype"], "cpu")  # for its chat template; the server has its own
    prompts, limit, stops = prompts_of(source, target), config["max_new_tokens"], sorted(target.chat.stops)
    longest = max(len(prompt.tokens) for prompt in prompts) + limit + SLACK
    common = [target.model.name_or_path, "--dtype", config["dtype"], "--max-model-len", str(longest)]
    common += ["--no-enable-prefix-caching", "--generation-config", "vllm", *extra]
    options.out.mkdir(parents=True, exist_ok=True)
    by_load: dict[int, Served] = {load: {} for load in options.loads}
    with tempfile.TemporaryDirectory(prefix="poss-serve-") as folder:
        drafts = {f"vllm-{name}": serve_draft(name, run, Path(folder)) for name in config["drafts"] or {}}
        methods: dict[str, tuple[list[str], dict[str, Any]]] = {"vllm": ([], {}), **drafts}
        for method, (speculation, _) in methods.items():
            with Server([*common, *speculation], options.out / f"{method}.log", program) as server:
                version, ask = server.version(), partial(server.answer, max_new_tokens=limit, stops=stops)
                server.answer(prompts[0].tokens, min(limit, 16), stops)  # warms it up
                for load, served in by_load.items():
                    with ThreadPoolExecutor(load) as threads:
                        began = time.perf_counter()
                        answers = list(threads.map(ask, (prompt.tokens for prompt in prompts)))
                        served[method] = time.perf_counter() - began, answers
    described = {name: facts for name, (_, facts) in methods.items()}
    for load, served in by_load.items():
        facts = {"command": ["benchmarks.serve", *arguments], "methods": described}
        facts["config"] = config | {"engine": f"vLLM {version}", "load": load}
        write_load(options.out / f"load-{load}", facts, served, prompts)


if __name__ == "__main__":
    main(sys.argv[1:])
