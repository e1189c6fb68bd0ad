"""Features from vLLM, for targets on any number of GPUs: `poss extract --engine vllm`.

vLLM reads the texts, and its workers write the outputs of decoder layers to one file per text (`connector.py`). The
rest is ours: the final norm, the head, the order of texts, what is kept and how.
"""

import copy
import fcntl
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from poss_lightning.features.shards import TargetReader, TextFeatures
from poss_lightning.serving.plugin import warn_of_version
from poss_lightning.target_model.model import Target
from poss_lightning.terminal import announced

LOCK_SUFFIX = ".lock"  # after the name of a file: held by the worker until the file is complete
PROBE_TOKENS = 24  # from all over the vocabulary, of the text on which engine and target are compared
Engine = Callable[[list[list[int]]], list[str]]  # reads texts; returns the file of each


class EngineReader:
    """Features of an engine that writes the outputs of decoder layers.

    Args:
        target: as loaded on the CPU. Its layers stay there and read one short text, to compare; embedding, head and
            final norm move to `device`.
        layers: inner layers that are kept, too.
        start: starts the engine, which writes the outputs of the layers it is given, counted from 1, ascending.
        device: where features are normed and the head is multiplied.
    """

    def __init__(
        self,
        target: Target,
        layers: tuple[int, ...],
        start: Callable[[tuple[int, ...]], Engine],
        device: str | torch.device = "cpu",
    ):
        self.target, self.layers = target, layers
        self.written = tuple(sorted({*layers, target.config.num_hidden_layers}))
        self._norm = copy.deepcopy(final_norm(target))
        probe = [i * target.spec.vocab_size // PROBE_TOKENS for i in range(min(PROBE_TOKENS, target.spec.context))]
        expected = TargetReader(target, layers).read([probe])
        self._engine = start(self.written)
        for name, theirs, ours in zip(TextFeatures._fields, self.read([probe]), expected, strict=True):
            _check_alike(name, theirs, ours)
        self._norm.to(device)
        target.embed_head.to(device)

    @torch.inference_mode()
    def read(self, texts: list[list[int]]) -> TextFeatures:
        shape = (len(self.written), self.target.spec.hidden_size)
        files = self._engine(texts)
        states = [read_states(file, text, shape, self.target.dtype) for file, text in zip(files, texts, strict=True)]
        joined = torch.cat(states).to(self.target.device)  # (tokens, written layers, D)
        kept = [self.written.index(layer) for layer in self.layers]
        return TextFeatures(self._norm(joined[:, -1]), joined[:, kept])


def final_norm(target: Target) -> nn.Module:
    """Return the module whose output are the target's features; NotImplementedError without one."""
    outputs: list[tuple[nn.Module, object]] = []
    with (
        torch.inference_mode(),
        register_module_forward_hook(lambda module, _, output: outputs.append((module, output))),
    ):
        features = target.text_features(torch.zeros(1, 1, dtype=torch.long, device=target.device))
    norm = next((module for module, output in outputs if output is features), None)
    if norm is None:
        raise NotImplementedError(f"target {target.spec.name!r} has no final norm: extract without --engine")
    return norm


def read_states(file: str, text: list[int], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Read the states (T, layers, D) of a text from its file, which is removed; waits until it is complete."""
    try:
        with open(f"{file}{LOCK_SUFFIX}") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        content = load_file(file)
        states, tokens = content["hidden_states"], content["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"vLLM left no complete file of states at {file} ({error}): its log says why") from error
    Path(file).unlink()
    Path(f"{file}{LOCK_SUFFIX}").unlink()
    expected = (len(text), *shape)
    if (tuple(states.shape), states.dtype) != (expected, dtype):
        raise ValueError(
            f"vLLM gave states {tuple(states.shape)} of {states.dtype}; they must be {expected} of {dtype}"
        )
    if tokens.tolist() != text:
        raise ValueError(f"vLLM gave the states of a different text: {file}")
    return states


def _check_alike(name: str, theirs: Tensor, ours: Tensor) -> None:
    """Raise ValueError where the engine's model is not the target; bounds are those of `Target`'s own checks."""
    distance = (theirs.float() - ours.float()).norm() / ours.float().norm().clamp(min=torch.finfo(torch.float32).tiny)
    if not distance <= (1e-3 if ours.dtype == torch.float32 else 5e-2):
        raise ValueError(f"vLLM's {name} of a short text are not the target's (relative distance {distance:.1g})")


def vllm_reader(
    target: Target, layers: tuple[int, ...], *, max_length: int, tensor_parallel: int, device: str
) -> EngineReader:
    """Make a reader whose engine is vLLM, in processes of its own.

    Args:
        max_length: tokens of the longest text; the target's context at most.
        tensor_parallel: GPUs that each layer is split over.
    """
    start = partial(Vllm, target, longest=min(max_length, target.spec.context), tensor_parallel=tensor_parallel)
    with announced("starting vLLM"):
        return EngineReader(target, layers, start, device)


class Vllm:
    """Reads texts with vLLM and returns the file of each; its processes end with this one."""

    def __init__(self, target: Target, written: tuple[int, ...], longest: int, tensor_parallel: int):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no request to the outside
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # files are written while this process waits for them
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the token after a text is drawn, and never read
        try:
            import vllm  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(f"engine is 'vllm', which cannot be imported here ({error}): pip install vllm") from error
        warn_of_version()
        self._folder = tempfile.TemporaryDirectory(prefix="poss-states-")
        self._one_token = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self._model = vllm.LLM(
            target.model.name_or_path,
            skip_tokenizer_init=True,
            load_format="safetensors",
            dtype=target.dtype_name,
            tensor_parallel_size=tensor_parallel,
            max_model_len=longest + 1,
            gpu_memory_utilization=0.85,  # the rest is for embedding, head and logits
            enforce_eager=True,  # texts have all lengths, and nothing is decoded
            enable_prefix_caching=False,  # the states of a cached prefix would not be computed
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(written)}},
            },
            kv_transfer_config={
                "kv_connector": "FeatureConnector",
                "kv_connector_module_path": "poss_lightning.serving.connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": self._folder.name},
            },
        )

    def __call__(self, texts: list[list[int]]) -> list[str]:
        prompts = [{"prompt_token_ids": text} for text in texts]
        outputs = self._model.generate(prompts, self._one_token, use_tqdm=False)
        return [output.kv_transfer_params["hidden_states_path"] for output in outputs]
