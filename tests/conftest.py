"""A tiny random target, and drafts for it: everything a law needs, in milliseconds."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub's client: no test waits for a network

from pathlib import Path

import pytest
import torch
from tiny import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from poss_lightning import cli
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.target.model import Target

torch.set_num_threads(1)  # tiny matrices: threads only cost


def tiny_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A random Llama of two layers; its logits are spread enough to differ from token to token."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def tiny_target(seed: int = 0, **changes) -> Target:
    return Target(tiny_model(seed, **changes), tiny_tokenizer(), "tiny")


def tiny_draft(target: Target, allocation: list[int], seed: int = 0, **config) -> Specialists:
    """Random specialists, differing enough from each other that a wrong one shows."""
    torch.manual_seed(seed)
    depth = config.pop("depth", sum(allocation))
    draft = Specialists(DraftConfig(target=target.spec, allocation=tuple(allocation), depth=depth, **config))
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif draft.config.own_head:  # a norm's
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return draft


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """The tiny target as a local folder, as a user would name it on the command line."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def convert(tiny_folder):
    """`poss convert` for the tiny target, or a `target` given."""

    def run(*arguments: object, target: str | Path = tiny_folder) -> None:
        cli.run("convert", [*map(str, arguments), "--target", str(target)])

    return run
