"""`poss doctor` names what is wrong with a draft, and nothing where nothing is."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from poss_lightning.corpus.readers import read_conversations
from poss_lightning.decoding.plans import TreePlan
from poss_lightning.doctor import diagnosis, hypotheses
from poss_lightning.doctor.answers import ANSWERS, LONG, Answers
from poss_lightning.doctor.diagnosis import FOREIGN, NOTHING, Findings, Trial, confirm, describe_engine, report, screen
from poss_lightning.doctor.load import Fact, compare_facts, load
from poss_lightning.doctor.measure import replayed, unrolled
from poss_lightning.draft.config import RopeScaling
from poss_lightning.draft.kinds import load_draft, make_draft
from poss_lightning.draft.layer import Rope
from poss_lightning.evaluation.serving_metrics import Served
from poss_lightning.evaluation.stored_rounds import replay_rounds
from poss_lightning.features.store import FeatureStore
from poss_lightning.features.stream import collate
from poss_lightning.features.writing import write_store
from poss_lightning.reports.acceptance import Counts, compare
from poss_lightning.training.module import DraftModule
from tests.support.documents import ROOT, commands, shell
from tests.support.learnt import learnt_draft
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


def changed(how: Callable[[Tensor], Tensor], *names: str) -> Callable[[State], State]:
    return lambda state: {name: how(state[name]) for name in names}


def by_head(order: list[int]) -> Callable[[State], State]:
    """Another order of the dimensions of each head."""
    return changed(lambda rows: rows.unflatten(0, (-1, 8))[:, order].flatten(0, 1), *QK)


def halves(rows: Tensor) -> Tensor:
    return rows.roll(rows.shape[-1] // 2, -1)


def exchanged(one: str, two: str) -> Callable[[State], State]:
    """Two layers, or two tensors, in each other's place."""

    def exchange(state: State) -> State:
        whole = {name: f".{name}.".replace(f".{one}.", ".\0.").replace(f".{two}.", f".{one}.") for name in state}
        names = {name: other.replace("\0", two)[1:-1] for name, other in whole.items()}
        return {other: state[name] for name, other in names.items() if other in state}

    return exchange


def halfway(positions: Tensor) -> Rope:
    """The angles of heads of 8 of which half the dimensions rotate, at the base of 1e4."""
    angles = positions[:, None, :, None] * torch.tensor([1, 1e-2, 0, 0] * 2)
    return Rope(angles.cos(), angles.sin())


class Fault(NamedTuple):
    """What is wrong with a draft: how it has learnt, or what its files say."""

    kind: str
    words: str  # that each of the causes begins with, in any order
    state: Callable[[State], State] = dict
    config: dict[str, Any] = {}  # noqa: RUF012, not changed
    learnt: dict[str, Any] = {}  # noqa: RUF012, not changed
    family: str = ""  # of its target


