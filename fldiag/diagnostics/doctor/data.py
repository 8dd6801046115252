"""The data of a run: test examples that were trained on, and who holds what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fldiag.diagnostics.doctor.findings import (
    FAULT,
    INFORMATION,
    LEVEL,
    WARNING,
    Check,
    Clear,
    Finding,
    Said,
    Skip,
)
from fldiag.errors import counted

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.runs.history import History


#: Fewer examples that two clients share say nothing: one is all of a client that has one.
SHARED = 5


class Leak(Check):
    """Test examples that are training examples too.

    Rule: inputs are compared by their bytes. Of n test examples, x have a twin among the clients' training examples; in a clean
    split this happens at the rate r at which training examples have a twin among themselves (at least 1 in 1000), so the
    binomial tail P(X >= x) with n and r is tested. Where the run itself says that its training examples stand in for a test
    set, this is information.
    """

    name, title = "leak", "Test and training examples differ"

    def end(self) -> Iterator[Said]:
        history = self.case.opened()
        if history.dataset.is_lazy:
            yield Skip("the training examples are generated on demand")
            return
        from scipy.stats import binom

        data = history.dataset
        if not data.tested:
            yield Skip("the run has no test examples")
            return
        held = [p for p in history.parts if len(p)]
        used = np.unique(np.concatenate(held)) if held else np.arange(len(data.train_y))
        train, test = Counter(_bytes(data.train_x[used])), _bytes(data.test_x)
        twins = [x in train for x in test]
        found, n = sum(twins), len(test)
        rate = max(sum(c for c in train.values() if c > 1) / len(used), 1e-3)
        self.tests += 1
        p = float(binom.sf(found - 1, n, min(rate, 1.0)))
        if found and p <= LEVEL:
            told = any(
                "what is called test is the training data" in note
                for note in self.case.run.origin.get("notes", [])
            )
            whole = found == n and len(train) <= n
            what = (
                "the test set is the training set"
                if whole
                else "the test set is part of the training set"
                if found == n
                else "the test set overlaps the training set"
            )
            yield Finding(
                INFORMATION if told else FAULT,
                what,
                f"{found} of {n} test examples ({found / n:.0%}) are training "
                f"examples, bit by bit; {rate:.1%} would be usual"
                + ("; the run says so" if told else ""),
                "test accuracy is partly training accuracy, and too high",
                "hold examples out that no client trains on",
                value=found / n,
                p=p,
            )
        yield Clear(f"{found} of {n} test examples are among {len(used)} training examples")


def _bytes(x: Tensor) -> list[bytes]:
    rows = x.detach().cpu().contiguous().numpy().reshape(len(x), -1)
    return [row.tobytes() for row in rows]


class Parts(Check):
    """A partition that differs from what the run says.

    Rule, for runs of fldiag: the partition that the config names is dealt again, and every client must hold the same examples.
    For others: a client reports another number of examples than the partition gives it (by more than a twentieth), two clients
    hold the same examples (5 or more, and more than half of the smaller's; of fewer it is information). Of both: a class of the
    test set that no client holds (information for runs of fldiag, whose config dealt it so).
    """

    name, title = "partition", "Partition matches the config"

    def end(self) -> Iterator[Said]:
        history = self.case.opened(parts=True)
        parts = history.parts
        if self.case.own:
            yield from self._named(history, parts)
        else:
            yield from self._told(parts)
        yield from self._missing(history, parts)
        yield Clear(
            f"{counted(len(parts), 'client')} with {counted(sum(map(len, parts)), 'example')}"
            + (", as the config deals them" if self.case.own else "")
        )

    def _named(self, history: History, parts: Sequence[np.ndarray]) -> Iterator[Finding]:
        from fldiag.data.public import deal
        from fldiag.sections import PartitionSection

        spec = PartitionSection.model_validate(self.case.section("partition"))
        again = deal(
            history.dataset, spec, self.case.total, self.case.section("data").get("public")
        )
        odd = [
            k
            for k in range(max(len(parts), len(again)))
            if k >= len(parts) or k >= len(again) or not np.array_equal(parts[k], again[k])
        ]
        if odd:
            k = odd[0]
            same = len(np.intersect1d(parts[k], again[k])) if k < min(len(parts), len(again)) else 0
            yield Finding(
                FAULT,
                f"the partition is not the one that the config names ({spec.kind}, seed {spec.seed})",
                f"{len(odd)} of {counted(len(parts), 'client')} hold other examples; client {k} shares {same} of "
                f"{len(parts[k]) if k < len(parts) else 0}",
                "the run's heterogeneity is not what its config says",
                "correct the config, or train on the partition that it names",
                client=k if len(odd) == 1 else None,
                value=len(odd) / len(parts),
            )

    def _missing(self, history: History, parts: Sequence[np.ndarray]) -> Iterator[Finding]:
        data = history.dataset
        if data.regression or data.is_lazy:
            return
        held = np.unique(
            np.asarray(data.train_y.cpu())[np.concatenate([p for p in parts if len(p)])]
        )
        gone = sorted(set(np.unique(np.asarray(data.test_y.cpu())).tolist()) - set(held.tolist()))
        if gone:
            yield Finding(
                INFORMATION if self.case.own else WARNING,
                f"no client holds class {', '.join(map(str, gone[:5]))}",
                f"{len(gone)} classes of the test set are in no client's data",
                "the model cannot learn them",
                "look at how examples were dealt",
                value=len(gone),
            )

    def _told(self, parts: Sequence[np.ndarray]) -> Iterator[Finding]:
        for k, n in sorted(self.case.run.origin.get("examples", {}).items()):
            if k < len(parts) and abs(len(parts[k]) - n) > max(1, 0.05 * max(n, len(parts[k]))):
                yield Finding(
                    WARNING,
                    f"client {k} trains on another number of examples than the partition gives it",
                    f"it reports {n}, the partition {len(parts[k])}",
                    "diagnostics look at data that it does not train on",
                    "give the partition that was trained on",
                    client=k,
                    value=n - len(parts[k]),
                )
        size = max((int(p.max()) for p in parts if len(p)), default=-1) + 1
        owners = np.zeros(size, dtype=np.int64)
        first = np.full(size, -1)
        parts = [np.unique(p) for p in parts]
        for k, p in enumerate(parts):
            held = np.zeros(size, dtype=bool)
            held[p] = True
            taken = p[owners[p] > 0]
            for other in np.unique(first[taken]).tolist():
                both = int(held[parts[other]].sum())
                share = both / min(len(p), len(parts[other]))
                if both >= SHARED and share > 0.5:  # they may come from many clients, of each a few
                    yield Finding(
                        WARNING,
                        f"clients {other} and {k} hold the same examples",
                        f"{share:.0%} of the smaller one's",
                        "the federation is less diverse than it looks, and these examples count twice",
                        "deal every example once",
                        client=other,
                        client_b=k,
                        value=share,
                    )
            first[p[owners[p] == 0]] = k
            owners[p] += 1
        if shared := int((owners > 1).sum()):
            yield Finding(
                INFORMATION,
                "some examples belong to several clients",
                f"{shared} of {int((owners > 0).sum())} examples",
                "they count more than others",
                "nothing to do if they are shared on purpose",
                value=shared,
            )
