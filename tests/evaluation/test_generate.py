"""`poss generate`: what is said, when, and what it says of its own speed."""

import io
import re
from collections.abc import Iterator

import pytest
import torch

from poss_lightning import clock
from poss_lightning.decoding.baselines import Autoregressive
from poss_lightning.decoding.costs import Costs
from poss_lightning.decoding.decoder import Decoder, Progress
from poss_lightning.decoding.trees import Tree
from poss_lightning.decoding.verification import Verdict
from poss_lightning.evaluation import generate as module
from poss_lightning.evaluation.generate import answer, generate
from poss_lightning.evaluation.streaming import IncrementalDetokenizer
from poss_lightning.evaluation.tree_view import drafted_tree
from poss_lightning.sampling import Sampling
from poss_lightning.target_model.chat import Chat
from poss_lightning.terminal import printable
from tests.support.decoders import speculate
from tests.support.tiny import tiny_draft

NUMBER = r"\d+\.\d+"
PREPARED, TAU = rf" \(after {NUMBER} s of preparation\)", rf", τ {NUMBER}"
ALONE = {"draft": None}
PLAIN = rf", {NUMBER} × plain decoding \({NUMBER} tokens/s\), the same tokens, bit for bit"


@pytest.fixture
def common(inputs) -> dict:
    names = {name: str(inputs / name) for name in ("target", "draft")}
    return names | {"dtype": "float32", "max_new_tokens": 20, "nodes": 12}


def test_text_is_printed_as_it_is_accepted_and_letters_are_whole(target, capsys):
    """After each step all of its text has been printed, but for half a letter."""
    tokens = target.tokenizer("a€🐴!")["input_ids"]  # 1 + 3 + 4 + 1 tokens
    steps = {"a": tokens[:2], "": tokens[2:3], "€": tokens[3:6], "🐴!": tokens[6:]}  # by what they complete

    class Scripted(Decoder):
        def rounds(self, request, clock) -> Iterator[Progress]:
            for completed, step in steps.items():
                yield Progress({0: step})
                assert capsys.readouterr().out == completed

    speaker = Scripted()
    speaker.target = target
    detokenizer = IncrementalDetokenizer(target.chat.text)
    answer(speaker, [1], 9, watch=module._watch(speaker, detokenizer, None))
    assert capsys.readouterr().out == detokenizer.rest() == ""


def test_what_watching_takes_does_not_count(target, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def watch(step: Progress) -> None:
        now[0] += 5

    decoded = answer(Autoregressive(target), [5, 6, 7], 9, watch=watch)
    assert now[0] == 45 and decoded.seconds["total"] == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tree": "fixed"}, TAU + PLAIN),
        ({"tree": "fixed", "compare": False}, TAU),
        ({"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 4}, PREPARED + TAU + PLAIN),
        (ALONE, ""),
        (ALONE | {"lookup": 4}, PREPARED + TAU + PLAIN),
    ],
)
def test_the_answer_is_that_of_plain_decoding_and_its_speed_follows(common, target, capsys, monkeypatch, options, line):
    monkeypatch.setattr("sys.stdin", io.StringIO("How many\nlegs has 🐴?\n"))
    generate("-", **common | options)
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n\n")
    assert re.fullmatch(rf"20 tokens, {NUMBER} tokens/s{line}", last)
    prompt = target.chat.prompt([{"role": "user", "content": "How many\nlegs has 🐴?"}])
    sampling = Sampling(*(options[name] for name in ("temperature", "top_k", "top_p") if name in options))
    seeded = torch.Generator().manual_seed(options.get("seed", 0))
    (expected,) = Autoregressive(target).decode([prompt], 20, sampling=sampling, generator=seeded)
    assert text == printable(target.chat.text(expected.tokens))


def test_why_auto_gave_up_drafting_is_logged_and_bytes_that_are_not_text_are_refused(common, caplog, monkeypatch):
    caplog.set_level("INFO", "poss_lightning")
    monkeypatch.setattr("poss_lightning.decoding.costs.measure", lambda *args: Costs(9.0, {1: 1.0, 2: 5.0, 4: 20.0}))
    generate("Hi", **common)
    assert "tree=auto disabled drafting: " in caplog.messages[-1] and "--tree fixed drafts" in caplog.messages[-1]
    for errors, chat in (("strict", False), ("surrogateescape", True)):  # as locales have it
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("größer\n".encode("latin-1")), "utf-8", errors))
        with pytest.raises(ValueError, match=r"'utf-8' codec can't|half a surrogate"):
            generate("-", **common, chat=chat)


