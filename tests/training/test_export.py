"""Export with a smaller vocabulary: the same weights, and coverage as counted by hand."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from poss_lightning import cli
from poss_lightning.draft.specialists import Specialists
from poss_lightning.training.export import restrict_vocabulary
from tests.support.stores import contents, make_conversations
from tests.support.tiny import tiny_draft, tiny_target, write_target


def test_only_the_vocabulary_changes(target, tmp_path):
    """Cut, saved and loaded: every weight has the same bits, and there is no new one."""
    draft, kept = tiny_draft(target, [1, 3, 2]), torch.arange(0, 320, 7)
    draft.normalise(torch.rand(32), torch.rand(32))
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    restrict_vocabulary(draft, kept).save_pretrained(tmp_path)
    loaded = Specialists.from_pretrained(tmp_path)
    assert loaded.vocabulary.equal(kept)
    assert asdict(loaded.config) == asdict(draft.config) | {"vocabulary_size": len(kept)}
    after = {name: value for name, value in loaded.state_dict().items() if name != "vocabulary"}
    assert after.keys() == before.keys() and all(value.equal(before[name]) for name, value in after.items())
    assert draft.vocabulary is None and all(value.equal(before[name]) for name, value in draft.named_parameters())
    other = tiny_draft(target, [1, 3, 2], seed=1)
    other.start_from(loaded)  # a draft may start from a cut one
    assert other.vocabulary is None and all(map(torch.equal, other.parameters(), draft.parameters()))


# --- the command ---


@pytest.fixture
def given(target, tiny_folder, tmp_path) -> dict[str, str]:
    """A draft's folder, conversations, and the target's."""
    tiny_draft(target, [1, 2]).save_pretrained(tmp_path / "draft")
    lines = [json.dumps({"id": c.id, "messages": c.messages}) for c in make_conversations()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return {"draft": str(tmp_path / "draft"), "corpus": str(tmp_path / "corpus.jsonl"), "target": tiny_folder}


def run(given: dict[str, str], out: Path, size: int, *options: str) -> None:
    corpus = ("--corpus", given["corpus"], "--target", given["target"])
    cli.run("export", [given["draft"], str(out), "--vocabulary_size", str(size), *corpus, *options])


@pytest.mark.parametrize(("size", "limit"), [(1, 24), (20, 5)])
def test_the_command_keeps_and_covers_the_tokens_of_a_hand_count(target, given, tmp_path, capsys, size, limit):
    run(given, tmp_path / "small", size, "--limit", str(limit))
    rendered = [text for each in make_conversations()[:limit] for text in target.chat.texts(each.messages)]
    written = [token for text in rendered for start, stop in text.spans for token in text.tokens[start:stop]]
    counts, stops = Counter(written), set(target.chat.stops)  # these are always kept; the rest by count, then by id
    expected = sorted(range(320), key=lambda token: (token not in stops, -counts[token], token))[:size]
    cut_to = Specialists.from_pretrained(tmp_path / "small")
    assert cut_to.vocabulary.tolist() == sorted(expected) and cut_to.config.vocabulary_size == size
    covered = sum(token in expected for token in written)
    line = f"{size} of 320 tokens cover {100 * covered / len(written):.1f} % of {len(written)} answer tokens"
    assert capsys.readouterr().out.splitlines()[0] == line


def test_the_command_restores_the_whole_vocabulary(given, tmp_path):
    """Also of a draft that was cut, and then otherwise."""
    run(given, tmp_path / "smaller", 10)
    run(given | {"draft": str(tmp_path / "smaller")}, tmp_path / "small", 20)
    cli.run("export", [str(tmp_path / "small"), str(tmp_path / "whole"), "--vocabulary_size", "320"])
    assert contents(tmp_path / "whole") == contents(tmp_path / "draft")


def test_stop_tokens_are_kept_even_if_no_answer_has_them(given, tmp_path):
    """This target also stops at 319, which the template never writes."""
    write_target(tmp_path / "target", eos_token_id=[1, 319])
    given = given | {"target": str(tmp_path / "target")}
    run(given, tmp_path / "small", 2)
    assert Specialists.from_pretrained(tmp_path / "small").vocabulary.tolist() == [1, 319]
    with pytest.raises(ValueError, match=r"size is 1; it must lie between 2, as it holds .* \[1, 319\], and .* 320"):
        run(given, tmp_path / "smaller", 1)


def test_a_vocabulary_that_does_not_fit_is_refused(target, given, tmp_path):
    tiny_draft(tiny_target(num_hidden_layers=4), [2], kind="eagle3").save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="own has a head of its own, whose vocabulary is chosen when it is trained"):
        run(given | {"draft": str(tmp_path / "own")}, tmp_path / "small", 20)
    with pytest.raises(ValueError, match="vocabulary_size is 20 of 320 tokens; give the --corpus that says which"):
        cli.run("export", [given["draft"], str(tmp_path / "small"), "--vocabulary_size", "20"])
    tiny_draft(tiny_target(1), [2]).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="was trained for a different target: fingerprint"):
        run(given | {"draft": str(tmp_path / "other")}, tmp_path / "small", 20)
    assert not (tmp_path / "small").exists()
