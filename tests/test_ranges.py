"""Ranges of numbers: read from the annotation, enforced before a function runs and by the parser, and named."""

import inspect
import re
from argparse import ArgumentError
from importlib import import_module
from typing import Annotated, get_args, get_origin

import pytest

from poss_lightning import cli
from poss_lightning.configs import check_options
from poss_lightning.draft.config import DraftOptions
from poss_lightning.evaluation.options import DecodingOptions
from poss_lightning.features.datamodule import FeatureDataModule
from poss_lightning.ranges import Count, Position, Seed, Temperature, Weight, check_numbers, has_range
from poss_lightning.training.module import DraftModule


@check_numbers
def work(
    depth: Position = 64,
    heat: Temperature = 0.0,
    runs: list[Count] | None = None,
    weights: dict[str, Weight] | None = None,
    seed: Seed | bool = 0,
) -> int:
    return depth


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("depth", 0, "depth is 0; it must be greater than or equal to 1"),
        ("depth", "many", "depth is 'many'; it must be a valid integer"),
        ("heat", float("nan"), "heat is nan; it must be less than or equal to 1000000"),
        ("runs", [1, 0], "runs.1 is 0; it must be greater than or equal to 1"),
        ("weights", {"token": 1e300}, "weights.token is 1e+300; it must be less than or equal to 1000000000"),
    ],
)
def test_a_number_outside_its_range_is_refused_by_name_in_calls_and_by_the_parser(option, value, words):
    with pytest.raises(ValueError) as caught:
        work(**{option: value})
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ArgumentError) as refused:  # which does not say where in a list or dict the number is
        check_options(work, {option: value})
    assert str(refused.value).startswith(option) and words.split("; ")[1][:20] in str(refused.value)


def test_an_unknown_name_is_refused_with_the_one_that_was_meant():
    for call, words in (
        (lambda: work(deph=3), "work takes no deph; did you mean depth?"),  # pyright: ignore[reportCallIssue]
        (
            lambda: DraftModule(store="store", windw=2),
            "DraftOptions takes no windw; did you mean window?",
        ),
        (lambda: DraftModule(store="store", lr=1.0), "DraftOptions takes no lr; did you mean learning_rate?"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
            call()


def test_a_number_inside_its_range_is_taken():
    assert work() == work(64, 1e-6, [1], {"a": 1}) == work(depth=64, runs=None, seed=True) == 64
    assert check_options(work, {"depth": 3, "weights": {"a": 1}})["weights"] == {"a": 1.0}


def has_plain_number(annotation) -> bool:
    """Whether an annotation has an int or a float without a range."""
    if get_origin(annotation) is Annotated:
        return not has_range(annotation)
    return annotation in (int, float) or any(map(has_plain_number, get_args(annotation)))


TOOLS = [getattr(import_module(module), name) for name, (module, _) in cli.TOOLS.items()]


@pytest.mark.parametrize(
    "owner", [*TOOLS, DecodingOptions, DraftOptions, FeatureDataModule, DraftModule], ids=lambda owner: owner.__name__
)
def test_every_number_that_people_give_has_a_range(owner):
    annotations = {name: each.annotation for name, each in inspect.signature(owner).parameters.items()}
    assert not any(map(has_plain_number, annotations.values())) and annotations.get("seed", Seed) == Seed
    if any(map(has_range, annotations.values())) and owner not in (DecodingOptions, DraftOptions, DraftModule):
        # two check themselves, the hyperparameters of the other's subclasses allow no wrapper
        assert hasattr(owner.__init__ if inspect.isclass(owner) else owner, "__wrapped__")
