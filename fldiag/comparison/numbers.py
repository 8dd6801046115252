"""The numbers of a run that can be compared, by the names that conditions use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Number:
    """``better``: which way is better. ``share``: of 1, so that points and percent have a meaning. ``source``: the diagnostic
    that measures it (metrics: what training wrote), with its ``options``; ``row``: which row of its table. ``needs``: what both
    sides must have in common (model, partition)."""

    name: str
    text: str
    better: str
    source: str
    row: Mapping[str, Any]
    share: bool = False
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


_TEST: dict[str, Any] = {"moment": "aggregated", "scope": "global", "slice": "test", "layer": None, "index": None}
_TRAINED: dict[str, Any] = {"moment": "trained", "slice": "test", "layer": None, "index": None}
_LAST = {"rounds": "last"}
_DRIFT = {**_LAST, "rho": (), "gradients": False, "representation": False, "propositions": False}
_SPREAD: dict[str, Any] = {"scope": "global", "estimator": "bayesian bootstrap"}
_FEDERATION = ("partition",)

NUMBERS = {n.name: n for n in (
    Number("accuracy", "test accuracy of the global model", "higher", "metrics", {"metric": "accuracy", **_TEST}, share=True),
    Number("loss", "test loss of the global model", "lower", "metrics", {"metric": "loss", **_TEST}),
    Number("lambda_1", "largest Hessian eigenvalue of the global model on the training data", "lower", "spectrum",
           {"metric": "eigenvalue", "index": 1, "layer": None}, needs=("model",), options={"k": 1}),
    Number("drop", "accuracy lost in local training, mean over clients", "lower", "forgetting",
           {"metric": "drop", **_TRAINED}, share=True, needs=_FEDERATION, options=_LAST),
    Number("forgetting", "largest loss of accuracy on a class in local training, mean over clients", "lower", "forgetting",
           {"metric": "forgetting", **_TRAINED}, share=True, needs=_FEDERATION, options=_LAST),
    Number("drift", "distance of client weights from the received, mean over clients", "lower", "drift",
           {"metric": "global_local_divergence", "moment": "trained", "layer": None, "estimator": "exact"},
           needs=("model", "partition"), options=_DRIFT),
    Number("mean_accuracy", "accuracy on clients' class mixtures, mean over clients", "higher", "fairness",
           {"metric": "mean_accuracy", **_SPREAD}, share=True, needs=_FEDERATION),
    Number("worst_decile", "mean accuracy of the worst tenth of clients", "higher", "fairness",
           {"metric": "worst_decile", **_SPREAD}, share=True, needs=_FEDERATION),
    Number("accuracy_variance", "variance of accuracy over clients", "lower", "fairness",
           {"metric": "accuracy_variance", **_SPREAD}, needs=_FEDERATION),
    Number("accuracy_gini", "Gini coefficient of accuracy over clients", "lower", "fairness",
           {"metric": "accuracy_gini", **_SPREAD}, needs=_FEDERATION),
    Number("ece", "expected calibration error on all clients' examples", "lower", "fairness", {"metric": "ece", **_SPREAD},
           share=True, needs=_FEDERATION),
)}
