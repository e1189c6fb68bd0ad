"""The range of each number that people give, as aliases for annotations.

    @check_numbers
    def generate(prompt: str, *, depth: Position | None = None, seed: Seed = 0) -> None: ...

    depth is 65; it must be less than or equal to 64

pydantic enforces them, also within lists and dicts: for the command line's parser, before anything is loaded, and by
`check_numbers` in calls from Python.
"""

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Le
from pydantic import TypeAdapter, ValidationError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# --- whole numbers ---

Count = Annotated[int, Ge(1), Le(10**9)]  # conversations, questions, steps
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]  # as numpy's generators take it
Tokens = Annotated[int, Ge(1), Le(2**20)]  # of a text
BatchTokens = Annotated[int, Ge(1), Le(2**24)]
Mebibytes = Annotated[int, Ge(1), Le(2**20)]
Rows = Annotated[int, Ge(1), Le(4096)]  # texts side by side, whose caches must fit the memory
MAX_POSITIONS = 64  # of a draft, all together: no target accepts a longer path
Position = Annotated[int, Ge(1), Le(MAX_POSITIONS)]
Depth = Annotated[int, Ge(0), Le(MAX_POSITIONS)]  # of a tree; 0 drafts nothing
Layer = Annotated[int, Ge(1), Le(1024)]  # of a target
Lookups = Annotated[int, Ge(0), Le(64)]  # tokens of a continuation
Nodes = Annotated[int, Ge(1), Le(1024)]  # of a tree
TreeWidth = Annotated[int, Ge(1), Le(1024)]
Size = Annotated[int, Ge(1), Le(2**24)]  # of a layer or a vocabulary
TopK = Annotated[int, Ge(0), Le(2**24)]
Processes = Annotated[int, Ge(1), Le(2**20)]
Workers = Annotated[int, Ge(0), Le(1024)]

# --- others ---

Temperature = Annotated[float, Ge(0), Le(1e6)]
TopP = Annotated[float, Ge(1e-9), Le(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Le(1 - 1e-9)]  # of a running mean
Weight = Annotated[float, Ge(0), Le(1e9)]
PositiveFloat = Annotated[float, Ge(1e-12), Le(1e18)]


# --- how they are enforced ---


def check_numbers(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function raise ValueError, before it runs, for an argument outside the range in its annotation."""
    shape = signature(function)

    @wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        refuse_unknown(options, function)
        refuse_numbers(function, shape.bind(*args, **options).arguments)
        return function(*args, **options)

    return checked


def near(name: str, known: Iterable[str]) -> str:
    """Ask for the known name that was meant: the nearest, or that of which a part or the initials are given."""
    initials = {option: re.sub(r"([a-z])[a-z]*(_|$)", r"\1", option) for option in known}
    meant = [option for option, short in initials.items() if option.endswith(f".{name}") or short == name]
    meant = meant or get_close_matches(name, initials, 1)
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def refuse_unknown(options: Iterable[str], *owners: Callable[..., Any]) -> None:
    """Raise TypeError for the first option that none of some functions or classes takes, with the nearest one."""
    kinds = {name: parameter.kind for owner in owners for name, parameter in signature(owner).parameters.items()}
    takes_any = Parameter.VAR_KEYWORD in kinds.values() and len(owners) == 1
    for name in () if takes_any else options:
        if name not in kinds:
            raise TypeError(f"{owners[0].__name__} takes no {name}{near(name, kinds)}")


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
    return isinstance(hint, Ge) or any(map(has_range, get_args(hint)))


def describe_refusal(error: ValidationError, *name: str) -> str:
    """Return what pydantic refuses, in one line: where it is, its value, and what would be right."""
    first, *others = error.errors()
    same = [other["loc"] for other in (first, *others) if name or other["loc"][:1] == first["loc"][:1]]
    common = [str(parts[0]) for parts in zip(*same, strict=False) if len({*parts}) == 1]  # a union's end in a type
    where = ".".join([*name, *common])
    if first["type"] == "missing":
        return f"{where} is missing"
    allowed = first["msg"].replace("Input should be", "it must be")
    value = first["input"] if first["type"].endswith("_equal") else reprlib.repr(first["input"])  # a parser's is text
    return f"{where} is {value}; {allowed}"


@cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint)


def _refuse(name: str, hint: Any, value: Any, strict: bool = False) -> None:
    try:
        _adapter(hint).validate_python(value, strict=strict)
    except ValidationError as error:
        raise ValueError(describe_refusal(error, name)) from None
