"""`poss convert`: turn a published draft into a folder of ours, and back."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.draft.config import DraftConfig
from poss_lightning.draft.folder import CONFIG, WEIGHTS, find_draft, published_format
from poss_lightning.draft.kinds import load_draft
from poss_lightning.files import check_new, fetch, read_json
from poss_lightning.interop import checkpoints, settings, speculators
from poss_lightning.interop.layouts import LAYOUTS, METHODS, NUMBERED, Layout, check_expressible, find_layout, refuse
from poss_lightning.interop.tensors import Draft, check_frozen, find_vocabulary, to_ours, to_theirs
from poss_lightning.ranges import Position, check_numbers
from poss_lightning.target.model import Target


@check_numbers
def convert(
    source: str,
    out: str,
    input_format: Literal["ours", "eagle", "hass", "poss", "eagle3", "speed", "speculators", "dflash"] = "ours",
    output_format: Literal["ours", "eagle", "poss", "eagle3", "speculators", "dflash", "vllm", "sglang"] = "ours",
    allocation: list[Position] | None = None,
    target: str = "embedded",
) -> None:
    """Convert a draft between formats: the published ones, those that serving engines load, and ours.

    The target is loaded to describe it in our config.json, and to check that an embedding or a head in the file is the
    target's.

    Args:
        source: folder or hub id; in our format also the name of a shipped draft.
        out: folder to write.
        input_format: format of the source.
        output_format: format to write.
        allocation: positions served by each specialist, e.g. [2, 2, 2]; needed for poss and speed, whose files do not
            state it. The speculators format states it; in the other formats a single layer serves 6 positions, or 7
            of EAGLE-3's.
        target: "embedded", a local folder or a hub id; the one the draft was trained for.

    Raises:
        FileExistsError: there is something at `out`.
        FileNotFoundError: no such draft or target, or a file is missing.
        ValueError: the files contradict each other, the target or the allocation; or the output format cannot express
            what the draft computes.
    """
    ours = input_format == "ours"
    refuse(
        (input_format == output_format, f"input_format and output_format are both {output_format}; they must differ"),
        (ours and allocation is not None, f"allocation is {allocation}; a draft of ours states its own: leave it out"),
    )
    check_new(out)
    if ours:
        draft = _load_ours(source)
        _check_output(draft.config, output_format, source)
        loaded = Target.load(target, dtype=None, device="cpu")
        difference = draft.config.target.difference(loaded.spec)
        refuse((difference is not None, f"{source} was trained for a different target: {difference}"))
    else:
        draft, loaded = _load_published(source, input_format, allocation, target)
        _check_output(draft.config, output_format, source)
    _write(draft, Path(out), output_format, loaded)


def _load_ours(source: str) -> Draft:
    """A draft in our format, checked, with its tensors as they are stored."""
    draft = load_draft(source)
    config, state = draft.config, {"scale": draft.scale} | load_file(find_draft(source) / WEIGHTS)
    if config.vocabulary_size == config.target.vocab_size:  # a vocabulary of all tokens is stored as none
        config = replace(config, vocabulary_size=None)
        del state["vocabulary"]
    return Draft(config, state)


def _load_published(source: str, input_format: str, given: list[int] | None, target: str) -> tuple[Draft, Target]:
    """A draft in a published format, and its target, which is loaded once the files are known to agree."""
    published, tensors, layout, allocation = read_published(source, input_format, given)
    loaded = Target.load(target, dtype=None, device="cpu")
    with _prefix_errors(_mismatch(source, input_format)):
        return parse_published(published, tensors, layout, allocation, loaded), loaded


def read_published(
    source: str, input_format: str, given: list[int] | None
) -> tuple[dict[str, Any], dict[str, Tensor], Layout, list[int]]:
    """The files of a published draft: config.json on one level, tensors, layout and allocation."""
    folder = fetch(source, "draft", checkpoints.FILES)
    stored, tensors = read_json(folder / CONFIG), checkpoints.load_tensors(folder)
    with _prefix_errors(_mismatch(source, input_format)):
        layout = _find_input_layout(input_format, stored, tensors)
        published = speculators.flatten(stored) if layout.nested else stored
        return published, tensors, layout, _find_allocation(layout, given, stored, tensors)


def _mismatch(source: str, input_format: str) -> str:
    return f"{source} does not fit --input_format {input_format}"


def parse_published(
    published: dict[str, Any], tensors: dict[str, Tensor], layout: Layout, allocation: list[int], target: Target
) -> Draft:
    """Turn a published draft into one of ours.

    Args:
        published: content of its config.json, on one level.
        tensors: of its file.
    """
    ids = find_vocabulary(tensors, layout, target.spec.vocab_size)
    layers = max(layout.count_layers(tensors), 1)
    config = settings.parse_config(published, layout, allocation, target.spec, len(ids), layers)
    check_frozen(tensors, target.embed_head, layout)
    return to_ours(tensors, config, layout, ids, target.embed_head)


def _find_input_layout(input_format: str, stored: dict[str, Any], tensors: Collection[str]) -> Layout:
    """The layout of a published draft. Raises ValueError, with the right format, where its files are of another."""
    found, layout, layers = published_format(stored), LAYOUTS[input_format], LAYOUTS["speed"].count_layers(tensors)
    right, why = input_format, ""
    if found in ("speculators", "dflash"):
        right, why = found, f"its config.json is of the {found} format"
    elif any(name.startswith("midlayer.") for name in tensors):
        right, why = "eagle3", "its layer is EAGLE-3's midlayer"
    elif NUMBERED in tensors:
        right = "speed" if layers > 1 or input_format == "speed" else "eagle3"
        why = f"its layers are EAGLE-3's and numbered, {layers} in all"
    elif layout.kind == "eagle3" and (layers or layout.nested):
        right, why = "poss" if layers > 1 else "eagle", f"it has no {NUMBERED}, as EAGLE-3 has"
    refuse(
        ("target" in stored, "its config.json is of our format: leave out --input_format"),
        (right != input_format, f"{why}: say --input_format {right}"),
    )
    return replace(layout, layer="layers.{}") if right == "eagle3" and NUMBERED in tensors else layout


def _find_allocation(
    layout: Layout, given: list[int] | None, stored: dict[str, Any], tensors: Collection[str]
) -> list[int]:
    """The allocation given, or that of a draft of ours; else one layer for the positions stated, or the usual ones."""
    if layout.kind == "block":
        refuse((given is not None, f"allocation is {given}; the file states block_size: leave it out"))
        return [settings.find_positions(stored)]
    given = given or settings.mapping(stored, settings.CONFIG_KEY).get("allocation")
    if layers := layout.count_layers(tensors):  # else `to_ours` names the first missing tensor
        has = f"it has {layers} layers" if layers > 1 else "it has one layer"
        refuse(
            (layers > 1 and not layout.several, f"{has}; if they are specialists, say --input_format poss"),
            (
                layout.several and given is None,
                f"{has}, and does not state how many positions each serves: give --allocation, e.g. [2,2,2]",
            ),
            (len(given or [1]) != layers, f"{has}, and allocation {given} is of {len(given or ())} specialists"),
        )
    stated = speculators.find_default_positions(stored) if layout.nested else None
    return given or [stated or layout.positions]


def _check_output(config: DraftConfig, output_format: str, source: str) -> None:
    if output_format != "ours":
        with _prefix_errors(f"{source} does not fit --output_format {output_format}"):
            check_expressible(config, find_layout(output_format, config))


@contextmanager
def _prefix_errors(prefix: str) -> Iterator[None]:
    """Put `prefix` before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from error


