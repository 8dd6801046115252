"""Sharpness beside the largest one at which gradient descent is stable."""

from __future__ import annotations

from collections.abc import Iterator

from fldiag.diagnostics.doctor.findings import INFORMATION, Check, Clear, Finding, Said, Skip
from fldiag.results.select import only


def edge(lr: float, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The largest curvature at which gradient descent on a quadratic is stable.

    >>> edge(0.1), edge(0.1, 0.5), edge(0.1, 0.5, nesterov=True)
    (20.0, 30.0, 15.0)
    """
    return 2 * (1 + momentum) / (lr * (1 + 2 * momentum)) if nesterov else 2 * (1 + momentum) / lr


class Edge(Check):
    """Information: the sharpness lies above the edge of stability.

    Rule: the largest Hessian eigenvalue of all clients' training loss at the last global weights (Lanczos, to 1 %) against 2 (1 +
    b) / lr for SGD with heavy-ball momentum b, 2 (1 + b) / ((1 + 2 b) lr) with Nesterov's (Cohen et al. 2021), with the
    learning rate of that round. Never a fault: minibatches and few local steps train beyond it.
    """

    name, title = "edge", "Below the edge of stability"

    def end(self) -> Iterator[Said]:
        history, train = self.case.opened(parts=True), self.case.section("train")
        r = history.rounds[-1]
        lr = float(train["lr"]) * float(train.get("lr_decay", 1.0)) ** max(r - 1, 0) if "lr" in train else self._told(r)
        if not lr or train.get("optimizer", "sgd") != "sgd":
            yield Skip("the run does not say its learning rate (record it as the metric lr)" if not lr else
                       f"there is no such edge for {train.get('optimizer')}")
            return
        from fldiag.problem.eigenpairs import eigenpairs

        stored = history.stored(r)
        problem = history.problem((stored.aggregated, stored.buffers), history.pool.clients, "train")
        sharpness = float(eigenpairs(problem, 1, tol=0.01, max_products=40, seed=0).values[0])
        momentum, nesterov = float(train.get("momentum", 0.0)), bool(train.get("nesterov", False))
        limit = edge(lr, momentum, nesterov)
        told = f"λ1 = {sharpness:.3g}, the edge is {limit:.3g} (lr {lr:.3g}, momentum {momentum:g}) in round {r}"
        if sharpness > limit:
            yield Finding(INFORMATION, "the sharpness lies above the edge of stability", told,
                          "local training oscillates along the sharpest direction", "lower the learning rate if the loss is "
                          "uneven",
                          (r,), value=sharpness / limit)
        yield Clear(told)

    def _told(self, r: int) -> float:
        metrics = self.case.metrics
        rows = None if metrics is None else only(metrics, metric=["lr", "learning_rate"], round=r)["value"].dropna()
        return float(rows.iloc[0]) if rows is not None and len(rows) else 0.0
