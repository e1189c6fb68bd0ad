"""Plant faults in files of drafts for the embedded target, and see whether `poss doctor` names these and nothing else.

python experiments/doctor/plants.py runs/plants [PART OF A NAME ...]

The README says how to make the drafts and texts there. A line for each fault goes to FOLDER/plants.jsonl; those that
stand there are not run again.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from poss_lightning.doctor.answers import Answers
from poss_lightning.doctor.diagnosis import FORCED, FOREIGN, NOTHING, Case, find_causes, report
from poss_lightning.doctor.load import compare_facts, load
from poss_lightning.doctor.measure import unrolled
from poss_lightning.draft.kinds import load_draft, make_draft
from poss_lightning.features.store import FeatureStore
from poss_lightning.interop.convert import convert
from poss_lightning.target_model.model import Target
from poss_lightning.work import Work

TEXTS = 48
Config, State = dict[str, Any], dict[str, Tensor]
Plant = Callable[[Config, State], Any]
HALVES = torch.arange(64).view(2, -1).T.flatten()  # the order of a head's dimensions whose rotary pairs are neighbours
LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def say(**values: Any) -> Plant:
    """Other values of config.json, also of those that it nests; None removes one."""

    def plant(config: Config, _: State) -> None:
        nested = [value for value in config.values() if isinstance(value, dict)]
        for name, value in values.items():
            for own in [own for own in nested if name in own] or [config]:
                own |= {name: value}
                if value is None:
                    del own[name]

    return plant


def change(names: str, how: Callable[[Tensor], Tensor]) -> Plant:
    """Change the tensors whose names contain one of these words."""

    def plant(_: Config, state: State) -> None:
        found = [name for name in state if any(part in name for part in names.split())]
        assert found, names
        state.update({name: how(state[name]).contiguous() for name in found})

    return plant


def exchange(one: str, two: str) -> Plant:
    """Exchange the tensors that have one of two words in their names."""

    def plant(_: Config, state: State) -> None:
        own = dict(state)
        state.update({name.replace(one, two): own[name] for name in own if one in name})
        state.update({name.replace(two, one): own[name] for name in own if two in name})

    return plant


def both(*plants: Plant) -> Plant:
    return lambda config, state: [plant(config, state) for plant in plants]


def by_head(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (-1, 64))[:, HALVES].flatten(0, 1)


def halves(rows: Tensor) -> Tensor:
    return rows.roll(rows.shape[-1] // 2, -1)


def shuffled(value: Tensor) -> Tensor:
    return value.flatten()[torch.randperm(value.numel(), generator=torch.Generator().manual_seed(0))].view_as(value)


# fmt: off
EAGLE, POSS, EAGLE_3, BLOCK = "eagle", "poss", "eagle3", "dflash"  # formats of the files
QK, QKV = "q_proj k_proj", "q_proj k_proj v_proj"
LAYERS, POST = "eagle_aux_hidden_state_layer_ids", "post_attention_layernorm"
PLANTS: list[tuple[str, str, Plant, str]] = [  # format, what is wrong, how it is planted, how its causes begin
    (EAGLE, "nothing", say(), NOTHING),
    (EAGLE, "rotary base 500", say(rope_theta=500.0), "the target's rotary base"),
    (EAGLE, "llama3 scaling", say(rope_scaling=LLAMA_3 | {"original_max_position_embeddings": 64}), "no scaling"),
    (EAGLE, "rotary pairs side by side", change(QK, by_head), "rotary pairs side by side"),
    (EAGLE, "fc's halves exchanged", change("fc.weight", halves), "feature before embedding"),
    (EAGLE, "gate and up exchanged", exchange("gate_proj", "up_proj"), "gate_proj and up_proj exchanged"),
    (EAGLE, "keys and values exchanged", exchange("k_proj", "v_proj"), "k_proj and v_proj exchanged"),
    (EAGLE, "norms less 1", change(POST, lambda weight: weight - 1), "weights of norms less 1"),
    (EAGLE, "embeddings too small", change("embed_tokens", lambda rows: rows / 24), "embed_tokens.weight"),
    (EAGLE, "halves and base", both(change("fc.weight", halves), say(rope_theta=500.0)),
     "feature before embedding|the target's rotary base"),
    (POSS, "nothing", say(), NOTHING),
    (POSS, "rotary base 500", say(rope_theta=500.0), "the target's rotary base"),
    (POSS, "specialists exchanged", exchange("layers.0", "layers.1"), "layers.0 and layers.1 exchanged"),
    (EAGLE_3, "nothing", say(), NOTHING),
    (EAGLE_3, "layers one too high", say(**{LAYERS: [3, 16, 28]}), "layer numbers -1"),
    (EAGLE_3, "layers one too low", say(**{LAYERS: [1, 14, 26]}), "config.json: eagle_aux"),
    (EAGLE_3, "layers from high to low", say(**{LAYERS: [27, 15, 2]}), "config.json: eagle_aux"),
    (EAGLE_3, "the last layer is another", say(**{LAYERS: [2, 15, 29]}), "EAGLE-3's usual layers"),
    (EAGLE_3, "rotary base 500", say(rope_theta=500.0), "the target's rotary base"),
    (EAGLE_3, "rotary base left out", say(rope_theta=None), "the target's rotary base"),
    (EAGLE_3, "rotary pairs side by side", change(QK, by_head), "rotary pairs side by side"),
    (EAGLE_3, "norm before the residual", say(norm_before_residual=True), "norm_before_residual"),
    (EAGLE_3, "inputs exchanged", change(QKV, halves), "feature before embedding"),
    (EAGLE_3, "input norms exchanged", exchange("input_layernorm", "hidden_norm"), "input_norm and hidden_norm"),
    (EAGLE_3, "fc's inputs exchanged", change("fc.weight", lambda rows: rows.roll(576, -1)), "layers in another"),
    (EAGLE_3, "d2t holds ids", change("d2t", lambda ids: ids + torch.arange(len(ids))), "d2t"),
    (EAGLE_3, "gate and up exchanged", exchange("gate_proj", "up_proj"), "gate_proj and up_proj exchanged"),
    (EAGLE_3, "layers and norm", say(**{LAYERS: [3, 16, 28], "norm_before_residual": True}),
     "layer numbers -1|norm_before_residual"),
    (BLOCK, "nothing", say(), NOTHING),
    (BLOCK, "layers one too high", say(target_layer_ids=[2, 15, 27]), "layer numbers -1"),
    (BLOCK, "layers from high to low", say(target_layer_ids=[26, 14, 1]), "config.json: target_layer_ids"),
    (BLOCK, "rotary base 500", say(rope_theta=500.0), "the target's rotary base"),
    (BLOCK, "rotary pairs side by side", change(QK, by_head), "rotary pairs side by side"),
    (BLOCK, "a block of 8 for 6", say(block_size=8), "length of the block"),
    (BLOCK, "a block of 4 for 6", say(block_size=4), "length of the block"),
    (BLOCK, "another token as mask", say(mask_token_id=5), "last token as mask"),
    (BLOCK, "a window of 8", say(layer_types=["sliding_attention"] * 2, sliding_window=8), "config.json: layer_types"),
    (BLOCK, "layers exchanged", exchange("layers.0", "layers.1"), "layers.0 and layers.1 exchanged"),
    (BLOCK, "layers and base", say(target_layer_ids=[2, 15, 27], rope_theta=500.0),
     "layer numbers -1|the target's rotary base"),
    (EAGLE, "shuffled", change("fc.weight", shuffled), FOREIGN),
    (EAGLE_3, "shuffled", change("fc.weight", shuffled), FOREIGN),
    (BLOCK, "shuffled", change("fc.weight", shuffled), FOREIGN),
]
# fmt: on


def plant_in(source: Path, folder: Path, plant: Plant) -> Path:
    """Copy a published draft with a fault in it."""
    if source != folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    plant(config, state)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def publish(source: str, folder: Path, output_format: str) -> Path:
    """Write a draft of ours in a published format, which may have no vocabulary of its own."""
    if not folder.exists():
        draft = load_draft(source)
        if not draft.config.own_head:
            state = {name: value for name, value in draft.state_dict().items() if name != "vocabulary"}
            draft = make_draft(replace(draft.config, vocabulary_size=None))
            draft.load_state_dict(state, strict=False)  # as it comes, its vocabulary holds all tokens
        with TemporaryDirectory() as own:
            draft.save_pretrained(own)
            convert(own, str(folder), output_format=output_format)
        plant_in(folder, folder, say(poss_lightning=None))  # which no draft of others has
    return folder


def main(runs: str, *parts: str) -> None:
    """Write what is named for each fault, in the order of the parts."""
    target, file = Target.load("embedded"), Path(runs, "plants.jsonl")
    sources = {EAGLE: "embedded-hass", POSS: "embedded-poss2"}
    sources |= {EAGLE_3: f"{runs}/eagle3/draft-last", BLOCK: f"{runs}/block/draft-last"}
    texts = Answers(target, [], FeatureStore(f"{runs}/texts"), TEXTS)
    chosen = [each for part in parts or [""] for each in PLANTS if part in f"{each[0]} {each[1]}"]
    for kind, name, plant, words in tqdm(chosen, unit="fault"):
        done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if any((each["format"], each["fault"]) == (kind, name) for each in done):
            continue
        folder = Path(runs, "faults", f"{kind}-{name}".replace(" ", "-"))
        plant_in(publish(sources[kind], Path(runs, "published", kind), kind), folder, plant)
        found = load(str(folder), kind, [2, 2, 2] if kind == POSS else None, target)
        facts, case = compare_facts(found.stated, found.config, target), Case(Work(folder / "measured"), texts)
        lines = report(found, find_causes(case, found, facts), [], facts, TEXTS)
        causes = [line for line in lines if not line.startswith("config.json for")]
        expected = words.split("|")
        named = len(causes) == len(expected) and all(sum(c.startswith(w) for c in causes) == 1 for w in expected)
        tau = round(case.measured(FORCED, found, unrolled).tau().value, 3)  # what `poss convert` takes, accepts
        result = {"format": kind, "fault": name, "tau": tau, "named": named, "causes": causes}
        with file.open("a") as written:
            written.write(json.dumps(result, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