def _write(draft: Draft, out: Path, output_format: str, target: Target) -> None:
    """Write the folder, and print how to load it."""
    config, ids = draft.config, None
    if output_format == "ours":
        checkpoints.write_folder(out, draft.state, config.to_json())
    else:
        layout = find_layout(output_format, config)
        tensors = to_theirs(draft, layout, target.embed_head)
        published = settings.publish(config, layout, tensors, target.embed_head.tied)
        if layout.nested:
            published = speculators.nest(published, config, target)
        if layout.vocabulary == "token_map" and "vocabulary" in draft.state:
            ids = draft.state["vocabulary"].tolist()
        checkpoints.write_folder(out, tensors, json.dumps(published, indent=2) + "\n", ids)
    layers = list(config.aux_layers)
    inner = f"; reads the outputs of target layers {layers}, counted from 1" if layers else ""
    print(f"{out}: {_describe_usage(output_format, config, out)}{inner}")


def _describe_usage(output_format: str, config: DraftConfig, out: Path) -> str:
    """How the software of an output format loads a draft."""
    run, method = config.allocation[0], METHODS[config.kind]
    options = json.dumps({"method": method, "model": str(out), "num_speculative_tokens": sum(config.allocation)})
    plugin = output_format == "vllm" and find_layout("vllm", config).states_draft
    mapped = config.vocabulary_size and method == "eagle"
    return {
        "ours": f"allocation {list(config.allocation)}, for {config.target.name}",
        "eagle": f"EAGLE reads it as ea_model_path={out}",
        "eagle3": f"EAGLE, vLLM and SGLang read it, EAGLE as ea_model_path={out} with use_eagle3=True",
        "poss": f"PosS reads it with position_per_layer={run}, forward_num_total={run * len(config.allocation)}",
        "speculators": f"vLLM reads it, and its target with it, with vllm serve {out}",
        "dflash": f"vLLM and SGLang read it, vLLM with --speculative-config '{options}'",
        "vllm": f"vLLM reads it{', where poss_lightning is installed too,' if plugin else ''} with "
        f"--speculative-config '{options}'",
        "sglang": f"SGLang reads it with --speculative-algorithm {method.upper()} --speculative-draft-model-path {out}"
        + (f" --speculative-token-map {out / 'token_map.pt'}" if mapped else ""),
    }[output_format]