# --- stdin and chats ---


@pytest.mark.parametrize(("first", "lines"), [("-", "One?\nTwo?\n"), ("One?", "Two?\n\nnever asked\n")])
def test_a_chat_keeps_the_conversation_up_to_an_empty_line_or_the_end(common, capsys, monkeypatch, first, lines):
    asked, prompt = [], Chat.prompt
    monkeypatch.setattr(Chat, "prompt", lambda self, messages: asked.append(list(messages)) or prompt(self, messages))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    generate(first, chat=True, **common)
    out = capsys.readouterr().out
    said = [[message["content"] for message in messages[::2]] for messages in asked]
    assert said == [["One?"], ["One?", "Two?"]]
    answered = asked[1][1]
    assert answered["role"] == "assistant" and f"{printable(answered['content'])}\n\n20 tokens" in out
    assert out.count("20 tokens, ") == 2 and "plain decoding" not in out
    assert "> Two?\n" in out  # as a terminal shows what is typed
    assert out.count("> ") - answered["content"].count("> ") >= (2 if first == "-" else 1)


# --- rounds drawn ---


def test_rounds_are_drawn_before_the_answer(common, target, capsys):
    generate("Hi", show="tree", tree="fixed", **common)
    out = capsys.readouterr().out
    assert " 0 drafted" not in out and "of preparation" not in out  # fixed trees: auto may draft nothing
    accepted = [int(count) for count in re.findall(r"^round \d+: \d+ drafted, (\d+) accepted$", out, re.MULTILINE)]
    assert out.count("─ ✓ ") >= sum(accepted) and 1 + sum(count + 1 for count in accepted) >= 20
    prompt = target.chat.prompt([{"role": "user", "content": "Hi"}])
    (expected,) = Autoregressive(target).decode([prompt], 20)
    assert f"\n\n{printable(target.chat.text(expected.tokens))}\n\n20 tokens, " in out


def test_every_round_is_drawn_as_it_was_and_one_within_which_the_text_ended_so_far(target):
    many = speculate(target, tiny_draft(target, [1, 2]), nodes=400, tree_width=320)  # so that some are right
    drawn = []

    def watch(now: Progress) -> None:
        if now.tree is not None:
            drawn_tree = drafted_tree(now, frozenset())
            drawn.append([drawn_tree.tokens[node] for node in drawn_tree.path[1:]] + [drawn_tree.bonus])

    decoded = answer(many, [5, 6, 7], 30, watch=watch)
    assert [len(tokens) - 1 for tokens in drawn] == decoded.accepted
    assert [token for tokens in drawn for token in tokens][:29] == decoded.tokens[1:] and sum(decoded.accepted) > 3
    # Of 5, 6, 7 in a row the target takes 5 and 6, and adds 8.
    tree = Tree(torch.tensor([[9, 5, 6, 7]]), torch.tensor([[0, 0, 1, 2]]), torch.zeros(1, 4))
    verdict = Verdict(torch.tensor([[0, 1, 2, 2]]), torch.tensor([[5, 6, 8, 8]]), torch.tensor([2]))
    for stop, path, bonus in ((8, [0, 1, 2], 8), (6, [0, 1, 2], None), (5, [0, 1], None)):
        drawn_tree = drafted_tree(Progress({}, tree=tree, verdict=verdict), frozenset({stop}))
        assert drawn_tree == ([9, 5, 6, 7], [0, 0, 1, 2], [0.0] * 4, path, bonus)
