"""When, where and with what a run was made, for the file beside its records."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch


def surroundings(device: torch.device) -> dict:
    """When, where and with what a run was made."""
    packages = ("poss-lightning", "torch", "transformers", "lightning", "torchmetrics", "datasets")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "git": _git(),
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git() -> str | None:
    if not shutil.which("git"):
        return None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
