"""Which target, and where it computes: the one place that declares and explains these options, for every command."""

from dataclasses import dataclass
from typing import Any

from poss_lightning.target_model.loading import Parallel
from poss_lightning.target_model.model import Target


@dataclass(frozen=True)
class TargetOptions:
    """A target, and where and in what it computes.

    Args:
        target: "embedded", a local folder or a hub id.
        dtype: auto (what this device multiplies fastest), bfloat16, float16 or float32.
        device: auto (cuda, else mps, else cpu), or one of these; of several ranks on a machine, cuda gives each a GPU
            of its own.
        parallel: none, where the target fits one device; layers spreads it over all GPUs of this process.
        chat_template_kwargs: variables of the target's chat template, as '{"enable_thinking": false}'.
    """

    target: str = "embedded"
    dtype: str = "auto"
    device: str = "auto"
    parallel: Parallel = "none"
    chat_template_kwargs: dict[str, Any] | None = None

    def load(self, exact: bool | None = None) -> Target:
        """Load the target; `exact`, and what it raises, as `Target.load`."""
        return Target.load(
            self.target,
            self.dtype,
            self.device,
            self.parallel,
            chat_template_kwargs=self.chat_template_kwargs,
            exact=exact,
        )