INTERLEAVED, SHARE = [0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 4, 5, 2, 3, 6, 7]
Q, K, V = (f"layers.0.{name}_proj.weight" for name in "qkv")
QK, NORM, HEAD = (Q, K), "layers.0.norm.weight", "lm_head.weight"
WAVES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA_3, LINEAR = RopeScaling(factor=4.0, **WAVES), RopeScaling(factor=4.0, **hypotheses.LINEAR)
BASE, HIGHER, PLAIN = {"rope_theta": 50.0}, {"inner_layers": (3, 5, 6)}, {"rope_scaling": None}
ONE_HIGHER = "layer numbers -1, inner_layers [3, 5, 6] → [2, 4, 5]"
TWO, THREE = {"allocation": (1, 2), "depth": 3}, {"allocation": (1, 1, 1), "depth": 3}
LONGER, SHORTER = {"depth": 7, "allocation": (7,)}, {"depth": 2, "allocation": (2,)}
FAULTS = [  # the first in `make test`
    Fault("eagle2", "labels one slot later", learnt={"labels": 1}),
    Fault("eagle2", "rotary pairs side by side", by_head(INTERLEAVED)),
    Fault("eagle2", "gate_proj and up_proj exchanged", exchanged("gate_proj", "up_proj")),
    Fault("eagle2", "weights of norms less 1", changed(lambda weight: weight - 1, NORM)),
    Fault("eagle2", "embeddings times the root", learnt={"scale": 32**0.5}),
    Fault("eagle2", "the first 50% of a head", by_head(SHARE), learnt={"rope_at": halfway}),
    Fault("eagle2", "the target's scaling", dict, PLAIN, {"rope_scaling": LLAMA_3}, "llama, llama3"),
    Fault("eagle2", "thoughts off", learnt={"texts": "thoughts off"}, family="qwen3"),
    Fault("eagle3", "layer numbers +1, inner_layers [1, 3, 4] → [2, 4, 5]", config={"inner_layers": (1, 3, 4)}),
    Fault("eagle3", "layers from high to low, inner_layers [5, 4, 2] → [2, 4, 5]", config={"inner_layers": (5, 4, 2)}),
    Fault("eagle3", "feature before embedding", changed(halves, Q, K, V)),
    Fault("eagle3", "input_norm and hidden_norm exchanged", exchanged("input_norm", "hidden_norm")),
    Fault("eagle3", "the target's rotary base, rope_theta 50.0 → 10000.0", config=BASE),
    Fault("eagle3", "labels one slot later", learnt={"labels": 1}),
    Fault("eagle3", "the first 50% of a head", by_head(SHARE), learnt={"rope_at": halfway}),
    Fault(
        "eagle3",
        "layer 2 of those that are fused, inner_layers [1, 3, 6] → [1, 4, 6]",
        config={"inner_layers": (1, 3, 6)},
        learnt={"inner_layers": (1, 4, 6)},
    ),
    Fault("eagle2", "layers.0 and layers.1 exchanged", exchanged("layers.0", "layers.1"), learnt=TWO),
    Fault("eagle2", "k_proj and v_proj exchanged", exchanged("k_proj", "v_proj")),
    Fault("eagle2", "2 positions for each", config={"allocation": (1, 1)}, learnt={"allocation": (2, 2), "depth": 4}),
    Fault("eagle2", "layers.1 and layers.2 exchanged", exchanged("layers.1", "layers.2"), learnt=THREE),
    Fault("eagle3", "keys of the specialists, kv separate", config={"kv": "separate"}, learnt=TWO | {"kv": "shared"}),
    Fault("eagle3", "epsilon of norms, norm_eps 0.5", config={"norm_eps": 0.5}),
    Fault("eagle3", "hidden_norm and norm exchanged", exchanged("layers.0.hidden_norm", "layers.0.norm")),
    Fault("eagle3", "linear scaling of rotary angles by 4", config=PLAIN, learnt={"rope_scaling": LINEAR}),
    Fault("eagle3", "rows of the head -1", changed(lambda rows: rows.roll(1, 0), HEAD)),
    Fault("eagle3", "queries times the root", changed(lambda rows: rows / 8**0.5, Q)),
    Fault("block", "context_norm and norm exchanged", exchanged("context_norm", "norm")),
    Fault("block", "a window of 4", config={"window": None}, learnt={"window": 4}),
    Fault("block", "mask token +1", changed(lambda mask: mask.roll(1), "mask"), {"mask_token": 9}, {"mask_token": 10}),
    Fault("block", "layers in another order", config={"inner_layers": (4, 2, 5)}),
    Fault("block", "no window", config={"window": 4}),
    Fault("block", "last token as mask", changed(lambda mask: mask.roll(1), "mask"), {"mask_token": 7}),
    Fault("block", "labels one slot later", learnt={"labels": 1}),
    Fault("block", "length of the block, allocation (7,)", dict, LONGER, {"block_layers": 3}),
    Fault("block", "length of the block, allocation (2,)", dict, SHORTER, {"block_layers": 3, "allocation": (6,)}),
    # Two at once.
    Fault("eagle3", f"{ONE_HIGHER}|norm_before_residual", config=HIGHER | {"norm_before_residual": True}),
    Fault("eagle2", "feature before embedding|the target's rotary base", changed(halves, "fc.weight"), BASE),
    Fault("block", f"{ONE_HIGHER}|the target's rotary base", config=HIGHER | BASE),
    # As they happened: docs/doctor.md has the threads.
    Fault("eagle3", "norm_output, norm_output True → False", config={"norm_output": True}),
    Fault("eagle3", "the head reads un-normed states", learnt={"raw_head": True}),
    Fault("eagle2", "the feature before the norm", learnt={"before_norm": True}, family="llama"),
    Fault("eagle3", ONE_HIGHER, config=HIGHER),
    Fault("eagle3", "EAGLE-3's usual layers", config={"inner_layers": (2, 4, 7)}),
]


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
        pytest.param(each, marks=[pytest.mark.nightly] * (i > 0), id=f"{each.kind} {each.words}")
        for i, each in enumerate(FAULTS)
    ],
)
def test_a_planted_fault_is_named(fault, deep, family_target, learnt, diagnose, tmp_path):
    target = family_target(fault.family)[0] if fault.family else deep
    draft = planted(learnt(fault.kind, target, **fault.learnt), tmp_path / "draft", fault.state, **fault.config)
    causes, words = diagnose(draft, target=target), fault.words.split("|")
    assert all(any(cause.startswith(word) for cause in causes[: len(words)]) for word in words)


