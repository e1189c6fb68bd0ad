"""What the benchmarks share: medians of seconds, and the peak of tensor allocations."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile


def once(work: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of one run, of a GPU that had nothing else to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds(work: Callable[[], object], times: int, device: str = "cpu") -> float:
    """Median of some runs after one that is not counted."""
    work()
    return median(once(work, device) for _ in range(times))


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(shares).tolist()
    return {"median": middle, "low": low, "high": high}


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int:
    """Most bytes of tensors that `work` had allocated at once, beyond what was there before; it runs twice."""
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
