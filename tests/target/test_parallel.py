"""A target on several devices, or divided among processes, is the same target: store, tokens, drafts, trainings.

none       one process and one device, with which all others are compared
tensors    two CPU ranks over gloo: rank 0 runs the commands, rank 1 follows
layers     accelerate's hooks around every module, on the one device that there is
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file

from poss_lightning import cli
from poss_lightning.decoding.autoregressive import Generate
from poss_lightning.decoding.engine import Speculative
from poss_lightning.decoding.trees import ancestor_mask
from poss_lightning.features.store import FeatureStore
from poss_lightning.target import followers, placement
from poss_lightning.target.generation import generate, prefill
from poss_lightning.target.model import Target, causal_ancestors
from poss_lightning.target.placement import SpreadStore, weight_bytes
from tests.support.processes import forked, printed
from tests.support.stores import make_conversations
from tests.support.tiny import tiny_draft, tiny_model, tiny_target, tiny_tokenizer
from tests.support.trees import random_tree

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12]]
STOPS = frozenset([1])
SHORT = ("--dtype", "float32", "--device", "cpu")


# --- divided among processes ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target of seven layers, and what one process and two ranks make with it."""
    folder = tmp_path_factory.mktemp("parallel")
    for name, tied in (("target", False), ("tied", True)):
        tiny_model(num_hidden_layers=7, tie_word_embeddings=tied).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    lines = [json.dumps({"messages": c.messages}) + "\n" for c in make_conversations()]
    (folder / "corpus.jsonl").write_text("".join(lines))
    (folder / "prompts.jsonl").write_text('{"id": "a", "turns": ["four legs"]}\n{"id": "b", "turns": ["a horse"]}\n')
    tiny_draft(Target.load(str(folder / "target"), "float32", "cpu"), [2, 1]).save_pretrained(folder / "draft")
    run_commands(folder, "none")
    assert forked(folder / "log", 2, run_commands, folder, "tensors") == [0, 0], printed(folder / "log")
    return folder


def run_commands(folder: Path, parallel: str) -> None:
    """Every command that loads a target; those of rank 1 get no further than that."""
    out, ends, rank = folder / parallel, [], os.environ.get("RANK", "0")
    if parallel == "tensors":  # here a process has several targets, and lets the others go behind each of them
        followers.atexit = SimpleNamespace(register=ends.append)
    common = ("--target", str(folder / "target"), "--parallel", parallel, *SHORT)
    suites = ("--suites", str([str(folder / "prompts.jsonl")]), "--max_new_tokens", "12")
    drafts = ("--drafts.tiny", str(folder / "draft"), "--baselines", "[autoregressive, generate, lookup]")
    for command, *arguments in (
        ("extract", folder / "corpus.jsonl", out / "store", "--max_length", "60", "--layers", "[2, 3, 4]"),
        ("answer", out / "answers.jsonl", *suites),
        ("synthesize", out / "texts.jsonl", "--conversations", "3", "--user_tokens", "8", "--answer_tokens", "8"),
        ("benchmark", out / "greedy", *suites, *drafts),
        (
            "benchmark",
            out / "sampled",
            *suites,
            "--drafts.tiny",
            folder / "draft",
            "--temperature",
            "1",
            "--tree",
            "auto",
        ),
        ("generate", "four legs", "--draft", folder / "draft", "--max_new_tokens", "12"),
        ("extract", folder / "corpus.jsonl", out / "tied", "--target", folder / "tied", "--max_length", "60"),
        ("keep", out / "features.pt"),
    ):
        try:
            if command == "keep":
                torch.save(keep_a_path(Target.load(str(folder / "target"), "float32", "cpu", parallel)), arguments[0])
            else:
                cli.run(command, [*common, *map(str, arguments)])
            assert rank == "0"
        except SystemExit:
            assert rank == "1"
        if ends:
            ends.pop()()


def keep_a_path(target: Target) -> torch.Tensor:
    """Features behind a tree of which each row keeps a path, and of three rows two: what a round may do to a cache."""
    cache, _, _ = prefill(target, PROMPTS, 20)
    rows = [random_tree(seed, nodes=9, vocabulary=300) for seed in range(3)]
    above = ancestor_mask(torch.tensor([up for _, up in rows]), 9)
    target.tree_features(torch.tensor([tokens for tokens, _ in rows]), above, cache)
    paths = [above[row, 8].nonzero().flatten() for row in range(3)]
    counts = torch.tensor([len(path) for path in paths])
    cache.keep_path(torch.nn.utils.rnn.pad_sequence(paths, batch_first=True), counts)
    cache.slots.advance_host(counts.tolist())
    cache.select([0, 2])
    assert min(counts) > 2
    return target.tree_features(torch.tensor([[20, 21], [22, 23]]), causal_ancestors(2, target.device), cache)