# --- screen and confirm, from figures alone ---


def accepted(of_ten: np.ndarray) -> Counts:
    """So many of 10 chains of each prompt."""
    return Counts(np.full((len(of_ten), 1), 10.0), of_ten[:, None].astype(float))


def trial(words: str, of_ten: np.ndarray, fact: str = "", place: int = 0) -> Trial:
    class Named(NamedTuple):
        description: tuple[str, ...]

    counts = accepted(of_ten + np.arange(len(of_ten)) % 2 * 0.5)
    assumption = hypotheses.Hypothesis(words, "all", lambda _: [], fact)
    return Trial(Named((words,)), assumption, counts, compare(counts, counts), place)  # pyright: ignore


@pytest.mark.parametrize(("third", "others", "is_named"), [(9, 5, False), (6, 7, True), (4, 7, True)])
def test_the_prompts_that_choose_a_variant_do_not_test_it(third, others, is_named):
    """What is accepted of 10 chains in the prompts that choose, 0, 3, 6 and 9, and in the others; 5 in the files."""
    held_out = np.arange(12) % 3 > 0
    trials = [trial("0", np.where(held_out, others, third))]
    assert bool(confirm(trials, accepted(np.full(12, 5)), held_out, [])) == is_named


@pytest.mark.parametrize(("differing", "names"), [([], ["scale", "epsilon"]), (["rms_norm_eps"], ["epsilon", "scale"])])
def test_of_equals_the_one_that_a_fact_explains_is_named_and_the_others_are_listed(differing, names):
    known = ("none", 5, ""), ("scale", 7, ""), ("epsilon", 7, "rms_norm_eps"), ("less", 6, "rms_norm_eps")
    best = screen([trial(words, np.full(12, n), fact) for words, n, fact in known])
    assert [each.variant.description[0] for each in best] == ["scale", "epsilon", "less", "none"]
    found = confirm(best, accepted(np.full(12, 5)), np.arange(12) > 3, differing)
    assert [each.variant.description[0] for each in found] == names


def test_of_equals_the_one_that_was_tried_first_is_named():
    best = [trial(words, np.full(12, n), place=place) for words, n, place in (("any", 7.1, 1), ("usual", 7, 0))]
    found = confirm(best, accepted(np.full(12, 5)), np.arange(12) > 3, [])
    assert [each.variant.description[0] for each in found] == ["usual", "any"]


