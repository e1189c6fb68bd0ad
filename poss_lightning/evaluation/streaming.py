"""Text while it is decoded: a letter split over several tokens is held back until its last token arrives."""

from collections.abc import Callable

LOST = "\ufffd"  # what an unfinished letter decodes to
MAX_HELD_TOKENS = 64  # then a broken letter is given out as it is


class IncrementalDetokenizer:
    """Turns tokens into pieces of text; joined, they are the text of all tokens. Time is linear in the tokens.

    The text of a token may depend on the token before it: the first word of a text loses its space. So new tokens are
    decoded together with the tokens just before them, from one token without a broken letter to the next.

    Args:
        text: decodes a list of tokens.
    """

    def __init__(self, text: Callable[[list[int]], str]):
        self.text = text
        self.tokens: list[int] = []  # the first `complete` have no broken letter; then those added since
        self.complete = 0
        self.emitted = ""  # the part of their text that was given out

    def add(self, tokens: list[int]) -> str:
        """Return the text that `tokens` complete."""
        self.tokens += tokens
        text = self.text(self.tokens)
        whole = text if len(self.tokens) - self.complete > MAX_HELD_TOKENS else text.rstrip(LOST)
        piece = whole[len(self.emitted) :]
        self.emitted += piece
        if whole == text:
            self.tokens = self.tokens[self.complete :]
            self.complete, self.emitted = len(self.tokens), self.text(self.tokens)
        return piece

    def rest(self) -> str:
        """Return the text that is still held back, at the end."""
        return self.text(self.tokens)[len(self.emitted) :]


def text_per_token(text: Callable[[list[int]], str], tokens: list[int]) -> list[str]:
    """Return what each token adds: a letter split over tokens belongs to its last; a stop token adds nothing."""
    detokenizer = IncrementalDetokenizer(text)
    pieces = [detokenizer.add([token]) for token in tokens]
    return [*pieces[:-1], pieces[-1] + detokenizer.rest()] if pieces else []
