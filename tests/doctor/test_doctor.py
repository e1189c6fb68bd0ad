"""`poss doctor` names what is wrong with a draft, and nothing where nothing is."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.doctor.command import FOREIGN, NOTHING, _best
from poss_lightning.doctor.files import facts, load
from poss_lightning.doctor.measure import Counts, replayed, unrolled
from poss_lightning.doctor.texts import FROM_STORE, TargetAnswers
from poss_lightning.draft.kinds import load_draft, make_draft
from poss_lightning.draft.rope import Rope, RopeScaling
from poss_lightning.evaluation.replay import replay_rounds
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.features.writing import write_store
from poss_lightning.training.module import DraftModule
from tests.support.documents import ROOT, commands, shell
from tests.support.talks import SIZES, talks
from tests.support.tiny import tiny_target, write_target
from tests.support.tolerance import close

State = dict[str, Tensor]
HEALTHY = [  # family of the target, kind, how it has learnt, formats that its copies are written in and read as
    ("llama", "eagle2", {}, ["eagle eagle", "eagle hass"]),
    ("llama", "eagle2", {"allocation": (2, 1), "depth": 3}, ["poss poss"]),
    ("llama", "eagle3", {}, ["eagle3 eagle3", "speculators speculators", "vllm eagle3", "sglang eagle3"]),
    ("llama", "eagle3", {"fc_norm": True, "norm_output": True}, ["vllm eagle3"]),
    ("llama", "eagle3", {"allocation": (2, 1), "kv": "shared", "depth": 3}, ["vllm speed"]),
    ("llama", "block", {}, ["dflash dflash"]),
    ("qwen3", "eagle2", {}, []),
    ("qwen3", "eagle3", {}, ["eagle3 eagle3"]),
    ("qwen3", "block", {"block_layers": 2}, ["dflash dflash"]),
    ("olmo2", "eagle2", {}, ["eagle eagle"]),
    ("olmo2", "eagle3", {}, ["speculators speculators"]),
    ("olmo2", "block", {}, ["dflash dflash"]),
]


def planted(source: Path, folder: Path, other: Callable[[State], State] = dict, **config) -> Path:
    """A copy of a draft with other tensors, and with other fields of its config."""
    draft = load_draft(source)
    state = {name: value.clone() for name, value in draft.state_dict().items()}
    draft.load_state_dict(state | other(state))
    draft.config = replace(draft.config, **config)
    draft.save_pretrained(folder)
    return folder


def halves(*names: str) -> Callable[[State], State]:
    """The halves of these matrices exchanged."""
    return lambda state: {name: state[name].roll(state[name].shape[-1] // 2, -1) for name in names}


def by_head(order: list[int], *names: str) -> Callable[[State], State]:
    """Another order of the dimensions of each head."""
    return lambda state: {name: state[name].unflatten(0, (-1, 8))[:, order].flatten(0, 1) for name in names}


def exchanged(one: str, two: str) -> Callable[[State], State]:
    return lambda state: {one: state[two], two: state[one]}


def swapped_layers(state: State) -> State:
    """The last two exchanged."""
    last = max(int(name.split(".")[1]) for name in state if "layers" in name)
    order = str.maketrans({str(last): str(last - 1), str(last - 1): str(last)})
    return {name.translate(order): value for name, value in state.items() if "layers" in name}


def halfway(positions: Tensor) -> Rope:
    """The angles of heads of 8 of which half the dimensions rotate, at the base of 1e4."""
    angles = positions[:, None, :, None] * torch.tensor([1, 1e-2, 0, 0] * 2)
    return Rope(angles.cos(), angles.sin())


class Fault(NamedTuple):
    """What is wrong with a draft: how it has learnt, or what its files say."""

    kind: str
    words: str  # that name the cause
    state: Callable[[State], State] = dict
    config: dict[str, Any] = {}  # noqa: RUF012, not changed
    learnt: dict[str, Any] = {}  # noqa: RUF012, not changed
    family: str = ""  # of its target


INTERLEAVED, SHARE = [0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 4, 5, 2, 3, 6, 7]
QK, MLP = ("layers.0.q_proj.weight", "layers.0.k_proj.weight"), ("layers.0.gate_proj.weight", "layers.0.up_proj.weight")
INPUT = ("layers.0.q_proj.weight", "layers.0.k_proj.weight", "layers.0.v_proj.weight")
NORMS = ("layers.0.input_norm.weight", "layers.0.hidden_norm.weight")
LLAMA_3 = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
BASE, HIGHER = {"rope_theta": 50.0}, {"inner_layers": (3, 5, 6)}
ONE_HIGHER = "layer numbers -1, inner_layers [3, 5, 6] → [2, 4, 5]"
SHARED = {"allocation": (1, 2), "depth": 3, "kv": "shared"}
LINEAR = RopeScaling(factor=4.0, low_freq_factor=1e17, high_freq_factor=1e18, original_max_position_embeddings=1)
LONG, SHORT = {"depth": 7, "allocation": (7,)}, {"depth": 2, "allocation": (2,)}
FAULTS = [  # others are in the worked example and in `TWICE`
    Fault("eagle2", "labels one slot later", learnt={"labels": 1}),
    Fault("eagle2", "rotary pairs side by side", by_head(INTERLEAVED, *QK)),
    Fault("eagle2", "gate_proj and up_proj exchanged", exchanged(*MLP)),
    Fault("eagle2", "weights of norms less 1", lambda s: {"layers.0.norm.weight": s["layers.0.norm.weight"] - 1}),
    Fault("eagle2", "the feature before the norm", learnt={"before_norm": True}, family="llama"),
    Fault("eagle2", "embeddings times the root", learnt={"scale": 32**0.5}),
    Fault("eagle2", "the first 50% of a head", by_head(SHARE, *QK), learnt={"rope_at": halfway}),
    Fault("eagle2", "the target's scaling", dict, {"rope_scaling": None}, {"rope_scaling": LLAMA_3}, "llama, llama3"),
    Fault("eagle2", "thoughts off", learnt={"texts": "thoughts off"}, family="qwen3"),
    Fault("eagle3", "layer numbers +1, inner_layers [1, 3, 4] → [2, 4, 5]", config={"inner_layers": (1, 3, 4)}),
    Fault("eagle3", "layers from high to low, inner_layers [5, 4, 2] → [2, 4, 5]", config={"inner_layers": (5, 4, 2)}),
    Fault("eagle3", "feature before embedding", halves(*INPUT)),
    Fault("eagle3", "input_norm and hidden_norm exchanged", exchanged(*NORMS)),
    Fault("eagle3", "the target's rotary base, rope_theta 50.0 → 10000.0", config=BASE),
    Fault("eagle3", "labels one slot later", learnt={"labels": 1}),
    Fault("eagle3", "the first 50% of a head", by_head(SHARE, *QK), learnt={"rope_at": halfway}),
    Fault(
        "eagle3",
        "layer 2 of those that are fused, inner_layers [1, 3, 6] → [1, 4, 6]",
        config={"inner_layers": (1, 3, 6)},
        learnt={"inner_layers": (1, 4, 6)},
    ),
    Fault("eagle2", "layers.0 and layers.1 exchanged", swapped_layers, learnt={"allocation": (1, 2), "depth": 3}),
    Fault("eagle2", "k_proj and v_proj exchanged", exchanged("layers.0.k_proj.weight", "layers.0.v_proj.weight")),
    Fault("eagle2", "2 positions for each", config={"allocation": (1, 1)}, learnt={"allocation": (2, 2), "depth": 4}),
    Fault("eagle2", "layers.1 and layers.2 exchanged", swapped_layers, learnt={"allocation": (1, 1, 1), "depth": 3}),
    Fault("eagle3", "keys of the specialists, kv separate", config={"kv": "separate"}, learnt=SHARED),
    Fault("eagle3", "epsilon of norms, norm_eps 0.5", config={"norm_eps": 0.5}),
    Fault("eagle3", "hidden_norm and norm exchanged", exchanged("layers.0.hidden_norm.weight", "layers.0.norm.weight")),
    Fault(
        "eagle3", "linear scaling of rotary angles by 4", config={"rope_scaling": None}, learnt={"rope_scaling": LINEAR}
    ),
    Fault("eagle3", "rows of the head -1", lambda s: {"lm_head.weight": s["lm_head.weight"].roll(1, 0)}),
    Fault("eagle3", "queries times the root", lambda s: {QK[0]: s[QK[0]] / 8**0.5}),
    Fault("block", "context_norm and norm exchanged", exchanged("context_norm.weight", "norm.weight")),
    Fault("block", "a window of 4", config={"window": None}, learnt={"window": 4}),
    Fault("block", "mask token +1", lambda s: {"mask": s["mask"].roll(1)}, {"mask_token": 9}, {"mask_token": 10}),
    Fault("block", "layers in another order", config={"inner_layers": (4, 2, 5)}),
    Fault("block", "no window", config={"window": 4}),
    Fault("block", "last token as mask", lambda s: {"mask": s["mask"].roll(1)}, {"mask_token": 7}),
    Fault("block", "labels one slot later", learnt={"labels": 1}),
    Fault("block", "length of the block, allocation (7,)", dict, LONG, {"block_layers": 3}),
    Fault("block", "length of the block, allocation (2,)", dict, SHORT, {"block_layers": 3, "allocation": (6,)}),
]
USUAL = 1  # in `make test`, beside the worked example


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "kind", "how", "copies"), HEALTHY)
def test_a_healthy_draft_is_not_accused_nor_are_its_conversions(
    family, kind, how, copies, family_target, learnt, diagnose, convert, tmp_path
):
    target, folder = family_target(family)
    source = learnt(kind, target, **how)
    assert diagnose(source, target=target) == [NOTHING]
    for copy in copies:
        written, read = copy.split()
        convert(source, tmp_path / copy, "--output_format", written, target=folder)
        allocation = [*how["allocation"]] if "allocation" in how else [3] if read == "poss" else None
        assert diagnose(tmp_path / copy, read, allocation, target=target) == [NOTHING]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(each, marks=[pytest.mark.nightly] * (i >= USUAL), id=f"{each.kind} {each.words}")
        for i, each in enumerate(FAULTS)
    ],
)
def test_a_planted_fault_is_named_first(fault, deep, family_target, learnt, diagnose, tmp_path):
    target = family_target(fault.family)[0] if fault.family else deep
    draft = planted(learnt(fault.kind, target, **fault.learnt), tmp_path / "draft", fault.state, **fault.config)
    assert diagnose(draft, target=target)[0].startswith(fault.words)


@pytest.mark.parametrize(("third", "others", "is_named"), [(9, 5, False), (6, 7, True), (4, 7, True)])
def test_the_texts_that_choose_a_reading_do_not_test_it(third, others, is_named):
    """What is accepted of 10 chains in the texts that choose, 0, 3, 6 and 9, and in the others; 5 as the files say."""

    def measured(name: str, _, measure=unrolled, every: int = 1) -> Counts:
        accepted = np.where(np.arange(12) % 3, others, third)[::every, None] + np.arange(12)[::every, None] % 2 * 0.5
        return Counts(np.full_like(accepted, 10.0, float), accepted.astype(float))

    base = Counts(np.full((12, 1), 10.0), np.full((12, 1), 5.0))
    best = _best(SimpleNamespace(measured=measured), base, iter([SimpleNamespace(name="0")]), 4, 1)  # pyright: ignore
    assert (best is not None) == is_named


TWICE = [  # kind, words of both causes, tensors, config
    ("eagle3", (ONE_HIGHER, "norm_before_residual"), dict, HIGHER | {"norm_before_residual": True}),
    ("eagle2", ("feature before embedding", "the target's rotary base"), halves("fc.weight"), BASE),
    ("block", (ONE_HIGHER, "the target's rotary base"), dict, HIGHER | BASE),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "words", "other", "config"), TWICE)
def test_two_faults_are_found_one_after_the_other(kind, words, other, config, learnt, diagnose, tmp_path):
    first, second = sorted(diagnose(planted(learnt(kind), tmp_path / "draft", other, **config)))
    assert first.startswith(words[0]) and second.startswith(words[1])


def shuffled(state: State) -> State:
    return {
        name: value.flatten()[torch.randperm(value.numel())].view_as(value)
        for name, value in state.items()
        if value.ndim > 1
    }


@pytest.mark.nightly
def test_a_draft_of_another_target_or_none_is_not_accused_of_something_else(learnt, diagnose, tmp_path):
    assert diagnose(planted(learnt("eagle3"), tmp_path / "shuffled", shuffled)) == [FOREIGN]
    tokens_alone = planted(learnt("eagle3"), tmp_path / "fc", lambda state: shuffled({"fc.weight": state["fc.weight"]}))
    assert diagnose(tokens_alone) == [FOREIGN]
    assert diagnose(learnt("eagle2"), target=tiny_target(seed=1, num_hidden_layers=8)) == [FOREIGN]


def test_the_facts_of_a_healthy_draft_do_not_differ(deep, learnt, tmp_path):
    """Its config has an older fingerprint, which is half as long."""
    spec = load_draft(learnt("eagle3")).config.target
    older = planted(learnt("eagle3"), tmp_path / "older", target=replace(spec, fingerprint=spec.fingerprint[:16]))
    lines = facts(*load(str(older), "ours", None, deep))
    assert any(line.startswith("fingerprint") for line in lines) and not any(line.endswith("differs") for line in lines)


def test_a_draft_of_other_sizes_needs_no_forward_pass(learnt, examine, tmp_path):
    wide = write_target(tmp_path / "wide", hidden_size=64)
    printed = examine(learnt("eagle3"), target=wide).splitlines()
    assert printed[-2:] == [f"hidden_size is 32, and {wide} has 64", FOREIGN]


def test_the_first_steps_are_those_of_validation_and_replay(deep, learnt, texts_of, tmp_path):
    """To the digit, in the target's own answers and in texts of others: the same sums, and the same rounds."""
    folder, own = learnt("eagle3"), read_conversations(str(texts_of(deep).folder / "answers.jsonl"))
    write_store(tmp_path / "store", deep, [*own, *talks()[:8]], layers=(2, 4, 5), **SIZES)
    store = FeatureStore(tmp_path / "store")
    samples, draft = [store[i] for i in range(len(store))], load_draft(folder)
    reading, texts = load(str(folder), "ours", None, deep)[0], TargetAnswers(deep, tmp_path, FROM_STORE, 0, store, 20)
    training = DraftModule([3], str(tmp_path / "store"), kind="eagle3", depth=2, start_from=str(folder))
    training.validation_step(collate([[sample] for sample in samples]))
    validated, counts = training.val_metrics.acceptance, unrolled(reading, texts.samples())
    assert [each.sum(0).tolist() for each in counts] == [validated.reached.tolist(), validated.passed.tolist()]
    rounds = replay_rounds(draft, deep.embed_head, samples, TreePlan(3, 4, 1))
    accepted = [count for own in rounds for answer in own for count in answer]
    tau = replayed(reading, texts.samples()).tau().values[0]
    assert close(tau, 1 + sum(accepted) / len(accepted))


