"""The evaluation of a recorded round's global model: what keeps it from being made is said, and ends nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fldiag.data import Dataset
from fldiag.errors import FldiagError, error_text
from fldiag.models.network import Network
from fldiag.models.state_dict import State
from fldiag.results.table import Row
from fldiag.runs.in_memory import as_logits, with_packed_inputs
from fldiag.training.evaluate import evaluate_state


class Evaluation:
    """Evaluates the states of a model on a data set.

    ``note``: gets how, where that is not plain. ``fail``: gets why a state cannot be evaluated, every reason once.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        note: Callable[[str], None],
        fail: Callable[[str], None],
    ):
        self.dataset, self.fail = dataset, fail
        self.network: Network | None = None
        self.reasons: set[str] = set()
        try:
            model, text = as_logits(with_packed_inputs(module, dataset), dataset)
            self.network = Network(model)
        except Exception as error:  # the user's model may raise anything
            self._fail(error)
            return
        if dataset.dense:
            text = (
                "the targets are labels of positions (tokens, pixels): the loss after every round is the mean cross entropy of "
                "an example's positions, and no accuracy is measured"
            )
        elif dataset.regression:
            text = "the targets are numbers: the loss after every round is half the squared error"
        if text is not None:
            note(text)

    def rows(self, state: State) -> list[Row]:
        """Loss and accuracy of the model with this state; nothing where it cannot be evaluated."""
        if self.network is None:
            return []
        try:
            return evaluate_state(self.network, state, self.dataset)
        except (
            Exception
        ) as error:  # the user's model may raise anything, and what is recorded must not end for it
            self._fail(error)
            return []

    def _fail(self, error: Exception) -> None:
        reason = error.what if isinstance(error, FldiagError) else error_text(error)
        if reason not in self.reasons:
            self.reasons.add(reason)
            self.fail(f"the global model could not be evaluated: {reason}")
