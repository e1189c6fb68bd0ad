"""Inputs of commands: a corpus, its store, a suite, a draft; and each of them broken in some way."""

import json
import shutil
from pathlib import Path

from poss_lightning.evaluation.benchmark import benchmark
from poss_lightning.extract import extract
from poss_lightning.target.model import Target
from tests.support.tiny import tiny_draft, tiny_model, tiny_target, tiny_tokenizer

TALK = {
    "messages": [{"role": "user", "content": "How many legs?"}, {"role": "assistant", "content": "A horse has four."}]
}


def write_inputs(folder: Path, target: Target, tiny_folder: str) -> None:
    """Write all inputs into a folder."""
    Path(folder, "target").symlink_to(tiny_folder)
    talks = [[TALK["messages"][0], {"role": "assistant", "content": f"A horse has {i} legs."}] for i in range(40)]
    lines = [json.dumps({"id": i, "messages": messages}) + "\n" for i, messages in enumerate(talks)]
    (folder / "corpus.jsonl").write_text("".join(lines))
    (folder / "malformed.jsonl").write_text(json.dumps(TALK) + "\n{oops\n" + json.dumps(TALK) + "\n[]\n")
    (folder / "empty.jsonl").write_text("\n")
    (folder / "suite.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["How many legs?"]}) + "\n")
    (folder / "long.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["word " * 600]}) + "\n")
    extract(str(folder / "corpus.jsonl"), str(folder / "store"), tiny_folder, dtype="float32")
    tiny_draft(target, [1, 1]).save_pretrained(folder / "draft")
    drafts, suites = {"d": str(folder / "draft")}, [str(folder / "suite.jsonl")]
    few = {"target": tiny_folder, "dtype": "float32", "max_new_tokens": 8, "suites": suites}
    benchmark(str(folder / "records"), drafts=drafts, **few)
    _break(folder)


def write_suite(path: Path, *turns: list[str]) -> str:
    """Questions 0, 1, 2, … of these turns."""
    path.write_text("".join(json.dumps({"question_id": i, "turns": each}) + "\n" for i, each in enumerate(turns)))
    return str(path)


def _break(folder: Path) -> None:
    other = tiny_target(1)
    tiny_draft(other, [1, 1]).save_pretrained(folder / "draft-of-another")
    tiny_model(1).save_pretrained(folder / "another")
    tiny_tokenizer().save_pretrained(folder / "another")
    shutil.copytree(folder / "target", folder / "no-template")
    (folder / "no-template" / "chat_template.jinja").unlink()
    whole = (folder / "store" / "shard-00000.arrow").read_bytes()
    for name, broken in {"truncated": whole[:-100], "flipped": whole[:-9] + b"flip" + whole[-5:]}.items():
        shutil.copytree(folder / "store", folder / name)
        (folder / name / "shard-00000.arrow").write_bytes(broken)
    shutil.copytree(folder / "draft", folder / "contradicting")
    config = folder / "contradicting" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"allocation": [1, 1, 1]}))
    (folder / "no-weights").mkdir()
    shutil.copy(folder / "draft" / "config.json", folder / "no-weights")
    texts = {
        "misspelt": "model: {allocaton: [2]}",
        "group": "modle.depth: 2",
        "number": "draft: 1",
        "tab": "model:\n\tallocation: [2]",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text + "\n")
    (folder / "latin.yaml").write_bytes("# größer".encode("latin-1"))
