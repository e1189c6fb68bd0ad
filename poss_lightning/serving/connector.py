"""Runs inside vLLM's workers: writes the hidden states of finished texts to files, on any device.

vLLM's example connector finds the states in the cache and says where each file will be, but copies them on CUDA streams
and reports a text before its file is written. Here both happen at once. Written against vLLM 0.32.
"""

# pyright: reportMissingImports=false
import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class FeatureConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` (T, layers, D) and `token_ids` (T,) of each text, then frees the lock beside the file."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write the texts that the scheduler calls finished; then their blocks may be reused."""
        if not self._is_tp_rank_zero or not self.has_connector_metadata():
            return None, None
        finished = self._get_connector_metadata().pending_saves
        for pending in finished:
            self._write(pending)
        return {pending.req_id for pending in finished} or None, None

    def _write(self, pending: PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        slots = slots.to(self._kv_cache.device)
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).cpu()  # (T, layers, D)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
