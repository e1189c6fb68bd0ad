"""What others wrote, as a terminal may show it: names, messages, and what models answer."""


def printable(text: str) -> str:
    """The text with its control characters spelt out, but for line ends and tabs: they might steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
