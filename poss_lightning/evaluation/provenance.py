"""When, where and with what a run was made, and of which draft: facts for its run.json."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from poss_lightning.decoding.decoder import Decoder
from poss_lightning.decoding.drafting import TreeDrafter
from poss_lightning.decoding.engine import Speculative
from poss_lightning.draft.config import SWITCHES, DraftConfig
from poss_lightning.draft.folder import WEIGHTS
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.evaluation.suites import local_files
from poss_lightning.features.manifest import MANIFEST
from poss_lightning.files import sha256
from poss_lightning.machine import choose_precision
from poss_lightning.versions import versions

# Fields of a `DraftConfig` that run.json has where they are not the default.
OPTIONAL = ("intermediate_size", "window", *SWITCHES, "block_layers", "inner_layers")


def provenance(device: torch.device) -> dict:
    """Describe when, where and with what a run was made, its device and threads included."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {**origin(), "device": name, "threads": torch.get_num_threads()}


def origin() -> dict:
    """Return when this process began, on which machine, and with which code."""
    return {
        "started": STARTED,
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": versions(),
        "git": COMMIT,
    }


def describe_draft(draft: DraftModel) -> dict:
    """Return what a draft was trained for, its size, and a digest of its weights."""
    config, digest = draft.config, hashlib.sha256()
    for _, tensor in sorted(draft.state_dict().items()):
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    options = {name: getattr(config, name) for name in OPTIONAL}
    return {
        "allocation": list(config.allocation),
        **{name: value for name, value in options.items() if value != getattr(DraftConfig, name)},
        "kv": config.kv,
        "kind": config.kind,
        "training_depth": config.depth,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "weights": digest.hexdigest()[:16],
    }


def describe_drafter(drafter: TreeDrafter) -> dict:
    """Return what a draft proposes in a round, and the draft."""
    return {**asdict(drafter.plan), "depth": drafter.plan.reach, **describe_draft(drafter.specialists)}


def describe_method(method: Decoder) -> dict:
    """Describe how a method drafts, and with what; {} where it has no draft."""
    if not isinstance(method, Speculative) or not isinstance(drafter := method.drafter, TreeDrafter):
        return {}
    return describe_drafter(drafter)


def describe_inputs(training: dict[str, Any], start: Path | None, measure: dict[str, Any]) -> dict[str, str]:
    """Digests of the local files that a training and its measure are made from: stores, text, and the draft's start."""
    data, trainer = training["data"], training["trainer"]
    lists = data["store"], measure.get("suites")
    stores, suites = ([given] if isinstance(given, str) else given or [] for given in lists)
    files = {store: Path(store) / MANIFEST for store in (*stores, measure.get("store")) if store}
    files |= {str(file): file for suite in suites for file in local_files(suite)}
    files |= {data["corpus"]: Path(data["corpus"])} if data["corpus"] else {}
    files |= {training["model"]["start_from"]: start / WEIGHTS} if start else {}
    digests = {name: sha256(file) for name, file in files.items() if file.is_file()}
    if (precision := trainer["precision"]) == "auto":  # which depends on the machine
        precision = choose_precision(str(trainer["accelerator"]))
    return digests | {"trainer.precision": precision}


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", facts.read_text()) if facts.exists() else None
    return named[1].strip() if named else platform.processor()


def _commit(package: Path) -> str | None:
    """Return the commit of the checkout; of a copy without git, what `git describe` put into its commit.txt."""
    if shutil.which("git"):
        git = ["git", "-C", str(package)]
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=False)
        if not tracked.returncode:  # else installed, perhaps inside the repository of another project
            described = [*git, "describe", "--always", "--dirty"]
            return subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip() or None
    note = package / "commit.txt"
    return note.read_text().strip() if note.is_file() else None


# When the code was loaded: the checkout may change before a long run writes its results.
STARTED, COMMIT = datetime.now(UTC).isoformat(timespec="seconds"), _commit(Path(__file__).parents[1])
