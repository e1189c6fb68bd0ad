"""Export with a smaller vocabulary: the same weights, and coverage as counted by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from poss_lightning.draft.kinds import load_draft
from poss_lightning.training.export import export
from tests.support.stores import contents, make_conversations
from tests.support.tiny import tiny_draft, tiny_target, write_target


@pytest.fixture
def given(target, tiny_folder, tmp_path) -> dict[str, str]:
    """A draft's folder, conversations, the target's, and where to write."""
    draft = tiny_draft(target, [1, 2])
    draft.normalise(torch.rand(32), torch.rand(32))
    draft.save_pretrained(tmp_path / "draft")
    lines = [json.dumps({"id": c.id, "messages": c.messages}) for c in make_conversations()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    places = {"source": "draft", "corpus": "corpus.jsonl", "out": "small"}
    return {name: str(tmp_path / place) for name, place in places.items()} | {"target": tiny_folder}


@pytest.mark.parametrize(("size", "limit"), [(1, 24), (20, 5)])
def test_the_tokens_of_a_hand_count_are_kept_and_covered(target, given, capsys, size, limit):
    export(**given, vocabulary_size=size, limit=limit)
    rendered = [text for each in make_conversations()[:limit] for text in target.chat.texts(each.messages)]
    written = [token for text in rendered for start, stop in text.spans for token in text.tokens[start:stop]]
    counts, stops = Counter(written), set(target.chat.stops)  # these are always kept; the rest by count, then by id
    expected = sorted(range(320), key=lambda token: (token not in stops, -counts[token], token))[:size]
    cut_to = load_draft(given["out"])
    assert cut_to.vocabulary.tolist() == sorted(expected) and cut_to.config.vocabulary_size == size
    covered = sum(token in expected for token in written)
    line = f"{size} of 320 tokens cover {100 * covered / len(written):.1f} % of {len(written)} answer tokens"
    assert capsys.readouterr().out.splitlines()[0] == line


def test_only_the_vocabulary_changes(target, given, tmp_path):
    """A draft that was cut, and then otherwise, has its bytes again; another may start from a cut one."""
    smaller, whole = (str(tmp_path / name) for name in ("smaller", "whole"))
    export(**given | {"out": smaller}, vocabulary_size=10)
    export(**given | {"source": smaller}, vocabulary_size=20)
    export(given["out"], whole, vocabulary_size=320)
    assert contents(Path(whole)) == contents(tmp_path / "draft")
    draft, other = load_draft(whole), tiny_draft(target, [1, 2], seed=1)
    other.start_from(load_draft(smaller))
    assert other.vocabulary is None and all(map(torch.equal, other.parameters(), draft.parameters()))


def test_stop_tokens_are_kept_even_if_no_answer_has_them(given, tmp_path):
    """This target also stops at 319, which the template never writes."""
    given["target"] = write_target(tmp_path / "target", eos_token_id=[1, 319])
    export(**given, vocabulary_size=2)
    assert load_draft(given["out"]).vocabulary.tolist() == [1, 319]
    with pytest.raises(ValueError, match=r"size is 1; it must lie between 2, as it holds .* \[1, 319\], and .* 320"):
        export(**given | {"out": str(tmp_path / "smaller")}, vocabulary_size=1)


def test_a_vocabulary_that_does_not_fit_is_refused(given, tmp_path):
    tiny_draft(tiny_target(num_hidden_layers=4), [2], kind="eagle3").save_pretrained(tmp_path / "own")
    tiny_draft(tiny_target(1), [2]).save_pretrained(tmp_path / "other")
    for changes, words in (
        ({"source": str(tmp_path / "own")}, "own has a head of its own, whose vocabulary is chosen when it is trained"),
        ({"corpus": None}, "vocabulary_size is 20 of 320 tokens; give the --corpus that says which"),
        ({"source": str(tmp_path / "other")}, "was trained for a different target: fingerprint"),
    ):
        with pytest.raises(ValueError, match=words):
            export(**given | changes, vocabulary_size=20)
    assert not Path(given["out"]).exists()
