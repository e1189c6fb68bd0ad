"""Features from an engine: the store is that of `poss extract`. A stand-in writes what vLLM's workers would."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM

from poss_lightning import cli
from poss_lightning.features.shards import TargetReader
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.writing import write_store
from poss_lightning.serving.features import EngineReader, final_norm
from poss_lightning.shipped import CORPUS
from poss_lightning.target_model.model import Target
from tests.support.engines import NaiveEngine
from tests.support.families import FAMILIES, SIZE
from tests.support.stores import SIZES, contents, make_conversations
from tests.support.tiny import tiny_model, tiny_target, tiny_tokenizer
from tests.support.tolerance import LAYER, close

TEXTS = [[5, 7, 9], list(range(3, 40)), [8]]


def engine_reader(target: Target, layers: tuple[int, ...], *, folder: Path, model: Target | None = None, **options):
    """A reader over a stand-in that runs the target, or a different `model`."""
    return EngineReader(target, layers, lambda written: NaiveEngine(model or target, folder, written, **options))


@pytest.mark.parametrize("name", ["gemma2", "phi3, longrope"])
def test_features_and_layers_are_those_of_the_target(tmp_path, name):
    """The final norm of each family is found, a locked file waited for; layers come as asked for, one of them twice."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split(",")[0], **SIZE | FAMILIES[name])
    target = Target(AutoModelForCausalLM.from_config(config), tiny_tokenizer(), name)
    layers = (2, 1, 2)
    theirs = engine_reader(target, layers, folder=tmp_path, seconds=0.1).read(TEXTS)
    ours = TargetReader(target, layers).read(TEXTS)
    for their, our in zip(theirs, ours, strict=True):
        assert close(their, our, sums=3 * LAYER)
    assert not list(tmp_path.iterdir())  # the files are gone


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, "exact"), (torch.bfloat16, "float8")])
def test_the_store_is_that_of_the_target(tmp_path, dtype, stored):
    target = Target(tiny_model(num_hidden_layers=4).to(dtype), tiny_tokenizer(), "tiny")
    options = SIZES | {"stored": stored, "layers": (3, 1)}
    write_store(tmp_path / "ours", target, make_conversations(), **options)
    reader = partial(engine_reader, folder=tmp_path)
    write_store(tmp_path / "theirs", target, make_conversations(), **options, reader=reader)
    ours, theirs = FeatureStore(tmp_path / "ours"), FeatureStore(tmp_path / "theirs")
    assert contents(ours.folders[0]).keys() == contents(theirs.folders[0]).keys()
    assert (theirs.ids, theirs.layers, theirs.target) == (ours.ids, (3, 1), ours.target)
    rounding = {"exact": {"sums": 4 * LAYER}, "float8": {"dtype": torch.float8_e4m3fn}}[stored]
    for our, their in zip((ours[i] for i in range(len(ours))), (theirs[i] for i in range(len(theirs))), strict=True):
        assert their.tokens.equal(our.tokens) and their.spans == our.spans
        assert dtype == torch.bfloat16 or their.greedy.equal(our.greedy)
        assert close(their.features, our.features, **rounding) and close(their.layers, our.layers, **rounding)


BROKEN = [  # a file, and what is said of it
    (lambda file: save(file | {"hidden_states": file["hidden_states"].half()}), "they must be .* of torch.float32"),
    (lambda file: save(file | {"token_ids": file["token_ids"].flip(0)}), "gave the states of a different text"),
    (lambda file: save({"token_ids": file["token_ids"]}), "left no complete file of states at .*hidden_states"),
    (lambda file: save(file)[:-1], "left no complete file of states at .*incomplete"),
    (lambda file: None, "left no complete file of states at .*its log says why"),
]


def test_what_is_not_the_states_of_the_text_or_of_the_target_is_refused(target, tmp_path):
    """The probe passes, but no store is finished; nor does an engine start that counts layers from 0."""
    for change, words in BROKEN:

        def later(content, change=change):
            return save(content) if len(content["token_ids"]) == 24 else change(content)

        with pytest.raises(ValueError, match=words) as error:
            reader = partial(engine_reader, folder=tmp_path, made=later)
            write_store(tmp_path / "store", target, make_conversations(), **SIZES, layers=(1,), reader=reader)
        assert "\n" not in str(error.value) and not (tmp_path / "store" / "manifest.json").exists()
    with pytest.raises(ValueError, match=r"vLLM's features of a short text are not the target's \(relative distance"):
        engine_reader(target, (), folder=tmp_path, model=tiny_target(seed=1))
    with pytest.raises(ValueError, match="vLLM's layers of a short text are not the target's"):
        EngineReader(target, (1,), lambda written: NaiveEngine(target, tmp_path, (written[0] + 1, written[1])))
    other = tiny_target()
    read = other.text_features
    other.text_features = lambda tokens: 1 * read(tokens)
    with pytest.raises(NotImplementedError, match="target 'tiny' has no final norm:"):
        final_norm(other)


@pytest.mark.parametrize(
    ("options", "world", "words"),
    [
        (("--engine", "vllm"), "1", r"engine is 'vllm', which cannot be imported here \(.*\): pip install vllm"),
        (("--engine", "vllm"), "2", "engine is vllm in one of 2 processes"),
        (("--tensor_parallel", "2"), "1", "tensor_parallel is 2; it must be 1 without --engine vllm"),
    ],
)
def test_what_an_engine_needs_is_named(tiny_folder, tmp_path, monkeypatch, options, world, words):
    monkeypatch.setitem(sys.modules, "vllm", None)  # cannot be imported
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", world)):
        monkeypatch.setenv(name, value)
    given = [CORPUS, tmp_path / "store", "--target", tiny_folder, "--limit", "2", *options]
    with pytest.raises(ValueError, match=words):
        cli.run("extract", [*map(str, given)])