@pytest.mark.parametrize(("blind", "misplaced", "reads"), [(1, 1, True), (1, 7, False), (7, 1, False)])
def test_a_draft_reads_its_target_if_zeros_and_another_place_of_the_text_give_less(blind, misplaced, reads):
    noise = np.arange(12) % 3 * 0.5
    case = Mock(measured=lambda name, *_: accepted({"blind": blind, "misplaced": misplaced}[name] + noise))
    assert diagnosis._reads_target(case, Mock(), accepted(7 + noise)) == reads


def test_where_nothing_is_found_what_differs_is_repeated(deep, learnt):
    found = load(str(learnt("eagle2")), "ours", None, deep)
    facts = Fact("rms_norm_eps", 0.5, 1e-6, "differs"), Fact("rope_theta", 1e4, 1e4, "ok")
    for known, words in ((facts, "; what differs: rms_norm_eps (0.5 for 1e-06)"), (facts[1:], "")):
        said = report(found, Findings(found, [], [], reads_target=True), [], known, 12)
        assert said == [f"{NOTHING}{words}; --limit 24 shows smaller faults"]


# --- the engine's counts by position ---

ENGINES = [  # rounds of an engine that passed each position, by answer, and what is said; replay's pos-acc: .8, .6, .4
    ([[1000, 790, 480, 190]], ""),
    ([[1000, 800, 180, 20]], "the files are right, the engine accepts less at positions ≥ 2: look at its feedback"),
    ([[1000, 12, 0]], "from position 1 on: look at the layers and norms"),
    ([[100 + i, 40, 20, 9] for i in range(9)], "from position 1 on"),
    ([[9, 6, 3, 1]], ""),  # too few rounds to tell
]


@pytest.mark.parametrize(("passed", "words"), ENGINES)
def test_an_engine_is_compared_by_position_with_what_its_counts_can_show(passed, words):
    rounds = 40 + np.arange(24) % 5
    expected = Counts(*(np.stack([rounds * share for share in own], 1) for own in ((1, 0.8, 0.48), (0.8, 0.48, 0.192))))
    noise = np.random.default_rng(0).normal(0, 0.01, expected.passed.shape) * expected.passed
    said = describe_engine(Served(1.0, passed), Counts(expected.reached, expected.passed + noise), True)
    assert words in said[0] if words else said == []


def test_an_engine_that_states_a_mean_alone_is_asked_for_more():
    chain = accepted(np.arange(12) % 3 + 5)
    assert "show where" in describe_engine(Served(1.2, []), chain, True)[0]
    assert describe_engine(Served(1.6, []), chain, True) == []


# --- what files say ---


def shuffled(state: State) -> State:
    return {
        name: value.flatten()[torch.randperm(value.numel())].view_as(value)
        for name, value in state.items()
        if value.ndim > 1
    }


@pytest.mark.nightly
def test_a_draft_of_another_target_or_none_is_not_accused_of_something_else(learnt, diagnose, tmp_path):
    assert diagnose(planted(learnt("eagle3"), tmp_path / "shuffled", shuffled)) == [FOREIGN]
    for kind in ("eagle3", "block"):
        only_fc = planted(learnt(kind), tmp_path / kind, lambda state: shuffled({"fc.weight": state["fc.weight"]}))
        assert diagnose(only_fc) == [FOREIGN]
    assert diagnose(learnt("eagle2"), target=tiny_target(seed=1, num_hidden_layers=8))[-1] == FOREIGN


def verdicts(draft: Path, target, form: str = "ours") -> dict[str, str]:
    found = load(str(draft), form, None, target)
    return {fact.name: fact.verdict for fact in compare_facts(found.stated, found.config, target)}


def test_the_facts_of_a_healthy_draft_do_not_differ(deep, learnt, convert, tmp_path):
    """Its config has an older fingerprint, which is half as long; published formats name no target."""
    spec = load_draft(learnt("eagle3")).config.target
    half = replace(spec, fingerprint=spec.fingerprint[:16])
    older = verdicts(planted(learnt("eagle3"), tmp_path / "older", target=half), deep)
    assert older["fingerprint"] == "ok" and "differs" not in older.values()
    convert(learnt("eagle3"), tmp_path / "published", "--output_format", "sglang")
    published = verdicts(tmp_path / "published", deep, "eagle3")
    assert (published["fingerprint"], published["template"]) == ("not said", "not said")
    tied = rewritten(tmp_path / "published", tie_word_embeddings=True)
    assert verdicts(tied, deep, "eagle3")["tie_word_embeddings"] == "differs"


