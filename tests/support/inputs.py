"""Inputs of commands: a corpus, its store, a suite, a draft; and each of them broken in some way."""

import json
import shutil
from pathlib import Path

from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.extraction import extract
from tests.support.tiny import tiny_draft, tiny_target, write_target

QUESTION = {"role": "user", "content": "How many legs?"}
YAML = {"group": "modle.depth: 2", "number": "draft: 1", "tab": "model:\n\tallocation: [2]"}
YAML["dots"] = "trainer.max_steps: 3\ntrainer: {max_epochs: 2}"


def write_inputs(folder: Path) -> None:
    """Write all inputs into a folder."""
    target = write_target(folder / "target")
    talks = [[QUESTION, {"role": "assistant", "content": f"A horse has {i} legs."}] for i in range(40)]
    lines = [json.dumps({"id": i, "messages": messages}) + "\n" for i, messages in enumerate(talks)]
    (folder / "corpus.jsonl").write_text("".join(lines))
    (folder / "malformed.jsonl").write_text(f"{lines[0]}{{oops\n{lines[1]}[]\n")
    (folder / "empty.jsonl").write_text("\n")
    suite = write_suite(folder / "suite.jsonl", [QUESTION["content"]])
    write_suite(folder / "long.jsonl", ["word " * 600])
    extract(str(folder / "corpus.jsonl"), str(folder / "store"), target=target, dtype="float32")
    tiny_draft(tiny_target(), [1, 1]).save_pretrained(folder / "draft")
    few = {"target": target, "dtype": "float32", "max_new_tokens": 8, "suites": [suite], "tree": "fixed"}
    benchmark(str(folder / "records"), drafts={"d": str(folder / "draft")}, **few)
    # and what is broken
    tiny_draft(tiny_target(1), [1, 1]).save_pretrained(folder / "draft-of-another")
    write_target(folder / "another", 1)
    without = shutil.ignore_patterns
    shutil.copytree(folder / "target", folder / "no-template", ignore=without("chat_template.jinja"))
    shutil.copytree(folder / "draft", folder / "no-weights", ignore=without("*.safetensors"))
    whole = (folder / "store" / "shard-00000.arrow").read_bytes()
    for name, broken in {"truncated": whole[:-100], "flipped": whole[:-9] + b"flip" + whole[-5:]}.items():
        shutil.copytree(folder / "store", folder / name)
        (folder / name / "shard-00000.arrow").write_bytes(broken)
    config = shutil.copytree(folder / "draft", folder / "contradicting") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"allocation": [1, 1, 1]}))
    (folder / "evil.ckpt").write_bytes(b"cposix\nsystem\n(S'touch nowhere'\ntR.")
    for name, text in YAML.items():
        (folder / f"{name}.yaml").write_text(text + "\n")


def write_suite(path: Path, *turns: list[str]) -> str:
    """Questions 0, 1, 2, … of these turns."""
    path.write_text("".join(json.dumps({"question_id": i, "turns": each}) + "\n" for i, each in enumerate(turns)))
    return str(path)
