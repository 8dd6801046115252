"""A training by Lightning's Trainer, recorded: a client's part of a round, or epoch by epoch.

::

    rec = fldiag.Recorder("runs/mine", module)
    Trainer(..., callbacks=[lightning.callback(rec, client=3)]).fit(module, loader)    # one for every client of a round
    rec.round(aggregated=averaged)
"""

from __future__ import annotations

from typing import Any

from fldiag.errors import FldiagError
from fldiag.integrations.recorder import Recorder


def callback(recorder: Recorder, client: int | None = None) -> Any:
    """A ``Callback`` of Lightning (the package lightning or pytorch_lightning).

    With ``client``, the weights at the start of fitting are what the client received, and those at its end, with the numbers
    that were logged, what it made of them; ``recorder.round(aggregated=...)`` then writes the round. Without, every training
    epoch is a round of its own.

    Raises FldiagError when Lightning is not installed.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise FldiagError(
                "Lightning is not installed", "pip install 'fldiag[lightning]'"
            ) from None

    class RecordingCallback(Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                recorder.received(module)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if client is None and trainer.is_global_zero:
                recorder.round(aggregated=module, metrics=_logged(trainer))

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            if client is not None and trainer.is_global_zero:
                recorder.client(client, module, metrics=_logged(trainer))

    return RecordingCallback()


def _logged(trainer: Any) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
