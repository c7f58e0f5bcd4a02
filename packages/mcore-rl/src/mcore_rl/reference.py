"""The policy that the run started from, which the trained one is to stay near."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from mcore_ckpt.addresses import Place
from mcore_inference import load_weights
from mcore_models import build_model
from mcore_parallel import RngKey
from mcore_rl.batch import PolicyBatch
from mcore_rl.config import RLConfig
from mcore_rl.engines import DTYPES
from mcore_rl.log_probs import LogProbs
from mcore_rl.objective import token_log_probs
from mcore_train import Session
from mcore_train.step import run_forward


class ReferencePolicy:
    """A frozen copy of the model in the trainer's layout.

    Its weights are those of the checkpoint `source`, or the random ones that the seed gives. All
    ranks construct it and make the same calls.
    """

    def __init__(
        self, config: RLConfig, session: Session, rule: LogProbs, source: Place | None
    ) -> None:
        self.session = session
        self.rule = rule
        self.model = build_model(
            config.model,
            session.mesh,
            kernels=config.kernels,
            dtype=DTYPES[config.precision],
            key=RngKey(config.seed) if source is None else None,
        ).eval()
        if source is not None:
            load_weights(self.model, source)

    def attach(self, batches: Sequence[PolicyBatch]) -> list[PolicyBatch]:
        """Return the micro-batches with their log-probabilities under the reference policy.

        Only the last pipeline stage has them, which is where the loss is computed.
        """

        def end(batch: PolicyBatch, hidden: Tensor | None) -> Tensor:
            return token_log_probs(self.model, batch, hidden, rule=self.rule)

        found = run_forward(self.session, self.model, batches, end)
        if not self.session.mesh.is_last_stage:
            return list(batches)
        return [
            dataclasses.replace(batch, reference=values)
            for batch, values in zip(batches, found, strict=True)
        ]
