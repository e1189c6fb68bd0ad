"""The range of each number that people give, as aliases for annotations.

    @check_numbers
    def generate(prompt: str, *, depth: Position | None = None, seed: Seed = 0) -> None: ...

    depth is 65; it must lie between 1 and 64

pydantic enforces them, also within lists and dicts: for the command line's parser, before anything is loaded, and by
`check_numbers` in calls from Python.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; `zero` is what 0 means, where it is allowed beside them."""

    __module__ = "pydantic"  # by which jsonargparse tells what pydantic enforces

    least: float
    most: float
    zero: str = ""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(kind))

    def _check(self, given: Any, convert: Callable[[Any], float]) -> float:
        number = convert(given)
        inside = self.least <= number <= self.most or (bool(self.zero) and number == 0)
        if isinstance(given, bool) or not inside:
            zero = f"be 0 ({self.zero}) or " if self.zero else ""
            words = f"it must {zero}lie between {_format(self.least)} and {_format(self.most)}"
            raise PydanticCustomError("range", "{words}", {"words": words})
        return number

    def __repr__(self) -> str:  # as `--help` shows it
        return f"{'0 or ' if self.zero else ''}{_format(self.least)} to {_format(self.most)}"


def _format(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.10g}"


# --- whole numbers ---

Count = Annotated[int, Range(1, 10**9)]  # conversations, questions, steps
Seed = Annotated[int, Range(0, 2**32 - 1)]  # as numpy's generators take it
Tokens = Annotated[int, Range(1, 2**20)]  # of a text
BatchTokens = Annotated[int, Range(1, 2**24)]
Mebibytes = Annotated[int, Range(1, 2**20)]
Rows = Annotated[int, Range(1, 4096)]  # texts side by side, whose caches must fit the memory
POSITIONS = Range(1, 64)  # of a draft, all together: no target accepts a longer path
Position = Annotated[int, POSITIONS]  # and so a depth
Layer = Annotated[int, Range(1, 1024)]  # of a target
Lookups = Annotated[int, Range(0, 64)]  # tokens of a continuation
Nodes = Annotated[int, Range(1, 1024)]  # of a tree
TreeWidth = Annotated[int, Range(1, 64)]
Size = Annotated[int, Range(1, 2**24)]  # of a layer or a vocabulary
TopK = Annotated[int, Range(1, 2**24, zero="all tokens")]
Processes = Annotated[int, Range(1, 2**20)]
Workers = Annotated[int, Range(0, 1024)]

# --- others ---

Temperature = Annotated[float, Range(1e-6, 1e6, zero="greedy")]  # logits over it must be finite
TopP = Annotated[float, Range(1e-9, 1)]
ShareOrNone = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, 1 - 1e-9)]  # of a running mean
Weight = Annotated[float, Range(0, 1e9)]
Amount = Annotated[float, Range(1e-12, 1e18)]  # hours, GiB, tokens of a corpus


# --- how they are enforced ---


def check_numbers(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function raise ValueError, before it runs, for an argument outside the range in its annotation."""
    shape = signature(function)

    @wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        refuse_numbers(function, shape.bind(*args, **options).arguments)
        return function(*args, **options)

    return checked


def refuse_numbers(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first argument of a function, or field of a class, outside its range."""
    for name, parameter in signature(function).parameters.items():
        if name in values and has_range(parameter.annotation):
            _refuse(name, parameter.annotation, values[name])


def refuse_types(record: Any, owner: str = "") -> None:
    """Raise ValueError for the first field of a dataclass instance with a wrong type, as a file may hold one.

    `owner` says in the message whose field it is: "target's ".
    """
    for name, hint in get_type_hints(type(record), include_extras=True).items():
        _refuse(f"{owner}{name}", hint, getattr(record, name), strict=True)


def has_range(hint: Any) -> bool:
    """Whether a type has a range anywhere."""
    return isinstance(hint, Range) or any(map(has_range, get_args(hint)))


def describe_refusal(error: ValidationError, *name: str) -> str:
    """What pydantic refuses, in one line: where it is, its value, and what would be right."""
    found = error.errors()
    chosen = next((each for each in found if each["type"] == "range"), found[-1])  # of a union, the last is as good
    places = [str(place) for place in chosen["loc"] if len(found) == 1]
    value = chosen["input"] if chosen["type"] == "range" else reprlib.repr(chosen["input"])
    return f"{'.'.join([*name, *places])} is {value}; {chosen['msg'].replace('Input should be', 'it must be')}"


@cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint)


def _refuse(name: str, hint: Any, value: Any, strict: bool = False) -> None:
    try:
        _adapter(hint).validate_python(value, strict=strict)
    except ValidationError as error:
        raise ValueError(describe_refusal(error, name)) from None
