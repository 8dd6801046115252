"""Networks that lost part of themselves: units that never fire, and heads that know few classes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fldiag.diagnostics.doctor.findings import (
    INFORMATION,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.diagnostics.doctor.metrics import LATE
from fldiag.errors import counted
from fldiag.results.select import SPLITS

#: Share of a layer's units: below FEW dead ones are usual, from MANY on they are a warning.
FEW, MANY = 0.1, 0.5


class Head(Check):
    """The head knows few of the classes.

    Rule: the classes that the last global model gives at least 1 % of the test examples, of C in the test set. At most half of
    C is information: after few rounds on skewed clients it is usual. A warning where they are at most a fifth of C (or one) in
    each of the last three evaluated rounds, and nothing explains it: the run has at least 30 rounds, an earlier round knew 70 %
    of C, or the clients are not skewed (they hold 80 % of C in the median).
    """

    name, title = "head", "All classes are predicted"

    def end(self) -> Iterator[Outcome]:
        history = self.case.opened(classes=True)
        models, pool = self.case.models, history.pool
        rounds = [r for r in models.rounds if r in models.scores]
        if not rounds:
            yield Skip("no round can be evaluated")
            return
        classes = len(np.unique(models.labels[pool.test]))
        counts = {
            r: int(
                (
                    np.bincount(models.predictions(r), minlength=classes) >= 0.01 * pool.test.stop
                ).sum()
            )
            for r in rounds
        }
        limit, last = max(1, classes // 5), counts[rounds[-1]]
        lasting = len(rounds) >= 3 and all(counts[r] <= limit for r in rounds[-3:])
        best = max(counts.values())
        if classes > 2 and last <= max(1, classes // 2):
            client_classes = [
                len(np.unique(models.labels[examples]))
                for k in range(len(history.parts))
                if (examples := pool.train_slice(k)).stop > examples.start
            ]
            even = bool(client_classes) and float(np.median(client_classes)) >= 0.8 * classes
            bad = lasting and (best >= 0.7 * classes or rounds[-1] >= LATE or even)
            yield Finding(
                WARNING if bad else INFORMATION,
                f"the last global model predicts {last} of {classes} classes",
                f"of {classes} in the {SPLITS[pool.split]} set; at most {best} in any evaluated round",
                "the other classes are never right",
                "look at what happens to the head (fldiag forgetting), and at layers that are not averaged"
                if bad
                else "train more rounds; with skewed clients the first ones look like this",
                tuple(r for r in rounds if counts[r] <= max(1, classes // 2)),
                value=last / classes,
            )
        yield Clear(f"{last} of {classes} classes are predicted")


class Dead(Check):
    """Units that are dead: no example reaches the weights that lead into them.

    Rule: with the last global model, the gradient of the loss on test and training examples is exactly 0 for all weights of a
    row of a weight matrix or convolution (a unit, a channel). A warning from half of a layer's units on, information from a
    tenth on. Embeddings and one-dimensional tensors are left out.
    """

    name, title = "dead_units", "No units are dead"

    def end(self) -> Iterator[Outcome]:
        history = self.case.opened()
        from torch import nn

        r = history.rounds[-1]
        cohort, pool, dead = history.stored(r), history.pool, dict[str, np.ndarray]()
        tables = {
            f"{n}.weight"
            for n, m in history.network.module.named_modules()
            if isinstance(m, nn.Embedding)
        }
        for stretch in (pool.test, pool.clients):
            if stretch.stop <= stretch.start:
                continue
            g = history.problem((cohort.aggregated, cohort.buffers), stretch, "all").gradient()
            if not bool(g.isfinite().all()) or not bool((g != 0).any()):
                yield Skip(
                    f"the gradient in round {r} is {'0' if bool(g.isfinite().all()) else 'not finite'}"
                )
                return
            for name, weight in history.layout.views(g).items():
                if weight.ndim >= 2 and name not in tables:
                    still = (weight == 0).flatten(1).all(1).cpu().numpy()
                    dead[name] = dead[name] & still if name in dead else still
        for name, rows in dead.items():
            if (share := float(rows.mean())) >= FEW and rows.any():
                yield Finding(
                    WARNING if share >= MANY else INFORMATION,
                    f"{int(rows.sum())} of {len(rows)} units of {name} are dead",
                    f"no gradient reaches them in round {r}, from {counted(pool.n, 'example')}",
                    "the network is smaller than it looks, and these units cannot recover",
                    "lower the learning rate, look at the initialisation and at clients with long updates",
                    (r,),
                    layer=name,
                    value=share,
                )
        total = sum(int(rows.sum()) for rows in dead.values())
        yield Clear(f"{total} of {sum(map(len, dead.values()))} units are dead in round {r}")