def test_after_an_error_of_rank_0_alone_nothing_is_sent_to_ranks_that_no_longer_listen(monkeypatch):
    """They may wait for its part of a sum, and the end would wait for them, for days."""

    class Fails:
        def forward(self, inputs, place):
            raise torch.OutOfMemoryError("out of memory")

    sent, ends = [], []
    monkeypatch.setattr(followers, "atexit", SimpleNamespace(register=ends.append))
    monkeypatch.setattr(followers.Leader, "_send", lambda leader, message: sent.append(message))
    leader = followers.Leader(Fails(), torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        leader.forward(None, input_ids=torch.ones(1, 1))
    ends.pop()()
    assert [message[0] for message in sent] == ["forward"]


@pytest.mark.parametrize("name", ["store", "tied"])
def test_the_store_is_that_of_one_process_to_rounding(folder, name):
    one, two = (FeatureStore(folder / parallel / name) for parallel in ("none", "tensors"))
    assert one.target.difference(two.target) is None  # the fingerprint too
    assert one.ids == two.ids
    for ours, theirs in ((one[i], two[i]) for i in range(len(one))):
        assert ours.tokens.equal(theirs.tokens) and ours.greedy.equal(theirs.greedy)
        for a, b in ((ours.features, theirs.features), (ours.layers, theirs.layers)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert one.embed_head().embedding.equal(two.embed_head().embedding)
    assert one.embed_head().head.equal(two.embed_head().head)


@pytest.mark.parametrize("name", ["answers.jsonl", "texts.jsonl"])
def test_corpora_are_those_of_one_process(folder, name):
    assert (folder / "none" / name).read_bytes() == (folder / "tensors" / name).read_bytes()


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_every_method_writes_the_tokens_of_one_process(folder, name):
    """Greedy: transformers' own two as well, whose forwards the others repeat; drawn: trees sized by rank 0's clock."""
    one, two = (read_tokens(folder / parallel / name) for parallel in ("none", "tensors"))
    drawn_otherwise = ("generate",) if name == "sampled" else ()  # from a seed of its own
    ours, theirs = ({key: row for key, row in rows.items() if key[1] not in drawn_otherwise} for rows in (one, two))
    assert ours == theirs and len(ours) >= 4
    assert "same tokens" in (folder / "log.0").read_text() and not (folder / "log.1").read_text()


def test_what_a_round_does_to_a_cache_is_done_to_all_its_parts(folder):
    one, two = (torch.load(folder / parallel / "features.pt") for parallel in ("none", "tensors"))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def read_tokens(folder: Path) -> dict[tuple[str, str], list[int]]:
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return {(record["id"], record["method"]): record["tokens"] for record in records}


# --- a training whose target is divided ---


def test_online_features_of_a_divided_target_train_the_same_draft(folder):
    """Two processes of DDP, which read each other's batches, against two with a target each."""
    assert forked(folder / "fit", 2, train, folder) == [0, 0], printed(folder / "fit")
    names = (f"fit-{parallel}/draft-last/model.safetensors" for parallel in ("none", "tensors"))
    whole, divided = (load_file(folder / name) for name in names)
    for name, value in whole.items():
        assert (value - divided[name]).float().norm() <= 1e-4 * value.float().norm(), name


def train(folder: Path) -> None:
    options = {
        "model.allocation": "[1, 1]",
        "model.learning_rate": 1e-3,
        "data.corpus": folder / "corpus.jsonl",
        "data.target": folder / "target",
        "data.max_length": 60,
        "data.dtype": "float32",
        "data.batch_tokens": 100,
        "data.validation": 0.2,
        "trainer.strategy": "ddp",
        "trainer.accelerator": "cpu",
        "trainer.devices": 2,
        "trainer.precision": "32-true",
        "trainer.max_steps": 3,
        "trainer.logger": "TensorBoardLogger",
        "trainer.logger.save_dir": folder,
        "trainer.logger.version": "",
        "model.kind": "eagle3",
        "model.vocabulary_size": 60,
    }
    for parallel in ("tensors", "none"):  # in this order: at the end Lightning forgets that there are ranks
        options |= {"data.parallel": parallel, "trainer.logger.name": f"fit-{parallel}"}
        cli.run("fit", [f"--{name}={value}" for name, value in options.items()])


def test_processes_that_cannot_share_a_target_say_why(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)  # nor the pretended device
    with pytest.raises(ValueError, match="parallel is tensors, which several processes share: torchrun"):
        Target.load(tiny_folder, "float32", "cpu", "tensors")
    with pytest.raises(ValueError, match="parallel is 'both'; it must be none, layers or tensors"):
        Target.load(tiny_folder, parallel="both")  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(placement, "join", lambda device: 4)
    with pytest.raises(ValueError, match="4 processes cannot share the 2 key-value heads"):
        Target.load(tiny_folder, "float32", "cpu", "tensors")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process takes every GPU, but there are 2 here"):
        Target.load(tiny_folder, "float32", "cpu", "layers")


# --- its layers on several devices ---


def hooked(**changes) -> Target:
    """accelerate moves what goes into every module; here to the device where it is."""
    model = tiny_model(**changes)
    names = [name for name, module in model.named_modules() if not list(module.children())]
    dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True)
    return Target(model, tiny_tokenizer(), "tiny")


def test_hooks_leave_trees_caches_and_baselines_as_they_are(target):
    spread = hooked()
    assert spread.model.model.layers[0].mlp.up_proj._hf_hook is not None and not spread.spans_devices
    assert spread.spec.difference(target.spec) is None
    expected = generate(target, PROMPTS, 20, STOPS)
    assert generate(spread, PROMPTS, 20, STOPS) == expected
    for decoder in (Speculative(spread, tiny_draft(spread, [2, 1])), Generate(spread)):
        assert [decoded.tokens for decoded in decoder.decode(PROMPTS, 20, STOPS)] == expected


def test_keys_lie_beside_their_layers_and_follow_a_path():
    """Twin: one store of all layers. The devices of the law are names of the one that there is."""
    sizes = {"batch": 2, "capacity": 9, "heads": 2, "head_dim": 4, "dtype": torch.float32}
    cpu, far = torch.device("cpu"), torch.device("cpu:0")
    target = tiny_target()
    plain, spread = target.new_cache(2, 9).store, SpreadStore([cpu, far], cpu, **(sizes | {"head_dim": 8}))
    assert [len(store.keys) for store in spread.stores.values()] == [1, 1]
    torch.manual_seed(0)
    index, move = torch.tensor([0, 1, 9, 10]), (torch.tensor([1, 10]), torch.tensor([0, 9]))
    for layer in range(2):
        keys, values = torch.randn(2, 2, 2, 2, 8)
        for store in (plain, spread):
            store.write(layer, index, keys, values)
    for store in (plain, spread):
        store.move(*move)
        store.select([1])
    for layer in range(2):
        for ours, theirs in zip(plain.view(layer, 2), spread.view(layer, 2), strict=True):
            assert ours.equal(theirs) and ours.any()
    meta = SpreadStore([cpu, torch.device("meta"), cpu], cpu, **sizes)
    assert [meta.view(layer, 3)[0].device.type for layer in range(3)] == ["cpu", "meta", "cpu"]


# --- too large ---


def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(tiny_folder, monkeypatch):
    """One line: the bytes needed, those there, and what helps."""
    count = sum(value.numel() for value in tiny_model().parameters())
    assert weight_bytes(Path(tiny_folder), torch.bfloat16) == 2 * count
    assert weight_bytes(Path(tiny_folder), None) == 4 * count
    monkeypatch.setattr(placement, "GB", 1000)
    monkeypatch.setattr(placement, "free_bytes", lambda device: 2 * count - 1)
    monkeypatch.setattr(placement.AutoConfig, "from_pretrained", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=rf"{2 * count / 1000:.1f} GB of weights in bfloat16, and cpu has .* for it"):
        Target.load(tiny_folder, "bfloat16", "cpu")
    monkeypatch.undo()
    monkeypatch.setattr(placement, "free_bytes", lambda device: 4 * count)
    Target.load(tiny_folder, "float32", "cpu")


def test_what_helps_depends_on_where_it_should_lie(tiny_folder, monkeypatch):
    folder, count = Path(tiny_folder), sum(value.numel() for value in tiny_model().parameters())
    monkeypatch.setattr(placement, "free_bytes", lambda device: 2 * count)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"cuda:1 has .* --parallel layers \(one process\) or --parallel tensors"):
        placement.placement("big", folder, "float32", "cuda:1", "none", None)
    fits = placement.placement("big", folder, "float32", "cuda", "layers", 0)
    assert fits == {"device_map": "auto", "max_memory": {1: 2 * count, 2: 2 * count}}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"these 1 GPUs have .* take more GPUs, or several machines"):
        placement.placement("big", folder, "float32", "cuda", "layers", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="there is one GPU, which the training needs"):
        placement.placement("big", folder, "float32", "cuda", "layers", 0)
