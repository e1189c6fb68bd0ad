"""A stand-in for a serving engine: the target itself, which writes the files that vLLM's workers write."""

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
from safetensors.torch import save

from poss_lightning.target_model.model import Target

Content = dict[str, torch.Tensor]


@dataclass
class NaiveEngine:
    """States of decoder layers, a file a text."""

    target: Target  # that is read, text by text
    folder: Path  # for the files
    written: tuple[int, ...]  # layers, counted from 1
    made: Callable[[Content], bytes | None] = save  # a file, or None
    seconds: float = 0  # that a file takes, with its lock held
    count: int = 0

    def __call__(self, texts: list[list[int]]) -> list[str]:
        return [self.start(text) for text in texts]

    def start(self, text: list[int]) -> str:
        self.count += 1
        file = str(self.folder / f"{self.count}.safetensors")
        content = self.made({"hidden_states": self.states(text), "token_ids": torch.tensor(text)})
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        Thread(target=self.write, args=(file, content, lock)).start()
        return file

    def states(self, text: list[int]) -> torch.Tensor:
        """(T, layers, D): caught as they leave the decoder layers."""
        caught: list[torch.Tensor] = []
        layers = self.target.backbone.layers
        hooks = [layer.register_forward_hook(lambda *given: caught.append(given[-1][0])) for layer in layers]
        with torch.inference_mode():
            self.target.text_features(torch.tensor([text]))
        for hook in hooks:
            hook.remove()
        return torch.stack([caught[number - 1] for number in self.written], dim=1)

    def write(self, file: str, content: bytes | None, lock: int) -> None:
        time.sleep(self.seconds)
        if content is not None:
            Path(file).write_bytes(content)
        os.close(lock)