def test_the_worked_example_of_the_page_runs(learnt, examine, convert, deep_folder, tmp_path):
    """On a draft whose file names layers that are one too high; the draft that it writes reads the right ones."""
    high = planted(learnt("eagle3"), tmp_path / "high", inner_layers=(3, 5, 6))
    convert(high, tmp_path / "served", "--output_format", "vllm")
    (command,) = commands(shell((ROOT / "docs" / "doctor.md").read_text()), T=deep_folder)
    verb, draft, *words = command.words
    printed = examine(tmp_path / draft, *words)
    assert verb == "doctor" and "layer numbers -1, inner_layers [3, 5, 6] → [2, 4, 5]: position 1 from" in printed
    assert "for vllm: eagle_aux_hidden_state_layer_ids [3, 5, 6] → [2, 4, 5]" in printed
    print(printed)  # for the page, with `-s`
    fixed, healthy = (load_draft(each) for each in (tmp_path / "fixed", learnt("eagle3")))
    assert fixed.config.aux_layers == healthy.config.aux_layers
    state, own = fixed.state_dict(), healthy.state_dict()
    assert close(state.pop("fc.weight") * state.pop("scale"), own.pop("fc.weight") * own.pop("scale"))
    assert all(torch.equal(value, own[name]) for name, value in state.items())


