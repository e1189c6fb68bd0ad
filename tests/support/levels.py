"""Runs the tests that multiply as CPUs of each lower level would: `make test-all`. A line for each level.

oneDNN and torch choose instructions by what the CPU has, and these two variables say that it has less.
"""

import os
import re
import subprocess
import sys

import torch

LEVELS = {  # of oneDNN, with that of torch, and whether this CPU has more
    "AVX2": ("avx2", torch.cpu._is_avx512_supported),
    "AVX512_CORE": ("avx512", torch.cpu._is_avx512_bf16_supported),
    "AVX512_CORE_BF16": ("avx512", torch.cpu._is_amx_tile_supported),
}
MULTIPLY = ("test_prepack.py", "test_losses.py", "draft", "decoding", "target_model", "features/test_online.py")
MULTIPLY += ("training/test_training.py", "training/test_pretended_training.py", "training/test_strategies.py")


def main() -> int:
    """Return how many levels have a test that fails."""
    failed, command = 0, [sys.executable, "-m", "pytest", "-q", "-n", "auto", *(f"tests/{name}" for name in MULTIPLY)]
    for level, (capability, has_more) in LEVELS.items():
        if has_more():
            limits = {"ONEDNN_MAX_CPU_ISA": level, "ATEN_CPU_CAPABILITY": capability}
            run = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True)
            wrong = re.findall(r"^(?:FAILED|ERROR) .*", run.stdout, re.MULTILINE)
            print(f"{level}: {run.stdout.splitlines()[-1]}", *wrong, sep="\n    ", flush=True)
            failed += bool(run.returncode)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
