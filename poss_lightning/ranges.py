"""The range of each number that people give, in one place; a number outside is refused before anything is loaded.

@check_numbers
def generate(prompt: str, *, depth: Position | None = None, seed: Seed = 0) -> None: ...

depth is 65; it must lie between 1 and 64
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from numbers import Real
from types import UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`.

    Args:
        least: of them.
        most: of them.
        reason: why no more, in words.
        zero: what 0 means, where it is allowed beside them.
    """

    least: float
    most: float
    reason: str = ""
    zero: str = ""

    def __contains__(self, number: Any) -> bool:
        return self.least <= number <= self.most or (bool(self.zero) and number == 0)

    def __str__(self) -> str:
        zero = f"be 0 ({self.zero}) or " if self.zero else ""
        return f"{zero}lie between {_spell(self.least)} and {_spell(self.most)}"

    def __repr__(self) -> str:  # as `--help` shows it
        return f"{'0 or ' if self.zero else ''}{_spell(self.least)} to {_spell(self.most)}"


# --- whole numbers ---

Count = Annotated[int, Range(1, 10**9)]  # conversations, questions, steps
CountOrNone = Annotated[int, Range(0, 10**9)]  # of what may be left out
Seed = Annotated[int, Range(0, 2**32 - 1, "as numpy's generators take it")]
Tokens = Annotated[int, Range(1, 2**20, "no target reads more")]  # of a text
BatchTokens = Annotated[int, Range(1, 2**24, "they must fit the memory")]
Mebibytes = Annotated[int, Range(1, 2**20)]
Rows = Annotated[int, Range(1, 4096, "their caches must fit the memory")]  # texts side by side
POSITIONS = Range(1, 64, "no target accepts a longer path")  # of a draft, all together
Position = Annotated[int, POSITIONS]  # and so a depth
Layer = Annotated[int, Range(1, 1024)]  # of a target
Nodes = Annotated[int, Range(1, 1024, "to verify more costs more than it brings")]  # of a tree
TreeWidth = Annotated[int, Range(1, 64, "unlikelier children are not accepted")]
Size = Annotated[int, Range(1, 2**24)]  # of a layer or a vocabulary
TopK = Annotated[int, Range(1, 2**24, zero="all tokens")]
Draws = Annotated[int, Range(1, 10**6)]  # of a bootstrap
Processes = Annotated[int, Range(1, 2**20)]
Workers = Annotated[int, Range(0, 1024)]

# --- others ---

Temperature = Annotated[float, Range(1e-6, 1e6, "logits over it must be finite", zero="greedy")]
TopP = Annotated[float, Range(1e-9, 1)]
Share = Annotated[float, Range(1e-9, 1)]  # of a whole, never none of it
ShareOrNone = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(1e-9, 1 - 1e-9)]  # never all of it
Decay = Annotated[float, Range(0, 1 - 1e-9)]  # of a running mean
Weight = Annotated[float, Range(0, 1e9)]
Amount = Annotated[float, Range(1e-12, 1e18)]  # hours, GiB, tokens of a corpus


def check_numbers(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, which now raises ValueError for an argument outside the range in its annotation, before it runs."""
    shape = signature(function)

    @wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        refuse_numbers(function, shape.bind(*args, **options).arguments)
        return function(*args, **options)

    return checked


def refuse_numbers(function: Callable[..., Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ValueError for the first of a function's arguments, or of a class' fields, outside its range.

    Args:
        function: whose annotations have the ranges.
        values: by name.
        prefix: of the names, as the user typed them.
    """
    for name, parameter in signature(function).parameters.items():
        for number, allowed in _outside(parameter.annotation, values.get(name)):
            reason = f" ({allowed.reason})" if allowed.reason else ""
            which = f"{number} must" if isinstance(values[name], list | tuple) else "it must"
            raise ValueError(f"{prefix}{name} is {reprlib.repr(values[name])}; {which} {allowed}{reason}")


def refuse_types(record: Any, owner: str = "") -> None:
    """Raise ValueError for the first field of a dataclass that has another type, as a file from elsewhere may have it.

    Args:
        record: the dataclass' instance.
        owner: whose field the message says it is, as "target's ".
    """
    for field, kind in get_type_hints(type(record)).items():
        value, kinds = getattr(record, field), get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        allowed = tuple(get_origin(each) or each for each in kinds) + ((int,) if float in kinds else ())
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " | ".join((get_origin(each) or each).__name__ for each in kinds).replace("NoneType", "None")
            raise ValueError(f"{owner}{field} is {value!r}; it must be of type {names}")


def _outside(annotation: Any, value: Any) -> Iterator[tuple[Any, Range]]:
    """The numbers of a value that are outside the range in its annotation, with that range."""
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        for allowed in inner[1:]:
            if isinstance(allowed, Range) and isinstance(value, Real) and value not in allowed:
                yield value, allowed
    elif isinstance(value, list | tuple):
        for item in value:
            for each in inner:
                yield from _outside(each, item)
    else:
        for each in inner:
            yield from _outside(each, value)


def _spell(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.10g}"
