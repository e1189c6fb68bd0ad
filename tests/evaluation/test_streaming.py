"""Text while it is decoded: joined pieces are the text, no letter is ever printed in half, and time is linear."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models

from poss_lightning.evaluation.streaming import LOST, WINDOW, Pieces, pieces_of
from tests.support.tiny import tiny_tokenizer

TEXT = "A horse has four legs: 马有四条腿 🐴👩‍🦰, ça coûte 4 €€€. \n\n The end 🙂"


def bytes_joined() -> tuple[Callable[[list[int]], str], list[int]]:
    """As GPT-2, Llama-3, Qwen: tokens are bytes, put together."""
    tokenizer = tiny_tokenizer()
    return tokenizer.decode, tokenizer(TEXT)["input_ids"]


def bytes_fallen_back() -> tuple[Callable[[list[int]], str], list[int]]:
    """As Llama-2: words begin with ▁, the first loses it; rare letters are runs of <0x..>."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ("▁", *map(chr, range(33, 127))):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.decode, tokenizer.encode("▁" + TEXT.replace(" ", "▁")).ids


def spoken(text: Callable[[list[int]], str], tokens: list[int], sizes: list[int]) -> list[str]:
    """The pieces of `tokens`, given in runs of these sizes, repeated."""
    pieces, said = Pieces(text), []
    while tokens:
        size = sizes[len(said) % len(sizes)]
        said.append(pieces.add(tokens[:size]))
        tokens = tokens[size:]
    return [*said, pieces.rest()]


@pytest.mark.parametrize("kind", [bytes_joined, bytes_fallen_back])
@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [7], [1000]])
def test_pieces_make_the_text_and_hold_whole_letters(kind, sizes):
    text, tokens = kind()
    said = spoken(text, tokens, sizes)
    assert "".join(said) == text(tokens) == TEXT
    assert not any(LOST in piece for piece in said) and said[-1] == ""


def test_bytes_that_are_not_text_are_given_out_as_they_are():
    text, _ = bytes_joined()
    byte = {character: number for character, number in tiny_tokenizer().get_vocab().items() if len(character) == 1}
    draw = random.Random(0)
    tokens = draw.choices(sorted(byte.values()), k=2000)
    assert "".join(spoken(text, tokens, [1])) == text(tokens)
    broken = [byte["ÿ"]] * (3 * WINDOW)  # 0xFF
    assert "".join(spoken(text, broken, [1])) == text(broken) == LOST * len(broken)


@pytest.mark.parametrize("alike", ["whole", "broken"])
def test_time_is_linear(alike):
    text, tokens = bytes_joined()
    tokens = (tokens if alike == "whole" else [tiny_tokenizer().get_vocab()["ÿ"]] * 40) * 50
    decoded = []

    def counted(some: list[int]) -> str:
        decoded.append(len(some))
        return text(some)

    spoken(counted, tokens, [1])
    assert sum(decoded) < 2 * WINDOW * len(tokens)


def test_each_token_has_a_piece_also_of_half_letters_and_of_a_stop_token(target):
    byte = {target.tokenizer.convert_ids_to_tokens(i): i for i in range(3, 259)}
    broken = [byte["â"], byte["a"], byte["ÿ"], byte["b"], min(target.chat.stops)]
    pieces = pieces_of(target.chat.text, broken)
    assert "".join(pieces) == target.chat.text(broken) == "\ufffda\ufffdb" and pieces[-1] == ""
    whole = target.tokenizer("\u2028\né \ufffd €").input_ids
    for tokens in (broken, whole, whole[:-1], []):
        pieces = pieces_of(target.chat.text, tokens)
        assert "".join(pieces) == target.chat.text(tokens) and len(pieces) == len(tokens)
