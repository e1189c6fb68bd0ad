"""Ranges of numbers: read from the annotation, enforced before a function runs and by the parser, and named."""

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": 0}, "depth is 0; it must lie between 1 and 64"),
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
        ({"depth": "many"}, "depth is 'many'; it must be a valid integer"),
    ],
)
def test_a_number_outside_its_range_is_refused_by_name_in_calls_and_by_the_parser(options, words):
    with pytest.raises(ValueError) as caught:
        work(**options)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ArgumentError) as refused:  # which does not say where in a list or dict the number is
        check_options(work, options)
    name, _, rest = words.partition(" is ")
    assert str(refused.value).startswith(name.partition(".")[0]) and rest.split("; ")[1][:20] in str(refused.value)


def test_a_number_inside_its_range_is_taken():
    assert work(64) == work(64, 0) == work(64, 1e-6, [1], 0.25) == work(depth=64, runs=None, seed=True) == 64
    assert check_options(work, {"depth": 3, "weights": {"a": 1}})["weights"] == {"a": 1.0}
    assert work.__doc__ == "Does it." and list(inspect.signature(work).parameters)[:2] == ["depth", "heat"]


def has_plain_number(annotation) -> bool:
    """Whether an annotation has an int or a float without a range."""
    if get_origin(annotation) is Annotated:
        return not any(isinstance(each, Range) for each in get_args(annotation))
    return annotation in (int, float) or any(map(has_plain_number, get_args(annotation)))


TOOLS = [getattr(import_module(module), name) for name, (module, _) in cli.TOOLS.items()]


@pytest.mark.parametrize("owner", [*TOOLS, FeatureData, SpecialistTraining], ids=lambda owner: owner.__name__)
def test_every_number_that_people_give_has_a_range(owner):
    annotations = {name: each.annotation for name, each in inspect.signature(owner).parameters.items()}
    assert not any(map(has_plain_number, annotations.values()))
    assert annotations.get("seed", Seed) == Seed
    checked = hasattr(owner.__init__ if inspect.isclass(owner) else owner, "__wrapped__")
    wrapped = owner is not SpecialistTraining  # the hyperparameters of its subclasses allow no wrapper
    assert checked or not wrapped or not any(map(has_range, annotations.values()))


def test_a_module_and_a_config_refuse_numbers_of_their_dicts_and_sizes(target):
    with pytest.raises(ValueError, match=r"^loss.token is 1e\+300; it must lie"):
        SpecialistTraining("nowhere", [1], loss={"token": 1e300})
    config = tiny_draft(target, [1]).config
    for size in (0, 10**9):
        with pytest.raises(ValueError, match=f"^vocabulary_size is {size}; it must lie between 1 and"):
            replace(config, vocabulary_size=size)
    with pytest.raises(ValueError, match=r"^detach is 'yes'; it must be a valid boolean"):
        replace(config, detach="yes")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": {"loss": {"token": 1e300}}}, r"model.loss is 1e\+300; it must lie .*; it is set in .*a.yaml"),
        ({"seed_everything": -1}, "seed_everything is -1; it must lie .*; it is set in .*a.yaml"),
    ],
)
def test_the_file_of_a_number_is_named_when_a_training_is_parsed(tmp_path, options, words):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(options))
    with pytest.raises(ArgumentError, match=words):
        compose("draft/poss2.yaml", str(tmp_path / "a.yaml"))
