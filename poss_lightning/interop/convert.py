"""`poss convert`: a published draft as a folder of ours, and back."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.draft.specialists import WEIGHTS, DraftConfig, Specialists, find_draft
from poss_lightning.files import fetch
from poss_lightning.interop import checkpoints, settings
from poss_lightning.interop.layouts import LAYOUTS, SPEED_ONLY, Layout, check_holds, layout_of
from poss_lightning.interop.tensors import Draft, check_frozen, check_names, to_ours, to_theirs, vocabulary
from poss_lightning.target.model import Target
from poss_lightning.target.spec import EmbedHead


def convert(
    source: str,
    out: str,
    from_: Literal["ours", "eagle", "hass", "poss", "eagle3", "speed"] = "ours",
    to: Literal["ours", "eagle", "hass", "poss", "eagle3", "speed", "vllm", "sglang"] = "ours",
    allocation: list[int] | None = None,
    target: str = "embedded",
    file: Literal["safetensors", "bin"] = "safetensors",
) -> None:
    """Read a draft in one layout and write it in another: published ones, those that engines load, and ours.

    The target is loaded to tell whom the draft serves, and to see that an embedding or a head in the file is its own.

    Args:
        source: folder or hub id; of ours also a shipped head.
        out: folder to write.
        from_: layout of the source; say --from.
        to: layout to write.
        allocation: positions served by each specialist, e.g. [2, 2, 2]; poss and speed need it: files do not say.
        target: "embedded", a local folder or a hub id; the one the draft was trained for.
        file: write model.safetensors, or pytorch_model.bin for readers that know nothing else.

    Raises:
        FileExistsError: `out` is there already.
        FileNotFoundError: no such draft or target, or a file is missing.
        ValueError: the files contradict each other, the target or the allocation; or `to` cannot hold what the draft
            computes.
    """
    if from_ == to:
        raise ValueError(f"from and to are both {to}: one of them must be another layout, {', '.join(LAYOUTS)}")
    if from_ == "ours" and allocation is not None:
        raise ValueError(f"allocation is {allocation}; a draft of ours states its own: leave it out")
    if file == "bin" and to == "ours":
        raise ValueError("file is bin; a draft of ours is always safetensors")
    if Path(out).exists():
        raise FileExistsError(f"{out} is there already: choose another name or remove it")
    if from_ == "ours":
        draft = _own(source)
        _check(draft.config, to, source)
        loaded = Target.load(target, dtype=None, device="cpu")
        if difference := draft.config.target.difference(loaded.spec):
            raise ValueError(f"{source} was trained for another target: {difference}")
    else:
        folder = fetch(source, "draft", checkpoints.FILES)
        given, tensors = checkpoints.read_config(folder), checkpoints.read_tensors(folder)
        misfit = f"{source} does not fit --from {from_}"
        with _naming(misfit):
            allocation = _allocation(from_, allocation, tensors)
        loaded = Target.load(target, dtype=None, device="cpu")
        with _naming(misfit):
            draft = published(given, tensors, LAYOUTS[from_], allocation, loaded)
        _check(draft.config, to, source)
    _write(draft, Path(out), to, file == "bin", loaded.embed_head)


def _own(source: str) -> Draft:
    """A draft of ours, checked, with its tensors as they are stored."""
    folder = find_draft(source)
    draft = Specialists.from_pretrained(folder)
    config, state = draft.config, {"scale": draft.scale} | load_file(folder / WEIGHTS)
    if config.vocabulary_size == config.target.vocab_size:  # a vocabulary of all tokens is none, here and in files
        config = replace(config, vocabulary_size=None)
        del state["vocabulary"]
    return Draft(config, state)


def published(
    given: dict[str, Any], tensors: dict[str, Tensor], layout: Layout, allocation: list[int], target: Target
) -> Draft:
    """A published draft as one of ours: what its config.json says, and its tensors.

    Raises:
        ValueError: they contradict each other, the layout, the allocation or the target.
    """
    check_names(tensors, layout, len(allocation))
    ids = vocabulary(tensors, layout, target.spec.vocab_size)
    config = settings.read(given, layout, allocation, target.spec, len(ids))
    check_frozen(tensors, target.embed_head, layout)
    return to_ours(tensors, config, layout, ids)


def _allocation(from_: str, given: list[int] | None, tensors: Collection[str]) -> list[int]:
    """The allocation of a file with these tensors; a single layer serves all positions, whatever their number."""
    layout, layers = LAYOUTS[from_], LAYOUTS[from_].layers(tensors)
    if SPEED_ONLY in tensors and from_ != "speed":
        raise ValueError("its layers are EAGLE-3's and numbered: say --from speed")
    if layers > 1 and not layout.several:
        raise ValueError(f"it has {layers} layers; if they are specialists, say --from poss")
    if given is None and layout.several and layers:
        raise ValueError(
            f"it has {layers} layers, and does not say how many positions each serves: give --allocation, "
            "as [2, 2, 2] for three of two each"
        )
    given = given or [layout.positions]
    if layers and len(given) != layers:  # where there is none, the first tensor missing is named
        has = f"{layers} layers" if layers > 1 else "one layer"
        raise ValueError(f"allocation {given} is of {len(given)} specialists, and it has {has}")
    return given


def _check(config: DraftConfig, to: str, source: str) -> None:
    if to != "ours":
        with _naming(f"{source} does not fit --to {to}"):
            check_holds(config, layout_of(to, config.kind))


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say in a ValueError's message of what it speaks."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _write(draft: Draft, out: Path, to: str, pickled: bool, embed_head: EmbedHead) -> None:
    """Write the folder, and say what its readers must be told."""
    config, ids = draft.config, None
    if to == "ours":
        checkpoints.write(out, draft.state, config.to_json(), False, None)
        how = f"allocation {list(config.allocation)}, for {config.target.name}"
    else:
        layout = layout_of(to, config.kind)
        tensors = to_theirs(draft, layout, embed_head)
        written = settings.write(config, layout, tensors, embed_head.tied)
        if layout.vocabulary == "token_map" and "vocabulary" in draft.state:
            ids = draft.state["vocabulary"].tolist()
        checkpoints.write(out, tensors, json.dumps(written, indent=2) + "\n", pickled, ids)
        how = _how(to, config, out)
    fused = f"; reads the outputs of target layers {list(config.layers)}, counted from 1" if config.layers else ""
    print(f"{out}: {how}{fused}")


def _how(to: str, config: DraftConfig, out: Path) -> str:
    run, layers, positions = config.allocation[0], len(config.allocation), sum(config.allocation)
    third = "3" if config.kind == "eagle3" else ""
    specialist_of = f'--speculative-config \'{{"method": "eagle{third}", "model": "{out}", "num_speculative_tokens": '
    match to:
        case "poss":
            return f"PosS reads it with position_per_layer={run}, forward_num_total={run * layers}"
        case "speed":  # where each layer serves 3, its readers ask for a next layer beyond the last
            most = min(positions, 3 * layers) if run == 3 else positions
            return (
                f"its authors' vLLM reads it with {specialist_of}{most}}}', where select_layer_idx serves "
                f'{list(config.allocation)} and the model\'s name has "poss" in it'
            )
        case "vllm":
            return f"vLLM reads it with {specialist_of}{run}}}'"
        case "sglang":
            options = f"--speculative-algorithm EAGLE{third} --speculative-draft-model-path {out}"
            if config.vocabulary_size and not third:
                options += f" --speculative-token-map {out / 'token_map.pt'}"
            return f"SGLang reads it with {options}"
        case _:
            return f"EAGLE reads it as ea_model_path={out}" + (" with use_eagle3=True" if third else "")
