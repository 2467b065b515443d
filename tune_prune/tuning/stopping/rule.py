"""What decides, after every stage of a trial, whether the trial goes on."""

from __future__ import annotations

from tune_prune.tuning.messages import TrialMessage


class StoppingRule:
    """Stops no trial: what a search without early stopping has, and what the others override."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # why a trial was stopped, by its key, for the ledger

    def stops(self, message: TrialMessage) -> bool:
        """Whether the trial ends here, though it could go on. If so, its reason stands in `reasons`."""
        return False

    def forget(self, key: str) -> None:
        """A trial has failed: what it has measured so far stops no other, as it will never be the best."""
