"""`poss convert`: turn a published draft into a folder of ours, and back."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.draft.folder import CONFIG, WEIGHTS, check_state, find_draft
from poss_lightning.draft.specialists import DraftConfig, Specialists
from poss_lightning.files import check_new, fetch, read_json
from poss_lightning.interop import checkpoints, settings, speculators
from poss_lightning.interop.layouts import LAYOUTS, NUMBERED, Layout, check_expressible, find_layout
from poss_lightning.interop.tensors import Draft, check_frozen, check_names, find_vocabulary, to_ours, to_theirs
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
    if input_format == output_format:
        raise ValueError(f"input_format and output_format are both {output_format}: one of them must be another")
    if input_format == "ours" and allocation is not None:
        raise ValueError(f"allocation is {allocation}; a draft of ours states its own: leave it out")
    check_new(out)
    if input_format == "ours":
        draft = _load_ours(source)
        _check_output(draft.config, output_format, source)
        loaded = Target.load(target, dtype=None, device="cpu")
        if difference := draft.config.target.difference(loaded.spec):
            raise ValueError(f"{source} was trained for another target: {difference}")
    else:
        folder, layout = fetch(source, "draft", checkpoints.FILES), LAYOUTS[input_format]
        stored, tensors = read_json(folder / CONFIG), checkpoints.load_tensors(folder)
        mismatch = f"{source} does not fit --input_format {input_format}"
        with _prefix_errors(mismatch):
            config = _flatten(stored, layout)
            if allocation is None and layout.nested:
                allocation = speculators.find_allocation(stored)
            if layout.kind == "block":
                if allocation is not None:
                    raise ValueError(f"allocation is {allocation}; the file says block_size: leave it out")
                allocation = [settings.find_positions(config)]
            allocation = _find_allocation(input_format, allocation, tensors)
        loaded = Target.load(target, dtype=None, device="cpu")
        with _prefix_errors(mismatch):
            draft = parse_published(config, tensors, layout, allocation, loaded)
        _check_output(draft.config, output_format, source)
    _write(draft, Path(out), output_format, loaded)


def _load_ours(source: str) -> Draft:
    """A draft in our format, checked, with its tensors as they are stored."""
    draft = Specialists.from_pretrained(source)
    config, state = draft.config, {"scale": draft.scale} | load_file(find_draft(source) / WEIGHTS)
    if config.vocabulary_size == config.target.vocab_size:  # a vocabulary of all tokens is stored as none
        config = replace(config, vocabulary_size=None)
        del state["vocabulary"]
    return Draft(config, state)


def parse_published(
    published: dict[str, Any], tensors: dict[str, Tensor], layout: Layout, allocation: list[int], target: Target
) -> Draft:
    """Turn a published draft into one of ours.

    Args:
        published: content of its config.json, on one level.
        tensors: of its file.

    Raises:
        ValueError: they contradict each other, the layout, the allocation or the target.
    """
    switches = settings.find_switches(published)
    layers = layout.count_layers(tensors) if layout.kind == "block" else len(allocation)
    check_names(tensors, layout, layers, 3 if switches["fc_norm"] else int(switches["norm_before_fc"]))
    ids = find_vocabulary(tensors, layout, target.spec.vocab_size)
    config = settings.parse(published, layout, allocation, target.spec, vocabulary_size=len(ids), layers=layers)
    check_frozen(tensors, target.embed_head, layout)
    draft = to_ours(tensors, config, layout, ids)
    if config.one_pass:
        draft.state["mask"] = target.embed_head.embedding[config.mask_row].to(draft.state["fc.weight"].dtype)
    check_state(draft.state)
    return draft


def _flatten(stored: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The content of a config.json on one level."""
    if layout.nested:
        return speculators.flatten(stored)
    if "target" in stored:
        raise ValueError("its config.json is of our format: leave out --input_format")
    if speculators.KIND in stored:
        raise ValueError("its config.json is of the speculators format: say --input_format speculators")
    return stored


def _find_allocation(input_format: str, allocation: list[int] | None, tensors: Collection[str]) -> list[int]:
    """The allocation of a file with these tensors; a single layer serves all positions, whatever their number."""
    layout, layers = LAYOUTS[input_format], LAYOUTS[input_format].count_layers(tensors)
    if layout.kind == "block" and allocation is not None:
        return allocation
    if NUMBERED in tensors and input_format not in ("speed", "speculators"):
        raise ValueError("its layers are EAGLE-3's and numbered: say --input_format speed")
    if layers > 1 and not layout.several:
        raise ValueError(f"it has {layers} layers; if they are specialists, say --input_format poss")
    if allocation is None and layout.several and layers:
        raise ValueError(
            f"it has {layers} layers, and does not say how many positions each serves: give --allocation, "
            "as [2,2,2] for three of two each"
        )
    allocation = allocation or [layout.positions]
    if layers and len(allocation) != layers:  # with no layer at all, `check_names` names the first missing tensor
        has = f"{layers} layers" if layers > 1 else "one layer"
        raise ValueError(f"allocation {allocation} is of {len(allocation)} specialists, and it has {has}")
    return allocation


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
    config, ids, embed_head = draft.config, None, target.embed_head
    if output_format == "ours":
        checkpoints.write_folder(out, draft.state, config.to_json())
    else:
        layout = find_layout(output_format, config)
        tensors = to_theirs(draft, layout, embed_head)
        published = settings.publish(config, layout, tensors, embed_head.tied)
        if layout.nested:
            published = speculators.nest(published, config.layers, config.allocation[0], target)
        if layout.vocabulary == "token_map" and "vocabulary" in draft.state:
            ids = draft.state["vocabulary"].tolist()
        checkpoints.write_folder(out, tensors, json.dumps(published, indent=2) + "\n", ids)
    layers = list(config.layers)
    inner = f"; reads the outputs of target layers {layers}, counted from 1" if config.reads_inner_layers else ""
    print(f"{out}: {_describe_usage(output_format, config, out)}{inner}")


def _describe_usage(output_format: str, config: DraftConfig, out: Path) -> str:
    """How the software of an output format loads a draft."""
    run, layers, third = config.allocation[0], len(config.allocation), "3" if config.kind == "eagle3" else ""
    method = "dflash" if config.one_pass else f"eagle{third}"
    plugin = output_format == "vllm" and find_layout("vllm", config).states_draft
    options = {"method": method, "model": str(out), "num_speculative_tokens": sum(config.allocation)}
    token_map = f" --speculative-token-map {out / 'token_map.pt'}" if config.vocabulary_size and not third else ""
    return {
        "ours": f"allocation {list(config.allocation)}, for {config.target.name}",
        "eagle": f"EAGLE reads it as ea_model_path={out}",
        "eagle3": f"EAGLE, vLLM and SGLang read it, EAGLE as ea_model_path={out} with use_eagle3=True",
        "poss": f"PosS reads it with position_per_layer={run}, forward_num_total={run * layers}",
        "speculators": f"vLLM reads it, and its target with it, with vllm serve {out}",
        "dflash": f"vLLM and SGLang read it, vLLM with --speculative-config '{json.dumps(options)}'",
        "vllm": f"vLLM reads it{', where poss_lightning is installed too,' if plugin else ''} with "
        f"--speculative-config '{json.dumps(options)}'",
        "sglang": f"SGLang reads it with --speculative-algorithm {method.upper()} --speculative-draft-model-path {out}"
        + token_map,
    }[output_format]
