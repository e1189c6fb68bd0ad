"""A run as one row of TensorBoard's HPARAMS tab: its hyper-parameters, and the acceptance of its draft.

The summaries are made here and not by a writer's `add_hparams`, which starts another run for every row.
"""

# Protobuf makes its classes at run time.
# pyright: reportAttributeAccessIssue=false

import time

import lightning
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

from poss_lightning.features.datamodule import FeatureData
from poss_lightning.training.flops import count_parameters
from poss_lightning.training.module import SpecialistTraining

ARGUMENTS = (
    "optimizer",
    "learning_rate",
    "warmup",
    "weight_decay",
    "gamma",
    "mean_over",
)
FIRST = ("allocation", "start_from", "loss", "optimizer", "learning_rate")  # runs mostly differ in these

Hyperparameters = dict[str, str | float]


def collect(trainer: lightning.Trainer, training: SpecialistTraining) -> Hyperparameters:
    """All hyper-parameters of a run, also those at their defaults: TensorBoard takes its columns from any one run."""
    config, data = training.draft.config, trainer.datamodule
    values = {
        "allocation": str(list(config.allocation)),
        "detach": str(config.detach),
        "kv": config.kv,
        "kind": config.kind,
        "layers": config.layer_count,
        "anchors": training.hparams["anchors"] or "all",
        "intermediate_size": config.intermediate_size or config.target.intermediate_size,
        "vocabulary_size": config.vocabulary_size or config.target.vocab_size,
        "parameters": count_parameters(config),
        "start_from": training.hparams["start_from"] or "random weights",
        "steps": trainer.estimated_stepping_batches,
        "loss": ", ".join(f"{name} {weight:g}" for name, weight in training.loss_weights.items()),
        "slot_weights": training.hparams["slot_weights"] or "all alike",
        "normalise": str(training.hparams["normalise"]),
    }
    if isinstance(data, FeatureData):
        tokens = data.batch_tokens * trainer.world_size * trainer.accumulate_grad_batches
        values |= {"conversations": len(data.train), "step_tokens": tokens, "noise": data.noise}
    return values | {name: training.hparams[name] for name in ARGUMENTS}


def start_summaries(values: Hyperparameters, depth: int) -> list[Summary]:
    """Summaries for the start of a run: the table's columns, and the run's values.

    The table also has τ and pos-acc, which TensorBoard takes from the newest scalars.
    """
    columns = [api_pb2.HParamInfo(name=name, type=_kind(value)) for name, value in values.items()]
    for column in columns:
        column.differs = column.name in FIRST  # such columns stand first; TensorBoard shows five at first
    scalars = {"val/tau_tree": "τ, trees"}
    scalars |= {f"val_pos_acc_tree/depth_{k}": f"pos-acc {k}, trees" for k in range(1, depth + 1)}
    scalars |= {"val/tau_chain": "τ, chains", "val/loss": "loss"}
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=text) for tag, text in scalars.items()]
    experiment = api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics)
    session = SessionStartInfo(start_time_secs=time.time())
    for name, value in values.items():
        field = "string_value" if isinstance(value, str) else "number_value"
        setattr(session.hparams[name], field, value)
    return [
        _summary(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)),
        _summary(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=session)),
    ]


def end_summary() -> Summary:
    """Says that a run has ended."""
    done = SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=done))


def _kind(value: str | float) -> int:
    return api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64


def _summary(tag: str, content: HParamsPluginData) -> Summary:
    data = metadata.create_summary_metadata(content)
    return Summary(value=[Summary.Value(tag=tag, metadata=data, tensor=metadata.NULL_TENSOR)])
