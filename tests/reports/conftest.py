"""Records and a sweep, made once; no test changes them."""

import pytest

from tests.support.lab import write_lab, write_run
from tests.support.synthetic import make_rows


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a benchmark of four methods."""
    folder = tmp_path_factory.mktemp("records") / "run"
    facts = {"plain": {}, "eagle": {"allocation": [6], "parameters": 1_234_567}, "poss-1": {"allocation": [1, 1]}}
    write_run(folder, make_rows(), {"methods": facts})
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The folder of a sweep of two choices with three seeds."""
    folder = tmp_path_factory.mktemp("lab") / "sweep"
    write_lab(folder)
    return folder
