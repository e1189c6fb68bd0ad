"""Text while it is decoded: joined pieces are the text, no letter is ever printed in half, and time is linear."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models

from poss_lightning.evaluation.streaming import LOST, MAX_HELD_TOKENS, IncrementalDetokenizer, text_per_token
from tests.support.tiny import tiny_tokenizer

TEXT = "A horse has four legs: 马有四条腿 🐴👩‍🦰, ça coûte 4 €€€. \n\n The end 🙂"


def bytes_joined() -> tuple[Callable[[list[int]], str], list[int]]:
    """As GPT-2, Llama-3, Qwen: tokens are bytes, put together."""
    tokenizer = tiny_tokenizer()
    return tokenizer.decode, tokenizer(TEXT)["input_ids"]


def bytes_fallen_back() -> tuple[Callable[[list[int]], str], list[int]]:
    """As Llama-2: words begin with ▁, the first loses it; rare letters are runs of <0x..>."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.decode, tokenizer.encode("▁" + TEXT.replace(" ", "▁")).ids


@pytest.mark.parametrize("kind", [bytes_joined, bytes_fallen_back])
def test_pieces_make_the_text_and_hold_whole_letters(kind):
    """However many tokens arrive at once."""
    text, tokens = kind()
    for size in (1, 3, 1000):
        pieces = IncrementalDetokenizer(text)
        said = [pieces.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        assert "".join(said) == text(tokens) == TEXT and pieces.rest() == ""
        assert not any(LOST in piece for piece in said)


def test_time_is_linear():
    text, tokens = bytes_joined()
    for alike in (tokens, [tiny_tokenizer().get_vocab()["ÿ"]] * 40):  # whole letters, and broken ones
        decoded = []
        text_per_token(lambda some, decoded=decoded: decoded.append(len(some)) or text(some), alike * 50)
        assert sum(decoded) < 2 * MAX_HELD_TOKENS * len(alike * 50)


def test_each_token_has_a_piece_also_of_bytes_that_are_no_text_and_of_a_stop_token(target):
    byte = {character: number for character, number in target.tokenizer.get_vocab().items() if len(character) == 1}
    broken = [byte["â"], byte["a"], byte["ÿ"], byte["b"], min(target.chat.stops)]
    assert target.chat.text(broken) == f"{LOST}a{LOST}b" and text_per_token(target.chat.text, broken)[-1] == ""
    whole = target.tokenizer("\u2028\né \ufffd €").input_ids
    random_bytes = random.Random(0).choices(sorted(byte.values()), k=2000)
    for tokens in (broken, whole, whole[:-1], [], random_bytes, [byte["ÿ"]] * (3 * MAX_HELD_TOKENS)):
        pieces = text_per_token(target.chat.text, tokens)
        assert "".join(pieces) == target.chat.text(tokens) and len(pieces) == len(tokens)
