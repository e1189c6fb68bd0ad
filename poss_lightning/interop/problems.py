"""What is wrong in the files of a published draft, as data: `poss convert` refuses it, `poss doctor` reads on."""

from typing import Any, NamedTuple

from torch import Tensor


class Problem(NamedTuple):
    """One thing that is wrong in a draft's files.

    Attributes:
        key: of config.json, or the name of a tensor.
        value: what the file has there: a value, or a tensor.
        allowed: what would be right, in words.
        repair: how the file is read nevertheless; "" where it cannot be.
        file: of the key; "" for tensors.
    """

    key: str
    value: Any
    allowed: str
    repair: str = ""
    file: str = "config.json: "

    def __str__(self) -> str:
        shape = f"{self.value.dtype} {[*self.value.shape]}" if isinstance(self.value, Tensor) else repr(self.value)
        shape = "missing" if self.value is None and not self.file else shape
        return f"{self.file}{self.key} is {shape}; {self.allowed}"


class ForeignDraft(ValueError):
    """A draft whose sizes are of a different target."""


class Checks:
    """Collects the problems of a draft's files while they are read."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def expect(self, holds: bool, key: str, value: Any, allowed: str, repair: str = "") -> bool:
        """Return whether a key of config.json is right; ValueError if it is not, and has no repair."""
        return self._note(holds, Problem(key, value, allowed, repair))

    def tensor(self, holds: bool, name: str, value: Tensor | None, allowed: str, repair: str = "") -> bool:
        """Return whether a tensor is right; ValueError if it is not, and has no repair."""
        return self._note(holds, Problem(name, value, allowed, repair, file=""))

    def _note(self, holds: bool, problem: Problem) -> bool:
        if not holds and not problem.repair:
            raise ValueError(problem)
        self.problems += [] if holds else [problem]
        return holds
