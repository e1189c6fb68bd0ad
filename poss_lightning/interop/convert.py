"""`poss convert`: turn a published draft into a folder of ours, and back."""

import json
import pickle
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import CONFIG, WEIGHTS, find_draft
from poss_lightning.draft.kinds import load_draft
from poss_lightning.files import atomic_folder, check_new, fetch, read_json
from poss_lightning.interop import settings, speculators
from poss_lightning.interop.layouts import (
    LAYOUTS,
    NUMBERED,
    TO_DRAFT,
    TO_TARGET,
    Layout,
    check_expressible,
    find_layout,
    refuse,
)
from poss_lightning.interop.problems import Checks
from poss_lightning.interop.tensors import (
    Draft,
    check_frozen,
    check_names,
    find_vocabulary,
    from_attention_biases,
    sort_layers,
    strip_prefix,
    to_ours,
    to_theirs,
)
from poss_lightning.ranges import Position, check_numbers
from poss_lightning.target_model.model import Target
from poss_lightning.terminal import announced, one_line

PICKLED = "pytorch_model.bin"
FILES = [CONFIG, "model*.safetensors*", "pytorch_model*.bin*"]  # of a published draft


@check_numbers
def convert(
    source: str,
    out: str,
    input_format: Literal["ours", "eagle", "hass", "poss", "eagle3", "speed", "speculators", "dflash"] = "ours",
    output_format: Literal["ours", "eagle", "poss", "eagle3", "speculators", "dflash", "vllm", "sglang"] = "ours",
    allocation: list[Position] | None = None,
    target: str = "embedded",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Convert a draft between formats: the published ones, those that serving engines load, and ours.

    The target is loaded to describe it in our config.json, and to check that an embedding or a head in the file is the
    target's; from ours to ours, as from a checkpoint to a folder, it is not needed.

    Args:
        source: folder or hub id; in our format also the name of a shipped draft, or a training's checkpoint, *.ckpt.
        out: folder to write.
        input_format: format of the source.
        output_format: format to write.
        allocation: positions served by each specialist, e.g. [2, 2, 2]; needed for poss and speed, whose files do not
            state it. The speculators format states it; in the other formats a single layer serves 6 positions, or 7
            of EAGLE-3's.
        target: "embedded", a local folder or a hub id; the one the draft was trained for.
        dtype: of the weights; None as they are stored, or float32 from ours to ours. 16 bits lose nothing if decoding
            uses the same dtype.

    Raises:
        FileExistsError: there is something at `out`.
        FileNotFoundError: no such draft or target, or a file is missing.
        ValueError: the files contradict each other, the target or the allocation; or the output format cannot express
            what the draft computes.
    """
    ours = input_format == "ours"
    reason = f"allocation is {allocation}; a draft of ours states its own: leave it out"
    refuse((ours and allocation is not None, reason))
    check_new(out)
    if ours and output_format == "ours":
        draft = load_draft(source).to(getattr(torch, dtype or "float32"))
        with announced(f"writing {out}"), atomic_folder(out) as folder:
            draft.save_pretrained(folder)
        return _report(out, draft.config)
    if ours:
        draft = _load_ours(source)
        loaded = Target.load(target, dtype=None, device="cpu", exact=False)
        difference = draft.config.target.difference(loaded.spec)
        refuse((difference is not None, f"{source} was trained for a different target: {difference}"))
    else:
        published = read_published(source, input_format, allocation)
        loaded = Target.load(target, dtype=None, device="cpu", exact=False)
        try:
            draft = parse_published(published, loaded)
            refuse(*((True, str(problem)) for problem in draft.problems))
        except ValueError as error:
            raise ValueError(f"{source} as {input_format}: {[*published.checks.problems, error][0]}") from error
    if dtype is not None:
        to = getattr(torch, dtype)
        state = {name: each.to(to) if each.is_floating_point() else each for name, each in draft.state.items()}
        draft = draft._replace(state=state)
    _write(draft, Path(out), output_format, loaded)


def _load_ours(source: str) -> Draft:
    """Load a draft in our format, checked, with its tensors as they are stored."""
    draft = load_draft(source)
    stored = draft.state_dict() if source.endswith(".ckpt") else load_file(find_draft(source) / WEIGHTS)
    config, state = draft.config, {"scale": draft.scale} | stored
    if config.vocabulary_size == config.target.vocab_size:  # a vocabulary of all tokens is stored as none
        config = replace(config, vocabulary_size=None)
        del state["vocabulary"]
    return Draft(config, state)


class Published(NamedTuple):
    """The files of a published draft: config.json on one level, its tensors, their layout, and the allocation."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layout: Layout
    allocation: list[int]
    checks: Checks


def read_published(source: str, input_format: str, given: list[int] | None) -> Published:
    """Read the files of a published draft; `given` is an allocation that they may not state."""
    folder, checks = fetch(source, "draft", FILES), Checks()
    stored, layout = read_json(folder / CONFIG), LAYOUTS[input_format]
    tensors = strip_prefix(load_tensors(folder), "fc.weight", checks)
    if layout.kind == "eagle3" and NUMBERED in tensors:  # as NVIDIA's ModelOpt names EAGLE-3's one layer
        layout = replace(layout, layer="layers.{}")
    if layout.kind == "eagle2":
        tensors = from_attention_biases(tensors, checks)
        layout = replace(layout, vocabulary="d2t" if TO_TARGET in tensors else None)  # as our plugin loads it
    config = speculators.flatten(stored, checks) if layout.nested else stored
    return Published(config, tensors, layout, _find_allocation(layout, given, stored, tensors), checks)


def parse_published(published: Published, target: Target) -> Draft:
    """Turn a published draft into one of ours.

    Raises:
        ValueError: what is wrong in it has no repair.
    """
    stored, tensors, layout, allocation, checks = published
    ids = find_vocabulary(tensors, layout, target.spec.vocab_size, checks)
    layers, target_keys = max(layout.count_layers(tensors), 1), target.model.config.get_text_config().to_dict()
    config = settings.parse_config(
        stored, layout, allocation, target.spec, len(ids), layers, checks=checks, harmless=target_keys
    )
    config = check_names(tensors, config, layout, checks)
    vocabulary = ids if config.vocabulary_size else None
    differing = check_frozen(tensors, target.embed_head.restrict(vocabulary), layout, checks)
    state = to_ours(tensors, config, layout, ids, target.embed_head)
    unread = {name: each for name, each in tensors.items() if name in differing or name == TO_DRAFT}
    return Draft(config, state, checks.problems, unread)


def _find_allocation(
    layout: Layout, given: list[int] | None, stored: dict[str, Any], tensors: Collection[str]
) -> list[int]:
    """Return the allocation given, or that of a draft of ours; else one layer for the positions stated, or usual."""
    if layout.kind == "block":
        refuse((given is not None, f"allocation is {given}; the file states block_size: leave it out"))
        return [_find_positions(stored)]
    runs = given or settings.mapping(stored, settings.CONFIG_KEY).get("allocation")
    layers = layout.count_layers(tensors)
    refuse(
        (layers > 1 and not layout.several, f"it has {layers} layers, and a file of this format has one"),
        (
            len(runs or (0,)) > 1 and not layout.several,
            f"allocation is {runs}; a file of this format has one layer: give one number",
        ),
        (
            layout.several and len(runs or ()) != layers,
            f"it has {layers} layers, and allocation is {runs}: give the positions that each serves, as [2,2,2]",
        ),
    )
    stated = speculators.find_default_positions(stored) if layout.nested else None
    return runs or [stated or (7 if layout.kind == "eagle3" else 6)]


def _find_positions(published: dict[str, Any]) -> int:
    """Return the number of tokens that a block draft proposes: its first place holds the newest token."""
    size: Any = settings.mapping(published, settings.DFLASH_KEY).get("block_size", published.get("block_size"))
    allowed = "it must be the places of a block, 2 or more"
    Checks().expect(type(size) is int and size > 1, "block_size", size, allowed)  # raises
    return size - 1


def _write(draft: Draft, out: Path, output_format: str, target: Target) -> None:
    """Write the folder; ValueError if the format cannot express what the draft computes."""
    config, ids = draft.config, None
    if output_format == "ours":
        write_folder(out, draft.state, config.to_json())
    else:
        draft = sort_layers(draft)
        config, layout = draft.config, find_layout(output_format, config)
        check_expressible(config, layout)
        tensors = to_theirs(draft, layout, target.embed_head)
        published = settings.publish(config, layout, tensors, target.embed_head.tied)
        if layout.nested:
            published = speculators.nest(published, config, target)
        if layout.vocabulary == "token_map" and "vocabulary" in draft.state:
            ids = draft.state["vocabulary"].tolist()
        write_folder(out, tensors, json.dumps(published, indent=2) + "\n", ids)
    _report(out, config)


def _report(out: str | Path, config: DraftConfig) -> None:
    layers = f"; it reads target layers {list(config.aux_layers)}, counted from 1" if config.aux_layers else ""
    print(f"{out}: allocation {list(config.allocation)}, for {config.target.name}{layers}")


# --- files: loaded without running any code in them, and written completely or not at all ---


@announced("reading the tensors of a draft")
def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of a folder, from one file or from shards with an index; .safetensors is preferred over .bin."""
    for file in (folder / WEIGHTS, folder / PICKLED):
        if file.is_file():
            return _load_file(file)
        if (index := Path(f"{file}.index.json")).is_file():
            shards = sorted({*read_json(index).get("weight_map", {}).values()})
            return {name: tensor for shard in shards for name, tensor in _load_file(folder / shard).items()}
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {PICKLED}, nor the index of their shards")


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not loaded, as it is damaged or holds more than plain tensors: get a .safetensors file"
        ) from error
    except FileNotFoundError:
        raise
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged, download it again: {one_line(error)}") from error
    if not isinstance(stored, dict) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        raise ValueError(f"{path} is not a table of names and tensors")
    return stored


@announced("writing a draft")
def write_folder(folder: Path, tensors: dict[str, Tensor], config: str, token_map: list[int] | None = None) -> None:
    """Write a draft's folder: one file of tensors, as the published code reads no shards.

    Args:
        folder: must not exist, else FileExistsError.
        config: text of config.json.
        token_map: ids of a smaller vocabulary, for token_map.pt.
    """
    with atomic_folder(folder) as temporary:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary / WEIGHTS, {"format": "pt"})
        (temporary / CONFIG).write_text(config)
        if token_map is not None:
            torch.save(token_map, temporary / "token_map.pt")