def rewritten(folder: Path, tensors: Callable[[State], State] = dict, **config) -> Path:
    """A published file with other tensors and keys."""
    state, file = load_file(folder / "model.safetensors"), folder / "config.json"
    save_file(state | tensors(state), folder / "model.safetensors")
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.nightly
def test_what_convert_refuses_is_read_and_named(learnt, diagnose, convert, tmp_path):
    """A map of ids, which holds no offsets, in a draft of some tokens; layers that count from 0; a head of a draft."""
    draft, ids = load_draft(learnt("eagle3")), torch.arange(320)[torch.arange(320) % 4 > 0]
    small = make_draft(replace(draft.config, vocabulary_size=240), ids)
    state = draft.state_dict()
    small.load_state_dict(state | {"vocabulary": ids, "lm_head.weight": state["lm_head.weight"][ids]})
    small.save_pretrained(tmp_path / "small")
    convert(tmp_path / "small", tmp_path / "some", "--output_format", "eagle3")
    as_ids = rewritten(tmp_path / "some", lambda state: {"d2t": state["d2t"] + torch.arange(240)})
    (cause,) = diagnose(as_ids, "eagle3")
    assert cause.startswith("d2t is torch.int64 [240]") and cause.endswith("read as ids")
    zeros = rewritten(tmp_path / "some", lambda state: {"d2t": torch.zeros_like(state["d2t"])})
    assert [line.partition(":")[0][:25] for line in diagnose(zeros, "eagle3")] == [
        "t2d does not mark the 240",
        "the tokens that t2d marks",
    ]
    lost = rewritten(
        tmp_path / "some", lambda state: {"t2d": torch.zeros(320, dtype=torch.bool).index_fill(0, ids, True)}
    )
    state = load_file(lost / "model.safetensors")
    save_file({name: value for name, value in state.items() if name != "d2t"}, lost / "model.safetensors")
    assert diagnose(lost, "eagle3") == [
        "d2t is missing, and lm_head.weight has 240 rows for 320 tokens: ids are those of t2d"
    ]


