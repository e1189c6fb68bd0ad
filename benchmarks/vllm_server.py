"""vLLM's OpenAI server, as a process on this machine, and its greedy answers to token lists."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# not `vllm serve`, which needs a package named vllm: the one for CPUs has a different name
VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
HOST = "127.0.0.1"
START, ANSWER, END = 900, 900, 30  # seconds to start, to answer, and to end by itself


class ServedAnswer(NamedTuple):
    """A greedy answer."""

    tokens: list[int]  # new ones, a stop token included
    text: str
    accepted: list[int]  # drafted tokens that each round accepted, as a `Record` counts them; empty without a draft
    seconds: float  # from the request to the answer


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
