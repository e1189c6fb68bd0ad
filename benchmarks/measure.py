"""What the benchmarks share: seconds of works in turn, peaks of tensor memory, and the report of figures."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from poss_lightning.evaluation.provenance import provenance
from poss_lightning.files import atomic
from poss_lightning.machine import timed

Work = Callable[[], object]


def in_turn(works: Mapping[str, Work], times: int, device: str = "cpu", warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every run of each work, in an order that rotates, after runs that are not counted."""
    names, runs = [*works], []
    for _ in range(warmup + times):
        runs.append({name: timed(works[name], device) for name in names})
        names = [*names[1:], names[0]]
    return {name: [run[name] for run in runs[warmup:]] for name in works}


def seconds(work: Work, times: int, device: str = "cpu") -> float:
    """Median of some runs after one that is not counted."""
    return median(in_turn({"work": work}, times, device)["work"])


def ratios(times: Mapping[str, list[float]], above: str, below: str) -> list[float]:
    """Seconds of the work `above` over those of `below`, run by run."""
    return [a / b for a, b in zip(times[above], times[below], strict=True)]


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile."""
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9]).tolist()
    return {"median": middle, "low": low, "high": high}


def peak_bytes(work: Work, device: str = "cpu") -> int:
    """Most bytes of tensors that `work` allocated at once, beyond what was there before; it runs twice."""
    work()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def compare_steps(steps: Mapping[str, Work], pairs: int, device: str) -> dict[str, Any]:
    """Seconds and `peak_bytes` of training steps: of ours, the first, and of what it is compared with."""
    times = in_turn(steps, pairs, device)
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
    ours, *others = steps
    found: dict[str, Any] = {
        "seconds": {name: median(own) for name, own in times.items()},
        "peak_megabytes": {name: peak / 1e6 for name, peak in peaks.items()},
    }
    for other in others:
        speed = ratios(times, other, ours)
        found |= {"speed_ratio": median(speed), "speed_ratio_of_each_pair": sorted(round(ratio, 2) for ratio in speed)}
        found["memory_ratio"] = peaks[ours] / peaks[other]
    return found


# --- reports ---


def report(figures: Mapping[str, Any], out: str, device: torch.device | str) -> None:
    """Print figures, and write them."""
    show(figures)
    write(out, figures, device)


def write(out: str | Path, figures: Mapping[str, Any], device: torch.device | str) -> None:
    """Write figures as JSON, with the machine, versions and commit."""
    with atomic(out) as path:
        path.write_text(json.dumps({**provenance(torch.device(device)), **figures}, indent=1) + "\n")


def show(figures: Mapping[str, Any], indent: int = 2) -> None:
    """Print nested figures; those of one thing on one line where they are numbers."""
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            print(f"{' ' * indent}{name}")
            show(value, indent + 2)
        elif isinstance(value, dict):
            print(f"{' ' * indent}{name:<32} " + "  ".join(f"{key} {_number(inner)}" for key, inner in value.items()))
        else:
            print(f"{' ' * indent}{name:<32} {_number(value)}")


def _number(value: object) -> str:
    return format(value, ".4g") if isinstance(value, float) else str(value)