def test_a_draft_of_other_sizes_needs_no_forward_pass(learnt, examine, tmp_path):
    wide = write_target(tmp_path / "wide", hidden_size=64)
    printed = examine(learnt("eagle3"), target=wide).splitlines()
    assert printed[-2:] == [f"config.json: hidden_size is 32; a draft for {wide} has 64", FOREIGN]


def test_the_first_steps_are_those_of_validation_and_replay(deep, learnt, texts_of, prompts, tmp_path):
    """To the digit, in the target's own answers and in texts of others: the same sums, and the same rounds."""
    folder, asked = learnt("eagle3"), [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    own = [
        {"messages": [{"role": "user", "content": asked[number]}, deep.chat.message(answer)]}
        for form, number, _, answer, _ in texts_of(deep).written
        if form == ANSWERS
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(each) + "\n" for each in own))
    texts = [*read_conversations(str(tmp_path / "own.jsonl")), *talks()[:8]]
    write_store(tmp_path / "store", deep, texts, layers=(2, 4, 5), **SIZES)
    store = FeatureStore(tmp_path / "store")
    samples, draft = [store[i] for i in range(len(store))], load_draft(folder)
    variant, texts = load(str(folder), "ours", None, deep), [*Answers(deep, [], store, len(store)).samples().values()]
    training = DraftModule([3], store=str(tmp_path / "store"), kind="eagle3", depth=2, start_from=str(folder))
    training.validation_step(collate([[sample] for sample in samples]))
    validated, counts = training.val_metrics.acceptance, unrolled(variant, texts)
    assert [each.sum(0).tolist() for each in counts] == [validated.reached.tolist(), validated.passed.tolist()]
    rounds = replay_rounds(draft, deep.embed_head, samples, TreePlan(3, 4, 1))
    accepted = [count for own in rounds for answer in own for count in answer]
    assert close(replayed(variant, texts).tau().value, 1 + sum(accepted) / len(accepted))


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
    """A published file with other tensors and keys; None removes a tensor."""
    state, file = load_file(folder / "model.safetensors"), folder / "config.json"
    state = {name: value for name, value in (state | tensors(state)).items() if value is not None}
    save_file(state, folder / "model.safetensors")
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


KEY, ROWS, IDS = "eagle_aux_hidden_state_layer_ids", torch.arange(240), torch.arange(320)[torch.arange(320) % 4 > 0]
PUBLISHED = [  # kind, how it has learnt, format, other tensors, other keys, how each cause begins and how it ends
    ("eagle3", {}, "eagle3", dict, {KEY: [1, 3, 4]}, [f"config.json: {KEY} is [1, 3, 4]"], "read as [2, 4, 5]"),
    ("eagle3", {}, "eagle3", dict, {KEY: [5, 4, 2]}, [f"config.json: {KEY} is [5, 4, 2]"], "read as [2, 4, 5]"),
    ("eagle3", {}, "eagle3", dict, {"hidden_act": "gelu"}, ["config.json: hidden_act is 'gelu'"], "ignored"),
    ("eagle3", {}, "eagle3", dict, {"rms_norm_eps": 0.5}, ["epsilon of norms, norm_eps 0.5"], ""),
    ("block", {}, "dflash", dict, {"block_size": 6}, ["config.json: depth is 3; block_size says 5"], "ignored"),
    ("block", {}, "dflash", dict, {"is_causal": True}, ["config.json: is_causal is True"], "ignored"),
    ("eagle3", {"fc_norm": True}, "vllm", dict, {"fc_norm": False}, ["fc_norm.0.weight is"], "read with fc_norm"),
    ("some", {}, "eagle3", lambda s: {"d2t": s["d2t"] + ROWS}, {}, ["d2t is torch.int64 [240]"], "read as ids"),
    ("some", {}, "eagle3", lambda s: {"d2t": 0 * ROWS}, {}, ["t2d is torch.bool", "the tokens that t2d marks"], ""),
    ("some", {}, "eagle3", lambda s: {"d2t": None}, {}, ["d2t is missing"], "read as the ids that t2d marks"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "how", "form", "tensors", "keys", "words", "end"), PUBLISHED)
