"""Whether a training that ended was one."""

from __future__ import annotations

import math

from fldiag.checkpoint.run import Run

#: A test loss so many times that of guessing is no trained model's, however far its clients overfit.
FAR = 10.0
#: So many times suffice when the accuracy is that of guessing, too.
SOME, CHANCE = 2.0, 1.5


def failure(run: Run) -> str | None:
    """Why the run failed, in a sentence: weights that are not finite, or a test loss far above that of guessing, ln C for
    C classes, which is about where training starts. None when it did not."""
    frame = run.metrics
    last = int(frame["round"].max())
    if run.status == "diverged":
        return f"diverged: the global weights are no longer finite after round {last}"
    test = frame[
        (frame["slice"] == "test") & (frame["round"] == last) & (frame["scope"] == "global")
    ]
    found = {str(m): float(v) for m, v in zip(test["metric"], test["value"], strict=True)}
    if "loss" not in found or "accuracy" not in found:  # regression, or no common model
        return None
    classes = int(run.checkpoint().manifest["classes"])
    guess, lost = math.log(max(classes, 2)), found["accuracy"] <= CHANCE / classes
    if found["loss"] > FAR * guess or (lost and found["loss"] > SOME * guess):
        return f"diverged: the test loss is {found['loss']:.4g} after round {last}, and guessing gives {guess:.2f}"
    return None
