"""`poss demo` from end to end on a tiny random target: every command, every file it promises."""

import json
from pathlib import Path

from conftest import tiny_draft, tiny_model
from tiny import tiny_tokenizer

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.demo import CORPUS, demo
from poss_lightning.evaluation.records import read_records
from poss_lightning.target.model import Target


def shortened(path: Path) -> Path:
    """The shipped corpus with the beginnings of its texts: the tiny tokenizer makes a token of nearly every letter."""
    talks = read_conversations(str(CORPUS), limit=60)
    short = [[message | {"content": message["content"][:100]} for message in talk.messages] for talk in talks]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in short))
    return path


def test_the_demo_runs_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("poss_lightning.demo.CORPUS", shortened(tmp_path / "short.jsonl"))
    folder, target = tmp_path / "demo", tmp_path / "target"
    tiny_model(max_position_embeddings=4096).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    single = tiny_draft(Target.load(str(target), "float32"), [6], depth=1)
    single.save_pretrained(tmp_path / "single")
    heads = {"start_from": str(tmp_path / "single"), "trained": str(tmp_path / "single")}
    sizes = {"conversations": 60, "steps": 2, "limit": 1, "new_tokens": 4, "vocabulary_size": 100}
    demo(str(folder), str(target), **heads, **sizes)
    assert (folder / "report.html").is_file()
    records = read_records(folder / "benchmark")
    assert {record.method for record in records} == {"autoregressive", "generate", "single", "hass", "poss2", "trained"}
    assert "report.html" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    demo(str(folder), str(target), **heads, **sizes)  # everything is there: nothing is done again
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
