"""Ranges of numbers: read from the annotation, checked before a function runs, and told by name."""

import inspect
from importlib import import_module
from typing import Annotated, get_args, get_origin

import pytest

from poss_lightning import cli
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.ranges import Count, Fraction, Position, Range, Seed, Temperature, check_numbers, refuse_numbers
from poss_lightning.training.module import SpecialistTraining


@check_numbers
def work(depth: Position, heat: Temperature = 0.0, runs: list[Count] | None = None, share: Fraction = 0.5) -> int:
    """Does it."""
    return depth


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 0}, "depth is 0; it must lie between 1 and 64 (no target accepts a longer path)"),
        ({"depth": 10**30}, f"depth is {10**30}; it must lie between 1 and 64"),
        ({"depth": 1, "heat": 1e-9}, "heat is 1e-09; it must be 0 (greedy) or lie between 1e-06 and 1000000"),
        ({"depth": 1, "heat": float("nan")}, "heat is nan; it must be 0 (greedy) or lie"),
        ({"depth": 1, "runs": [1, 0]}, "runs is [1, 0]; 0 must lie between 1 and 1,000,000,000"),
        ({"depth": 1, "share": 1.0}, "share is 1.0; it must lie between 1e-09 and 0.999999999"),
    ],
)
def test_a_number_outside_is_told_with_its_range(options, words):
    with pytest.raises(ValueError) as caught:
        work(**options)
    assert words in str(caught.value)


def test_what_is_inside_goes_through():
    assert work(64) == work(64, 0) == work(64, 1e-6, [1], 0.25) == work(depth=64, runs=None) == 64
    assert work.__doc__ == "Does it." and list(inspect.signature(work).parameters) == ["depth", "heat", "runs", "share"]
    refuse_numbers(work, {"depth": "no number"})  # its type is somebody else's to check


def plain_numbers(annotation) -> bool:
    """Whether an annotation has an int or a float without a range."""
    if get_origin(annotation) is Annotated:
        return not any(isinstance(each, Range) for each in get_args(annotation))
    return annotation in (int, float) or any(map(plain_numbers, get_args(annotation)))


def has_range(annotation) -> bool:
    """Whether an annotation has a range anywhere."""
    return isinstance(annotation, Range) or any(map(has_range, get_args(annotation)))


TOOLS = [getattr(import_module(module), name) for name, (module, _) in cli.TOOLS.items()]


@pytest.mark.parametrize("owner", [*TOOLS, FeatureData, SpecialistTraining], ids=lambda owner: owner.__name__)
def test_every_number_that_people_give_has_a_range(owner):
    parameters = inspect.signature(owner).parameters
    ranged = {name for name, each in parameters.items() if not plain_numbers(each.annotation)}
    assert ranged == set(parameters)
    has_numbers = any(has_range(each.annotation) for each in parameters.values())
    checked = hasattr(owner.__init__ if inspect.isclass(owner) else owner, "__wrapped__")
    assert checked or not has_numbers


def test_seeds_are_alike_everywhere():
    for tool in TOOLS:
        if "seed" in (parameters := inspect.signature(tool).parameters):
            assert parameters["seed"].annotation == Seed
