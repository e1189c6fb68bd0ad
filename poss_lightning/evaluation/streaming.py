"""Text while it is decoded: a letter split over tokens is held back until it is whole."""

from collections.abc import Callable

LOST = "\ufffd"  # what an unfinished letter decodes to
WINDOW = 64  # tokens that may be held back: what is broken for longer is said as it is


class Pieces:
    """Turns tokens into pieces of text; joined, they are the text of all tokens. Time is linear in the tokens.

    What a token says may depend on the one before it (the first word of a text loses its space). So new tokens are
    decoded behind those that came just before them, from one place where the text was whole to the next.

    Args:
        text: of a list of tokens.
    """

    def __init__(self, text: Callable[[list[int]], str]):
        self.text = text
        self.tokens: list[int] = []  # `known` that make up whole text, then those that came since
        self.known = 0
        self.said = ""  # of their text

    def add(self, tokens: list[int]) -> str:
        """What `tokens` make whole."""
        self.tokens += tokens
        text = self.text(self.tokens)
        whole = text if len(self.tokens) - self.known > WINDOW else text.rstrip(LOST)
        piece = whole[len(self.said) :]
        self.said += piece
        if whole == text:
            self.tokens = self.tokens[self.known :]
            self.known, self.said = len(self.tokens), self.text(self.tokens)
        return piece

    def rest(self) -> str:
        """What was held back, at the end."""
        return self.text(self.tokens)[len(self.said) :]
