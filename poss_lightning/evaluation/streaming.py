"""Text while it is decoded: a letter split over several tokens is held back until its last token arrives."""

from collections.abc import Callable

LOST = "\ufffd"  # what an unfinished letter decodes to
WINDOW = 64  # most tokens held back; then a broken letter is given out as it is


class Pieces:
    """Turns tokens into pieces of text; joined, they are the text of all tokens. Time is linear in the tokens.

    The text of a token may depend on the token before it: the first word of a text loses its space. So new tokens are
    decoded together with the tokens just before them, from one place without a broken letter to the next.

    Args:
        text: decodes a list of tokens.
    """

    def __init__(self, text: Callable[[list[int]], str]):
        self.text = text
        self.tokens: list[int] = []  # `known` ones without a broken letter, then those added since
        self.known = 0
        self.emitted = ""  # the part of their text that was given out

    def add(self, tokens: list[int]) -> str:
        """Return the text that `tokens` complete."""
        self.tokens += tokens
        text = self.text(self.tokens)
        complete = text if len(self.tokens) - self.known > WINDOW else text.rstrip(LOST)
        piece = complete[len(self.emitted) :]
        self.emitted += piece
        if complete == text:
            self.tokens = self.tokens[self.known :]
            self.known, self.emitted = len(self.tokens), self.text(self.tokens)
        return piece

    def rest(self) -> str:
        """Return the text that is still held back, at the end."""
        return self.text(self.tokens)[len(self.emitted) :]


def pieces_of(text: Callable[[list[int]], str], tokens: list[int]) -> list[str]:
    """What each token adds to the text: a letter split over tokens belongs to its last; a stop token adds nothing."""
    pieces = Pieces(text)
    texts = [pieces.add([token]) for token in tokens]
    return [*texts[:-1], texts[-1] + pieces.rest()] if texts else []
