"""A training by transformers' Trainer, recorded: a client's part of a round, or epoch by epoch.

::

    rec = fldiag.Recorder("runs/mine", net)
    Trainer(net, ..., callbacks=[huggingface.callback(rec, client=3)]).train()    # one for every client of a round
    rec.round(aggregated=averaged)
"""

from __future__ import annotations

from typing import Any

from fldiag.errors import FldiagError
from fldiag.integrations.recorder import Recorder


def callback(recorder: Recorder, client: int | None = None) -> Any:
    """A ``TrainerCallback``.

    With ``client``, the weights at the start of training are what the client received, and those at its end, with the last
    numbers that were logged, what it made of them; ``recorder.round(aggregated=...)`` then writes the round. Without, every
    epoch is a round of its own.

    Raises FldiagError when transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise FldiagError(
            "transformers is not installed", "pip install 'fldiag[transformers]'"
        ) from None

    class RecordingTrainerCallback(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
        ) -> None:
            if state.is_world_process_zero:
                recorder.received(model)

        def on_epoch_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
        ) -> None:
            if client is None and state.is_world_process_zero:
                recorder.round(aggregated=model, metrics=_logged(state))

        def on_train_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any
        ) -> None:
            if client is not None and state.is_world_process_zero:
                recorder.client(client, model, metrics=_logged(state))

    return RecordingTrainerCallback()


def _logged(state: Any) -> dict[str, Any]:
    """The last value of every number that the Trainer logged."""
    return {
        name: value
        for entry in state.log_history
        for name, value in entry.items()
        if name not in ("step", "epoch")
    }
