"""Real targets at their real sizes, without weights; and docs/reproduce.md, command by command."""

import runpy
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.sweep import Cell, Sweep
from poss_lightning.target_model.describe import spec_of
from poss_lightning.target_model.masks import layer_windows
from poss_lightning.training.start import check_reach
from tests.support.documents import ROOT, expanded, parsed, shell

FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"rope_scaling": SCALING | {"original_max_position_embeddings": 8192}}
PUBLISHED = {  # what sizes depend on in a config.json; and millions of all weights
    name: ({"tie_word_embeddings": False} | dict(zip(FIELDS, values, strict=True)) | more, millions)
    for name, values, more, millions in (
        ("llama-3-8b", ("llama", 4096, 14336, 32, 32, 8, 128256, 8192, 5e5, 1e-5), {}, 8030.3),
        ("llama-3.1-8b", ("llama", 4096, 14336, 32, 32, 8, 128256, 131072, 5e5, 1e-5), SCALED, 8030.3),
        ("llama-2-13b", ("llama", 5120, 13824, 40, 40, 40, 32000, 4096, 1e4, 1e-5), {}, 13015.9),
        ("qwen3-8b", ("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, 1e6, 1e-6), {"head_dim": 128}, 8190.7),
    )
}
TARGETS = {name: spec_of(AutoConfig.for_model(**given), name) for name, (given, _) in PUBLISHED.items()}
OTHERS = [pytest.param(name, marks=pytest.mark.nightly) for name in ("llama-3-8b", "qwen3-8b")]


def experiment(name: str) -> dict[str, Cell]:
    """The cells of a target's experiment by choice."""
    own = Sweep.load(ROOT / f"conf/reproduce/{name}.yaml")
    return {cell.choice: cell for cell in own.cells(Path(f"experiments/{name}"))}


def empty_draft(config: DraftConfig) -> DraftModel:
    """A draft whose parameters have shapes, but take no memory."""
    with torch.device("meta"):
        return make_draft(config, config.vocabulary_size and torch.arange(config.vocabulary_size, device="cpu"))


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# --- sizes ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_target_has_the_sizes_that_its_drafts_are_made_for(name):
    given, millions = PUBLISHED[name]
    spec, config = TARGETS[name], AutoConfig.for_model(**given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert round(count(model) / 1e6, 1) == millions
    ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert [tuple(end.shape) for end in ends] == [(spec.vocab_size, spec.hidden_size)] * 2
    assert (config.max_position_embeddings, config.rms_norm_eps) == (spec.context, spec.norm_eps)
    assert (config.rope_parameters["rope_theta"], config.num_hidden_layers) == (spec.rope_theta, spec.layers)
    layer_windows(config, spec.context)  # refuses layers that a tree cannot be read with

    layer = empty_draft(DraftConfig(target=spec, allocation=(1,), depth=1)).layers[0]
    theirs = {key.split(".")[-2]: value.shape for key, value in model.base_model.layers[0].state_dict().items()}
    theirs["norm"] = theirs["post_attention_layernorm"]
    ours = {key.removesuffix(".weight"): value.shape for key, value in layer.state_dict().items()}
    assert ours.items() <= theirs.items()
    assert (spec.heads, spec.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)


def config_of(model: dict, target: str) -> DraftConfig:
    """The config of a draft of an experiment."""
    own = {name: model[name] for name in ("allocation", "depth", "detach", "vocabulary_size", "kind", "kv")}
    return DraftConfig(target=TARGETS[target], **own)


@pytest.mark.parametrize("name", ["llama-2-13b", *OTHERS])
def test_the_drafts_of_a_target_s_experiment_train_every_specialist(name):
    for cell in experiment(name).values():
        check_reach(config_of(cell.training["model"], name))


def test_drafts_that_fuse_layers_have_the_sizes_counted_by_hand():
    """EAGLE-3 and SPEED on Llama-3.1-8B: D 4096, keys 1024 wide, an MLP of 14336, a head of 32,000 tokens."""
    layer = 8192 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 3 * 4096  # reads [e; h]; three norms
    around = 3 * 4096 * 4096 + 4096 + 32000 * 4096  # fc, the last norm, the head
    for cell in experiment("llama-3.1-8b-speed").values():
        config = config_of({"kv": "separate"} | cell.training["model"], "llama-3.1-8b")
        assert count(empty_draft(config)) == len(config.allocation) * layer + around
        check_reach(config)


def test_the_table_of_sizes_is_the_one_that_its_script_prints(capsys):
    runpy.run_path(str(ROOT / "docs/sizes.py"))
    assert capsys.readouterr().out in (ROOT / "docs/clusters.md").read_text()


# --- the documents ---

OUTPUTS = dict.fromkeys(("convert", "extract", "synthesize", "benchmark", "replay"), "out")
INPUTS = ("corpus", "store", "records", "runs", "run", "folder")  # options that name what must exist


@pytest.mark.parametrize("target", ["llama-3.1-8b", *OTHERS])
def test_every_command_to_reproduce_reads_what_exists(target, monkeypatch):
    """In order: what is in the checkout, or what an earlier command has written."""
    monkeypatch.chdir(ROOT)
    made, ran = set(), set()
    for text in expanded(shell(Path("docs/reproduce.md").read_text()), T=target):
        line = shlex.split(text)
        if line[0] == "torchrun":
            line = line[line.index("poss") :]
        if line[:2] == ["hf", "download"]:
            made.add(f"{line[line.index('--local-dir') + 1]}/{line[3]}")
        elif line[0] == "cp":
            made |= {line[2], str(Path(line[2]).parent)}
        elif line[0] == "poss":
            ran.add(line[1])
            given = parsed(line[1:])
            read = [given[name] for name in INPUTS if given.get(name)] + list((given.get("drafts") or {}).values())
            if line[1] == "sweep":
                cells = [*experiment(Path(given["folder"]).name).values()]
                made |= {str(place) for cell in cells for place in (cell.folder, cell.folder / "draft-last")}
                read += [store for cell in cells for store in (cell.training["data"]["store"], cell.options["store"])]
                starts = [cell.training["model"]["start_from"] for cell in cells]
                assert starts == [None] + [str(cells[0].folder / "draft-last")] * (len(cells) - 1)
                assert all(cell.configs[:2] == ["trainer/zero2.yaml", "published.yaml"] for cell in cells)
            for place in read:
                assert place in made or Path(place).exists(), f"{text}: nothing has written {place}"
            made.add(given.get(OUTPUTS.get(line[1])))
            if line[1] == "benchmark":  # the options of every file have arrived
                assert (given["nodes"], given["max_new_tokens"], len(given["suites"])) == (60, 1024, 6)
                assert given["depth"] == (8 if "speed" in given["out"] else 6) and given["target"] != "embedded"
    assert ran >= {*OUTPUTS, "sweep", "compare"} and f"experiments/{target}/choice=poss3/seed=0/draft-last" in made
