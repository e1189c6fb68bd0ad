"""DeepSpeed's ZeRO, on GPUs and on CPU ranks over gloo, with the same checkpoints as other strategies.

With every strategy, a step's gradient is reduced once, after its last accumulated batch. A checkpoint is one plain
Lightning file with undivided float32 weights and AdamW moments, from which any strategy resumes, on any number of
processes. `load_draft` needs no process group.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from poss_lightning.draft.kinds import make_draft
from poss_lightning.draft.specialists import DraftModel
from poss_lightning.files import atomic

MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch.optim.AdamW
# How long a process waits for the others. Lightning's 30 minutes would end a training whose first process writes a
# checkpoint of 20 GB to a slow disk.
TIMEOUT = timedelta(hours=4)


def prepare(strategy: Strategy) -> None:
    """Set a trainer's timeout and its way to write checkpoints, before its processes connect."""
    if hasattr(strategy, "_timeout"):  # it runs several processes
        strategy._timeout = TIMEOUT  # pyright: ignore[reportAttributeAccessIssue]
    if type(strategy.checkpoint_io) is TorchCheckpointIO:  # not one that the user chose
        strategy.checkpoint_io = StreamedCheckpointIO()


def save_draft(draft: DraftModel, folder: Path, writes: bool) -> None:
    """Write the draft in training as a folder, undivided and in float32. All processes must call this; one `writes`."""
    state = gather_state(draft, keep=writes)
    if writes:
        _undivided(draft, state).save_pretrained(folder)


def gather_draft(draft: DraftModel, **place: Any) -> DraftModel:
    """Gather the undivided draft in every process; `place` is as `gather_state` takes it. All must call this.

    Tensors that are already like this are shared, not copied.
    """
    return _undivided(draft, gather_state(draft, **place))


def gather_state(
    module: nn.Module,
    keep: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Gather the undivided state of a module in training, weights in `dtype`. All processes must call this.

    A process that does not `keep` it takes part, tensor by tensor, and gets {}.
    """
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        undivided = _gather(value).detach()
        if keep:
            state[name] = undivided.to(device, dtype if undivided.is_floating_point() else undivided.dtype)
    return state


def _undivided(draft: DraftModel, state: dict[str, Tensor]) -> DraftModel:
    with torch.device("meta"):  # draws no random numbers
        undivided = make_draft(draft.config, state.get("vocabulary"))
    undivided.load_state_dict(state, assign=True)
    undivided.trained_on = draft.trained_on
    return undivided


def _gather(value: Tensor) -> Tensor:
    if hasattr(value, "ds_id") and not hasattr(value, "_z3_optimizer"):  # ZeRO-3 without an optimizer: a validation
        import deepspeed

        with deepspeed.zero.GatheredParameters([value]):
            return value.detach().float().clone()
    if hasattr(value, "ds_id") or hasattr(value, "_hp_mapping"):  # ZeRO's, which may be bfloat16
        from deepspeed.utils import safe_get_full_fp32_param

        full = safe_get_full_fp32_param(value)
        assert full is not None, "DeepSpeed knows no such parameter"
        return full
    return value


class StreamedCheckpointIO(TorchCheckpointIO):
    """Writes and reads a checkpoint tensor by tensor; Lightning's own would hold the complete file in memory."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        with atomic(path) as temporary:
            torch.save(checkpoint, temporary)

    def load_checkpoint(self, path: _PATH, map_location: Any = "cpu", weights_only: bool | None = None) -> dict:
        """Map the file into memory, of which the processes of a machine then share one copy."""
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)


