"""A stand-in for a serving engine: the target itself, which writes the files that vLLM's workers write."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import torch
from safetensors.torch import save_file

from poss_lightning.target.model import Target

Content = dict[str, torch.Tensor]


class NaiveEngine:
    """States of decoder layers, a file a text.

    Args:
        target: that is read; text by text.
        folder: for the files.
        written: layers, counted from 1.
        change: of what is written for a text; None for nothing.
        seconds: that a file takes, with its lock held.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        written: tuple[int, ...],
        change: Callable[[Content], Content | None] = lambda content: content,
        seconds: float = 0,
    ):
        self.target, self.folder, self.written = target, folder, written
        self.change, self.seconds, self.count = change, seconds, 0

    def __call__(self, texts: list[list[int]]) -> list[str]:
        files = []
        for text in texts:
            self.count += 1
            file = str(self.folder / f"{self.count}.safetensors")
            content = self.change({"hidden_states": self.states(text), "token_ids": torch.tensor(text)})
            lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            Thread(target=self.write, args=(file, content, lock)).start()
            files.append(file)
        return files

    def states(self, text: list[int]) -> torch.Tensor:
        """(T, layers, D): caught as they leave the decoder layers."""
        caught = {}
        layers = self.target.model.base_model.layers
        hooks = [
            layer.register_forward_hook(lambda module, inputs, output, n=n: caught.update({n: output}))
            for n, layer in enumerate(layers, 1)
        ]
        with torch.inference_mode():
            self.target.text_features(torch.tensor([text]))
        for hook in hooks:
            hook.remove()
        return torch.stack([caught[layer][0] for layer in self.written], dim=1)

    def write(self, file: str, content: Content | None, lock: int) -> None:
        time.sleep(self.seconds)
        if content is not None:
            save_file({name: tensor.contiguous() for name, tensor in content.items()}, file)
        os.close(lock)
