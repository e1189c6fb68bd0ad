"""vLLM's server on the prompts of a benchmark, with its drafts and without, at several loads.

    poss benchmark OURS --drafts.hass DRAFT --tree_width 1 --dtype float32
    python -m benchmarks.serve OURS OUT --loads 1 4 16 -- --enforce-eager

OUT/load-4/records.jsonl   4 requests at a time: `vllm` without a draft, and `vllm-hass`
OUT/load-4/run.json        settings, machine; and of each method the seconds and tokens of all requests together

Prompts, target, dtype and limits are those of OURS, so `poss compare "[OURS,OUT/load-4]"` shows both side by side. A
draft is served as a chain of its depth in OURS. What follows `--` goes to `vllm serve`. It runs where vLLM does.
"""

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import write
from benchmarks.vllm_server import VLLM, ServedAnswer, Server
from poss_lightning.draft.specialists import Specialists
from poss_lightning.evaluation.provenance import describe_draft
from poss_lightning.evaluation.records import Record, Source, read_sources, to_line
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.files import atomic
from poss_lightning.interop.convert import convert
from poss_lightning.machine import choose_device
from poss_lightning.target.model import Target

Program = tuple[str, ...]
SLACK = 64  # vLLM drafts nothing that might exceed the longest text
METHODS = {"eagle2": "eagle", "eagle3": "eagle3"}  # vLLM's names of our kinds


class Prompt(NamedTuple):
    """A prompt, and our own loop's record of its answer."""

    tokens: list[int]
    plain: Record


class Measured(NamedTuple):
    """All prompts at one load."""

    answers: list[ServedAnswer]
    seconds: float  # from the first request to the last answer


def config_of(source: Source) -> dict[str, Any]:
    """Settings of a benchmark."""
    return (source.run or {})["config"]


def prompts_of(source: Source, target: Target) -> list[Prompt]:
    """The prompts of a benchmark: later turns follow our own loop's answers.

    Raises:
        ValueError: the suites have changed since.
    """
    config = config_of(source)
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


def measure(server: Server, prompts: list[Prompt], load: int, max_new_tokens: int, stops: list[int]) -> Measured:
    """Ask for all answers, `load` at a time, in order."""
    with ThreadPoolExecutor(load) as threads:
        began = time.perf_counter()
        answers = list(threads.map(lambda prompt: server.answer(prompt.tokens, max_new_tokens, stops), prompts))
        return Measured(answers, time.perf_counter() - began)


def records_of(method: str, prompts: list[Prompt], answers: list[ServedAnswer]) -> list[Record]:
    return [
        replace(
            prompt.plain,
            method=method,
            new_tokens=len(answer.tokens),
            accepted=answer.accepted,
            seconds={"total": round(answer.seconds, 6)},
            tokens=answer.tokens,
            text=answer.text,
            pieces=None,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def serve_draft(name: str, run: dict[str, Any], folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Arguments with which vLLM drafts like a method of a benchmark's run.json, and the method's facts."""
    address, depth = run["config"]["drafts"][name], run["methods"][name]["depth"]
    draft = Specialists.from_pretrained(address)
    convert(address, str(folder / name), output_format="vllm", target=run["config"]["target"])
    speculation = {"method": METHODS[draft.config.kind], "model": str(folder / name), "num_speculative_tokens": depth}
    facts = {"depth": depth, "nodes": depth + 1, "tree_width": 1, **describe_draft(draft)}
    return ["--speculative-config", json.dumps(speculation)], facts


def serve(
    source: Source,
    prompts: list[Prompt],
    target: Target,
    out: Path,
    loads: list[int],
    extra: list[str],
    program: Program,
) -> tuple[str, dict[str, dict[str, Any]], dict[int, dict[str, Measured]]]:
    """Start a server for each method in turn; return its version, the methods' facts, and what was measured by load."""
    run, config = source.run or {}, config_of(source)
    limit, stops = config["max_new_tokens"], sorted(target.chat.stops)
    longest = max(len(prompt.tokens) for prompt in prompts) + limit + SLACK
    common = [target.model.name_or_path, "--dtype", config["dtype"], "--max-model-len", str(longest)]
    common += ["--no-enable-prefix-caching", "--generation-config", "vllm", *extra]
    measured: dict[int, dict[str, Measured]] = {load: {} for load in loads}
    version = ""
    with tempfile.TemporaryDirectory(prefix="poss-serve-") as folder:
        methods: dict[str, tuple[list[str], dict[str, Any]]] = {"vllm": ([], {})}
        for name in config["drafts"] or {}:
            methods[f"vllm-{name}"] = serve_draft(name, run, Path(folder))
        for method, (speculation, _) in methods.items():
            with Server([*common, *speculation], out / f"{method}.log", program) as server:
                version = server.version()
                server.answer(prompts[0].tokens, min(limit, 16), stops)  # warms it up
                for load in loads:
                    measured[load][method] = measure(server, prompts, load, limit, stops)
    return version, {method: facts for method, (_, facts) in methods.items()}, measured


def show(load: int, by_method: dict[str, Measured], prompts: list[Prompt]) -> None:
    for name, (answers, seconds) in by_method.items():
        rate = sum(len(answer.tokens) for answer in answers) / seconds
        same = sum(answer.tokens == prompt.plain.tokens for answer, prompt in zip(answers, prompts, strict=True))
        print(f"load {load:>2}  {name:<16} {rate:7.1f} tokens/s, {same} of {len(prompts)} answers as our own loop's")


def main(arguments: list[str], program: Program = VLLM) -> None:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="benchmarks.serve")
    parser.add_argument("ours", type=Path, help="folder of `poss benchmark`")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16], help="requests at a time")
    options, extra = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    (source,) = read_sources(options.ours)
    config = config_of(source)
    target = Target.load(config["target"], config["dtype"], "cpu")  # for its chat template; the server has its own
    prompts = prompts_of(source, target)
    options.out.mkdir(parents=True, exist_ok=True)
    version, methods, measured = serve(source, prompts, target, options.out, options.loads, extra, program)
    for load, by_method in measured.items():
        folder = options.out / f"load-{load}"
        served = {
            name: {"seconds": round(seconds, 3), "tokens": sum(len(answer.tokens) for answer in answers)}
            for name, (answers, seconds) in by_method.items()
        }
        facts = {
            "command": ["benchmarks.serve", *arguments],
            "config": config | {"engine": f"vLLM {version}", "load": load},
            "methods": methods,
            "served": served,
        }
        records = [each for name, (answers, _) in by_method.items() for each in records_of(name, prompts, answers)]
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "run.json", facts, choose_device())  # vLLM's device; the target here gives its template alone
        with atomic(folder / "records.jsonl") as path:
            path.write_text("".join(f"{to_line(record)}\n" for record in records), encoding="utf-8")
        show(load, by_method, prompts)


if __name__ == "__main__":
    main(sys.argv[1:])