KEY = "eagle_aux_hidden_state_layer_ids"
REFUSED = [  # kind, format, other keys of config.json, words of the cause and how it is read
    ("eagle3", "eagle3", {KEY: [1, 3, 4]}, f"config.json: {KEY} is [1, 3, 4]", "read as [2, 4, 5]"),
    ("eagle3", "eagle3", {KEY: [5, 4, 2]}, "it fuses layers [5, 4, 2]", "read as [2, 4, 5]"),
    ("eagle3", "eagle3", {"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu'", "ignored"),
    ("block", "dflash", {"block_size": 6}, "config.json: depth is 3; block_size says 5", "ignored"),
    ("block", "dflash", {"is_causal": True}, "config.json: is_causal is True", "ignored"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "form", "keys", "words", "read"), REFUSED)
def test_keys_that_convert_refuses_are_read_and_named(
    kind, form, keys, words, read, learnt, diagnose, convert, tmp_path
):
    convert(learnt(kind), tmp_path / "draft", "--output_format", form)
    first = diagnose(rewritten(tmp_path / "draft", **keys), form)[0]
    assert first.startswith(words) and first.endswith(f": {read}")


@pytest.mark.nightly
def test_a_switch_that_was_lost_is_known_by_its_tensors(learnt, diagnose, convert, tmp_path):
    convert(learnt("eagle3", fc_norm=True, norm_output=True), tmp_path / "draft", "--output_format", "vllm")
    (cause,) = diagnose(rewritten(tmp_path / "draft", fc_norm=False), "eagle3")
    assert cause.startswith("fc_norm.0.weight has no place") and cause.endswith("read with fc_norm")


@pytest.mark.nightly
def test_what_cannot_be_read_is_refused_with_its_file(learnt, diagnose, convert, examine, tmp_path):
    convert(learnt("eagle3"), tmp_path / "draft", "--output_format", "eagle3")
    with pytest.raises(ValueError, match=r"draft as eagle3: config.json: num_attention_heads is 8; a draft of ours"):
        diagnose(rewritten(tmp_path / "draft", num_attention_heads=8), "eagle3")
    with pytest.raises(ValueError, match="5 texts show nothing; give 6 or more"):
        examine(tmp_path / "draft", "--limit", 5)
