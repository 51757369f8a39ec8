"""How many replicas a model wants: by the calls that run or wait, and the prompt tokens that wait.

Serve's controller runs a copy of this, which may import nothing of infercore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

WAITING = "waiting_tokens"
"""What a replica reports: prompt tokens of calls that wait for them to be evaluated."""


class ByCallsAndTokens:
    """A policy of Serve: whichever of the two wants more replicas."""

    def __init__(self, *, target_waiting_tokens: float) -> None:
        self._target = target_waiting_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas that is wanted, and no state."""
        if context.current_num_replicas == 0:  # Serve itself starts the first one
            return context.target_num_replicas, {}
        metrics = context.aggregated_metrics or {}
        by_calls = context.total_num_requests / context.config.get_target_ongoing_requests()
        by_tokens = sum(metrics.get(WAITING, {}).values()) / self._target
        return max(by_calls, by_tokens), {}
