"""A stand-in for `vllm serve`: python fake_vllm.py ANSWERS [vLLM's arguments]. It knows its answers before.

ANSWERS is JSON: of "plain" and of "draft" (where there is a --speculative-config) the response to each prompt. Without
the file it ends at once, as vLLM does with a target that it cannot load; and where it shall count drafts without one.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Answers(BaseHTTPRequestHandler):
    known: dict

    def do_GET(self) -> None:
        self.reply(200, {"version": "0.fake"} if self.path == "/version" else {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.known.get(json.dumps(asked["prompt"]))
        self.reply(200 if answer else 400, answer or {"error": "no such prompt"})

    def reply(self, status: int, content: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    file, *arguments = sys.argv[1:]
    drafts, counts = ("--" + name in arguments for name in ("speculative-config", "per-request-spec-decode-metrics"))
    if not Path(file).exists() or drafts != counts:
        print("loading\nValueError: no such model\nFor further information visit https://errors.example\n")
        sys.exit(1)
    Answers.known = json.loads(Path(file).read_text())["draft" if drafts else "plain"]
    ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Answers).serve_forever()