def test_what_is_wrong_in_a_published_file_is_read_and_named(
    kind, how, form, tensors, keys, words, end, learnt, diagnose, convert, tmp_path
):
    """`some` is a draft of three quarters of the tokens."""
    source = learnt("eagle3" if kind == "some" else kind, **how)
    if kind == "some":
        draft = load_draft(source)
        small, state = make_draft(replace(draft.config, vocabulary_size=240), IDS), draft.state_dict()
        small.load_state_dict(state | {"vocabulary": IDS, HEAD: state[HEAD][IDS]})
        small.save_pretrained(source := tmp_path / "small")
    convert(source, tmp_path / "draft", "--output_format", form)
    causes = diagnose(rewritten(tmp_path / "draft", tensors, **keys), "dflash" if kind == "block" else "eagle3")
    assert len(causes) == len(words) and all(cause.startswith(each) for cause, each in zip(causes, words, strict=True))
    assert causes[0].endswith(end)


FIXED = [{"inner_layers": (4, 2, 5)}, {"norm_eps": 0.5}, {"inner_layers": (5, 4, 2), "rope_theta": 50.0}]


@pytest.mark.nightly
@pytest.mark.parametrize("config", FIXED)
def test_convert_accepts_what_was_fixed(config, learnt, examine, convert, tmp_path):
    examine(planted(learnt("eagle3"), tmp_path / "draft", **config), "--fix", "fixed")
    convert(tmp_path / "fixed", tmp_path / "served", "--output_format", "vllm")
    assert load_draft(tmp_path / "fixed").config.eps != 0.5


@pytest.mark.nightly
def test_long_text_shows_positions_that_an_engine_clamps_and_the_page_is_written(
    deep, texts_of, examine, convert, tmp_path
):
    """Of a draft that has learnt the answers, and the long text, whose every position it tells apart."""
    parts = [*texts_of(deep).samples(LONG).values()]
    joined = {name: torch.cat([getattr(each, name) for each in parts]) for name in ("tokens", "greedy", "layers")}
    samples = [*texts_of(deep).samples().values(), parts[0]._replace(**joined)]
    learnt_draft(deep, samples, "eagle3").save_pretrained(tmp_path / "long")
    convert(tmp_path / "long", tmp_path / "draft", "--output_format", "sglang")
    words = "--input_format", "eagle3", "--html", "page.html"
    printed = examine(rewritten(tmp_path / "draft", max_position_embeddings=64), *words)
    (losses,) = (line for line in printed.splitlines() if line.startswith("accepts less"))
    assert "teacher-forced, one long text, angles clamped" in losses
    assert "\nmax_position_embeddings 64 → " in printed and "temperature 1, drafts by argmax" in printed
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_what_cannot_be_read_is_refused_with_its_file(learnt, diagnose, convert, examine, tmp_path):
    convert(learnt("eagle3"), tmp_path / "draft", "--output_format", "eagle3")
    with pytest.raises(ValueError, match=r"draft as eagle3: config.json: num_attention_heads is 8; a draft of ours"):
        diagnose(rewritten(tmp_path / "draft", num_attention_heads=8), "eagle3")
    with pytest.raises(ValueError, match="5 texts show nothing; give 6 or more"):
        examine(tmp_path / "draft", "--limit", 5)
    with pytest.raises(FileNotFoundError, match=r"served is nowhere\.txt; there is no such file"):
        examine(tmp_path / "draft", "--served", "nowhere.txt")


def test_the_table_of_hypotheses_is_in_the_page():
    assert hypotheses.table() in (ROOT / "docs" / "doctor.md").read_text()