class DeepSpeed(DeepSpeedStrategy):
    """ZeRO: the processes divide the optimizer's state (1), the gradients, too (2), and the weights, too (3).

    The optimizer is torch's AdamW, also where its state is offloaded. Gradients are clipped by norm.

    Args:
        stage: 1, 2 or 3.
        offload_optimizer: keep the optimizer's state, and take its step, on the CPU.
        offload_parameters: keep the weights on the CPU until they are used (stage 3).

    Raises:
        ValueError: offload_parameters below stage 3.
    """

    lightning_module: Any  # a `DraftModule`; Lightning's types of all four are optional
    parallel_devices: list[torch.device]
    model: Any  # a DeepSpeedEngine
    config: dict[str, Any]

    def __init__(
        self, stage: Literal[1, 2, 3] = 2, offload_optimizer: bool = False, offload_parameters: bool = False
    ) -> None:
        if offload_parameters and stage != 3:
            raise ValueError(f"offload_parameters is true at stage {stage}; only stage 3 divides the weights")
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            logging_batch_size_per_gpu=1,  # else Lightning asks the sampler, which has none
        )
        self.config["zero_force_ds_cpu_optimizer"] = False  # it is compiled, and not torch's AdamW
        self.reduction = ExitStack()  # postpones the reduction of accumulated gradients
        self.accumulates = False

    # --- on CPU ranks ---

    @property
    def on_cpu(self) -> bool:
        return self.parallel_devices[self.local_rank].type == "cpu"

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank) if self.on_cpu else super().root_device

    def setup_environment(self) -> None:
        if not self.on_cpu:
            return super().setup_environment()
        super(DeepSpeedStrategy, self).setup_environment()  # DeepSpeedStrategy's refuses the CPU

    def setup_distributed(self) -> None:
        if not self.on_cpu:
            return super().setup_distributed()
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())  # also on a machine with a GPU
        # It would compile an all-reduce in shared memory; gloo's is enough.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    # --- the step ---

    @property
    def overflowed(self) -> bool:
        """Return whether DeepSpeed skipped the last step because a gradient was not finite."""
        return bool(getattr(self.model.optimizer, "overflow", False))

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning accumulates, and if both did, the loss would be divided twice."""
        return False

    def _format_batch_size_and_grad_accum_config(self) -> None:
        super()._format_batch_size_and_grad_accum_config()
        self.config["gradient_accumulation_steps"] = 1

    def _setup_model_and_optimizer(self, model, optimizer, lr_scheduler=None):
        """Restore the float32 weights, which DeepSpeed copies from ones that it has rounded to bfloat16."""
        exact = gather_state(model)
        wrapped = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        for name, parameter in model.named_parameters():
            _fill(parameter, exact[name])
        return wrapped

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around the backward of an accumulated batch: gradients are not reduced before the step's last backward."""
        if not self.model.inside_no_sync_ctxt:
            self.reduction.enter_context(self.model.coalesce_grad_reduction())
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if not self.accumulates:
            self.reduction.close()  # reduces the accumulated gradients
        return loss

    # --- checkpoints: as Lightning writes them for one process ---

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        return gather_state(self.lightning_module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """AdamW's undivided state, on the first process; `optimizer` is ZeRO's wrapper of it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        adam, parameters = optimizer.optimizer, list(self.lightning_module.draft.parameters())
        group = {name: value for name, value in adam.param_groups[0].items() if name != "params"}
        steps = [moments["step"] for moments in adam.state.values()]
        state = {}
        for i, parameter in enumerate(parameters if steps else []):
            full = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
            if self.is_global_zero:
                moments = {name: moment.cpu() for name, moment in full.items() if moment is not None}
                state[i] = {"step": steps[0].cpu().clone(), **moments}
        return {"state": state, "param_groups": [group | {"params": list(range(len(parameters)))}]}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        super(DeepSpeedStrategy, self).save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        return super(DeepSpeedStrategy, self).load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Fill the weights of the forward, and the float32 shards that they are copied from."""
        import deepspeed

        state, parameters = checkpoint["state_dict"], dict(self.lightning_module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
            self.lightning_module.load_state_dict(state, strict=strict)
        for name, parameter in parameters.items():
            _fill(parameter, state[name])

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        zero: Any = self.optimizers[0]
        (saved,) = checkpoint["optimizer_states"]
        adam = zero.optimizer
        adam.param_groups[0].update({k: v for k, v in saved["param_groups"][0].items() if k != "params"})
        if not saved["state"]:
            return
        shards = zero.fp32_partitioned_groups_flat if self.zero_stage_3 else zero.single_partition_of_fp32_groups
        for shard in shards:
            empty = {name: torch.zeros_like(shard) for name in MOMENTS}
            adam.state[shard] = {"step": saved["state"][0]["step"].clone(), **empty}
        if not self.zero_stage_3:
            zero._lazy_init_hp_params_optimizer_state()
        for i, parameter in enumerate(self.lightning_module.draft.parameters()):
            for name in MOMENTS:
                _fill(parameter, saved["state"][i][name], name)


def _fill(parameter: Any, value: Tensor, state: str | None = None) -> None:
    """Write this process's part of `value` (undivided, float32) into ZeRO's copy of a parameter or AdamW's `state`."""
    if hasattr(parameter, "_z3_optimizer"):
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        size = parameter.ds_tensor.numel()
        padded = nn.functional.pad(value.flatten(), (0, size * world - value.numel()))
        parameter._z3_optimizer.set_local_hp_param(padded[rank * size : (rank + 1) * size], parameter, state)
    elif hasattr(parameter, "_hp_mapping"):
        parameter.set_full_hp_param(value, state)
