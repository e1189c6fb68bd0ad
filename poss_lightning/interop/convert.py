"""`poss convert`: a published draft as a folder of ours, and back."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from poss_lightning.draft.specialists import WEIGHTS, DraftConfig, Specialists, locate
from poss_lightning.interop import checkpoints
from poss_lightning.interop.layouts import (
    LAYOUTS,
    Draft,
    Layout,
    check_config,
    check_frozen,
    check_holds,
    to_ours,
    to_theirs,
)
from poss_lightning.target.model import Target
from poss_lightning.target.spec import Ends


def convert(
    source: str,
    out: str,
    from_: Literal["ours", "eagle", "hass", "poss"] = "ours",
    to: Literal["ours", "eagle", "hass", "poss", "vllm", "sglang"] = "ours",
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
        allocation: positions served by each specialist, e.g. [2, 2, 2]; --from poss needs it, as its files do not say.
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
        loaded = Target.load(target, dtype=None)
        if difference := draft.config.target.difference(loaded.spec):
            raise ValueError(f"{source} was trained for another target: {difference}")
    else:
        folder = checkpoints.locate(source)
        given, tensors = checkpoints.read_config(folder), checkpoints.read_tensors(folder)
        misfit = f"{source} does not fit --from {from_}"
        with _naming(misfit):
            allocation = _allocation(LAYOUTS[from_], allocation, LAYOUTS[from_].layers(tensors))
        loaded = Target.load(target, dtype=None)
        with _naming(misfit):
            draft = _published(given, tensors, LAYOUTS[from_], allocation, loaded)
        _check(draft.config, to, source)
    _write(draft, Path(out), to, file == "bin", loaded.ends)


def _own(source: str) -> Draft:
    """A draft of ours, checked, with its tensors as they are stored."""
    folder = locate(source)
    draft = Specialists.from_pretrained(folder)
    return Draft(draft.config, {"scale": draft.scale} | load_file(folder / WEIGHTS))


def _published(
    given: dict[str, Any], tensors: dict[str, Tensor], layout: Layout, allocation: list[int], target: Target
) -> Draft:
    check_config(given, target.spec)
    check_frozen(tensors, target.ends)
    width = given["intermediate_size"]
    own_width = None if width == target.spec.intermediate_size else width
    depth = layout.depth or sum(allocation)
    return to_ours(tensors, DraftConfig(target.spec, tuple(allocation), depth, intermediate_size=own_width), layout)


def _allocation(layout: Layout, given: list[int] | None, layers: int) -> list[int]:
    """The allocation of a file with so many layers; a single layer serves all positions, whatever their number."""
    if layers > 1 and not layout.several:
        raise ValueError(f"it has {layers} layers; if they are specialists, say --from poss")
    if given is None and layout.several:
        raise ValueError(
            f"it has {layers} layers, and does not say how many positions each serves: give --allocation, "
            "as [2, 2, 2] for three of two each"
        )
    given = given or [6]
    if layers and len(given) != layers:  # where there is none, the first tensor missing is named
        raise ValueError(f"allocation {given} is of {len(given)} specialists, and it has {layers} layers")
    return given


def _check(config: DraftConfig, to: str, source: str) -> None:
    if to != "ours":
        with _naming(f"{source} does not fit --to {to}"):
            check_holds(config, LAYOUTS[to])


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say in a ValueError's message of what it speaks."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _write(draft: Draft, out: Path, to: str, pickled: bool, ends: Ends) -> None:
    """Write the folder, and say what its readers must be told."""
    if to == "ours":
        checkpoints.write(out, draft.state, draft.config.to_json(), False, None)
        return print(f"{out}: allocation {list(draft.config.allocation)}, for {draft.config.target.name}")
    tensors, config = to_theirs(draft, LAYOUTS[to], ends)
    ids = draft.state["vocabulary"].tolist() if "vocabulary" in draft.state else None
    checkpoints.write(out, tensors, json.dumps(config, indent=2) + "\n", pickled, ids)
    print(f"{out}: {_how(to, draft.config, out)}")


def _how(to: str, config: DraftConfig, out: Path) -> str:
    run, layers = config.allocation[0], len(config.allocation)
    served = f'{{"method": "eagle", "model": "{out}", "num_speculative_tokens": {run}}}'
    mapped = f" --speculative-token-map {out / 'token_map.pt'}" if config.vocabulary_size else ""
    return {
        "poss": f"PosS reads it with position_per_layer={run}, forward_num_total={run * layers}",
        "vllm": f"vLLM reads it with --speculative-config '{served}'",
        "sglang": f"SGLang reads it with --speculative-algorithm EAGLE --speculative-draft-model-path {out}{mapped}",
    }.get(to, f"EAGLE reads it as ea_model_path={out}")
