"""Ranges of numbers: read from the annotation, checked before a function runs and by the parser, and told by name."""

import inspect
from argparse import ArgumentError
from dataclasses import replace
from importlib import import_module
from typing import Annotated, get_args, get_origin

import pytest
import yaml

from poss_lightning import cli
from poss_lightning.configs import check_options
from poss_lightning.features.datamodule import FeatureData
from poss_lightning.ranges import Count, Fraction, Position, Range, Seed, Temperature, Weight, check_numbers, has_range
from poss_lightning.training.fit import compose
from poss_lightning.training.module import SpecialistTraining
from tests.support.tiny import tiny_draft


@check_numbers
def work(
    depth: Position,
    heat: Temperature = 0.0,
    runs: list[Count] | None = None,
    share: Fraction = 0.5,
    weights: dict[str, Weight] | None = None,
    pair: tuple[Fraction, Fraction] = (0.1, 0.2),
    seed: Seed | bool = 0,
) -> int:
    """Does it."""
    return depth


OUTSIDE = [
    ({"depth": 0}, "depth is 0; it must lie between 1 and 64 (no target accepts a longer path)"),
    ({"depth": 10**30}, f"depth is {10**30}; it must lie between 1 and 64"),
    ({"depth": True}, "depth is True; it must lie between 1 and 64"),
    ({"depth": 1, "heat": 1e-9}, "heat is 1e-09; it must be 0 (greedy) or lie between 1e-06 and 1000000"),
    ({"depth": 1, "heat": float("nan")}, "heat is nan; it must be 0 (greedy) or lie"),
    ({"depth": 1, "heat": float("inf")}, "heat is inf; it must be 0 (greedy) or lie"),
    ({"depth": 1, "runs": [1, 0]}, "runs.1 is 0; it must lie between 1 and 1,000,000,000"),
    ({"depth": 1, "share": 1.0}, "share is 1.0; it must lie between 1e-09 and 0.999999999"),
    ({"depth": 1, "weights": {"token": 1e300}}, "weights.token is 1e+300; it must lie between 0 and 1000000000"),
    ({"depth": 1, "pair": [0.1, 2.0]}, "pair.1 is 2.0; it must lie between"),
    ({"depth": 1, "seed": -1}, "seed is -1; it must lie between 0 and 4,294,967,295"),
    ({"depth": "many"}, "depth is 'many'; Input should be a valid integer"),
]


@pytest.mark.parametrize(("options", "words"), OUTSIDE)
def test_a_number_outside_is_told_with_its_range(options, words):
    with pytest.raises(ValueError) as caught:
        work(**options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "words"), OUTSIDE)
def test_the_parser_refuses_it_too(options, words):
    """Which does not say in which place of a list or dict it stands."""
    with pytest.raises(ArgumentError) as caught:
        check_options(work, options)
    name, _, rest = words.partition(" is ")
    assert str(caught.value).startswith(name.partition(".")[0]) and rest.split("; ")[1][:20] in str(caught.value)


def test_what_is_inside_goes_through():
    assert work(64) == work(64, 0) == work(64, 1e-6, [1], 0.25) == work(depth=64, runs=None, seed=True) == 64
    assert check_options(work, {"depth": 3, "weights": {"a": 1}})["weights"] == {"a": 1.0}
    assert work.__doc__ == "Does it." and list(inspect.signature(work).parameters)[:2] == ["depth", "heat"]


def plain_numbers(annotation) -> bool:
    """Whether an annotation has an int or a float without a range."""
    if get_origin(annotation) is Annotated:
        return not any(isinstance(each, Range) for each in get_args(annotation))
    return annotation in (int, float) or any(map(plain_numbers, get_args(annotation)))


TOOLS = [getattr(import_module(module), name) for name, (module, _) in cli.TOOLS.items()]


@pytest.mark.parametrize("owner", [*TOOLS, FeatureData, SpecialistTraining], ids=lambda owner: owner.__name__)
def test_every_number_that_people_give_has_a_range(owner):
    parameters = inspect.signature(owner).parameters
    ranged = {name for name, each in parameters.items() if not plain_numbers(each.annotation)}
    assert ranged == set(parameters)
    has_numbers = any(has_range(each.annotation) for each in parameters.values())
    checked = hasattr(owner.__init__ if inspect.isclass(owner) else owner, "__wrapped__")
    assert (
        checked or not has_numbers or owner is SpecialistTraining
    )  # whose subclasses' hyperparameters want no wrapper


def test_a_module_and_a_config_refuse_numbers_of_their_dicts_and_sizes(target):
    with pytest.raises(ValueError, match=r"^loss.token is 1e\+300; it must lie"):
        SpecialistTraining("nowhere", [1], loss={"token": 1e300})
    config = tiny_draft(target, [1]).config
    for size in (0, 10**9):
        with pytest.raises(ValueError, match=f"^vocabulary_size is {size}; it must lie between 1 and"):
            replace(config, vocabulary_size=size)
    with pytest.raises(ValueError, match=r"^detach is 'yes'; Input should be a valid boolean"):
        replace(config, detach="yes")


def test_seeds_are_alike_everywhere():
    for tool in TOOLS:
        if "seed" in (parameters := inspect.signature(tool).parameters):
            assert parameters["seed"].annotation == Seed


def test_the_file_of_a_number_is_named(tmp_path):
    """By what parses a training, so before anything is opened."""
    file = tmp_path / "a.yaml"
    for options, words in [
        ({"model": {"loss": {"token": 1e300}}}, r"model.loss is 1e\+300; it must lie .*; it stands in .*a.yaml"),
        ({"data": {"noise": -1}}, "data.noise is -1; it must lie .*; it stands in .*a.yaml"),
        ({"seed_everything": -1}, "seed_everything is -1; it must lie .*; it stands in .*a.yaml"),
    ]:
        file.write_text(yaml.safe_dump(options))
        with pytest.raises(ArgumentError, match=words):
            compose("draft/poss2.yaml", str(file))
