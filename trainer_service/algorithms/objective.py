"""The loss of one optimizer step, as the backend calls it for each micro-batch.

Called by the trainer's loop:

    plan = plan_step(groups, algorithm, microbatch_tokens=..., longest_answer=...)
    objective = Objective(algorithm, version, plan)
    backend.step(plan.microbatches, objective)
    objective.metrics()
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leeway.algorithm import AlgorithmConfig, KlPlace, Proximal
from leeway.errors import DataError
from trainer_service.algorithms.correction import (
    correct,
    proximal_logprobs,
    second_moment_bound,
)
from trainer_service.algorithms.diagnostics import TokenSums, token_sums
from trainer_service.algorithms.kl import kl
from trainer_service.algorithms.policy_loss import token_losses
from trainer_service.algorithms.tokens import Sequences, log_ratio, select
from trainer_service.packed import PackedBatch, StepPlan


class Objective:
    """A policy loss with its correction and what is added to it; the `Loss` that a backend calls.

        loss = sum over tokens of weight (w (policy loss + kl) - entropy_coefficient H)

    Each call returns a micro-batch's share of it and adds to the diagnostics, so use one object for
    each step.
    """

    def __init__(
        self, algorithm: AlgorithmConfig, version: int, plan: StepPlan | None = None
    ) -> None:
        """
        Args:
            version: The trainer's at the start of the batch.
            plan: The step; only `second_moment` looks at it as a whole.

        Raises:
            DataError: `second_moment` is set and the plan lacks the start's log-probabilities.
        """
        self._algorithm = algorithm
        self._version = version
        self._largest = np.inf
        if algorithm.second_moment is not None:
            self._largest = second_moment_bound(_off_policy(plan), algorithm.second_moment)
        self.sums = TokenSums()
        # For the record: each micro-batch, and its tokens' scores when they were learned from.
        self.scored: list[tuple[PackedBatch, npt.NDArray[np.float32]]] = []

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The scalar loss.

        Args:
            logprobs: float [n], carry the gradient.
            entropy: float [n], with gradient; used by `entropy_coefficient`.
        """

        def tensor(values: npt.NDArray[Any]) -> Tensor:
            return torch.as_tensor(values, device=logprobs.device)

        algorithm = self._algorithm
        behaviour, advantages = tensor(batch.behaviour), tensor(batch.advantages)
        staleness = self._version - tensor(batch.versions)
        current = logprobs.detach()
        self.scored.append((batch, current.float().cpu().numpy()))
        start = current if batch.proximal is None else tensor(batch.proximal)
        proximal = proximal_logprobs(algorithm.proximal, current, start, behaviour, staleness)
        valid = torch.ones_like(staleness, dtype=torch.bool)
        for values in (current, start, proximal, behaviour, advantages, entropy.detach()):
            valid = valid & values.isfinite()
        reference = None
        if algorithm.needs_reference:
            if batch.reference is None:
                raise DataError("algorithm.kl: the batch lacks the reference's log-probabilities")
            scores = tensor(batch.reference)
            valid = valid & scores.isfinite()
            reference = log_ratio(logprobs, scores, valid)
            if algorithm.kl.place is KlPlace.ADVANTAGE:
                advantages = advantages - algorithm.kl.coefficient * reference.detach()
        sequences = Sequences(tensor(batch.sequences), valid)

        anchored = algorithm.proximal is Proximal.BEHAVIOUR
        off_policy = log_ratio(start if anchored else proximal, behaviour, valid)
        correction = correct(algorithm, off_policy, advantages, valid, sequences, self._largest)
        losses = token_losses(algorithm.policy, logprobs, proximal, advantages, valid, sequences)
        per_token = losses.loss
        if reference is not None and algorithm.kl.place is KlPlace.LOSS:
            per_token = per_token + algorithm.kl.coefficient * kl(algorithm.kl.estimator, reference)
        per_token = correction.applied * per_token
        if algorithm.entropy_coefficient:
            per_token = per_token - algorithm.entropy_coefficient * select(valid, entropy)
        loss = (tensor(batch.weights) * per_token).sum()
        self.sums += token_sums(
            loss=loss,
            losses=losses,
            correction=correction,
            weights=correction.applied * (losses.ratio if anchored else 1.0),
            off_policy=off_policy,
            reference=None if reference is None else reference.detach(),
            entropy=entropy.detach(),
            mask=torch.ones_like(valid),
            valid=valid,
            fresh=staleness == 0,
            sequences=sequences,
        )
        return loss

    def metrics(self) -> dict[str, float]:
        """Over all micro-batches so far; names in `TokenSums.metrics`, bounds in `ALERTS`."""
        return self.sums.metrics()


def _off_policy(plan: StepPlan | None) -> npt.NDArray[np.float32]:
    """log pi_start - log pi_behav of all packed tokens of a step."""
    batches = () if plan is None else plan.microbatches
    logs = [batch.proximal - batch.behaviour for batch in batches if batch.proximal is not None]
    if plan is None or len(logs) < len(batches):
        raise DataError(
            "algorithm.second_moment: the step lacks the log-probabilities at the start of the "
            "batch; score it first"
        )
    return np.concatenate(logs) if logs else np.zeros(0, dtype=np.float32)
