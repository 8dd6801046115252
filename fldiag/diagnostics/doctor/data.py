"""The data of a run: test examples that were trained on, and who holds what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fldiag.config_files import partition_digest
from fldiag.diagnostics.doctor.findings import (
    FAULT,
    INFORMATION,
    LEVEL,
    WARNING,
    Check,
    Clear,
    Finding,
    Outcome,
    Skip,
)
from fldiag.errors import FldiagError, counted
from fldiag.sections import PartitionSection

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.data import Dataset


#: Fewer examples that two clients share say nothing: one is all of a client that has one.
SHARED = 5
#: Rate of equal examples that is usual anywhere, and probability below which more of them are no chance.
NATURAL, CHANCE = 1e-3, 1e-6


class Leak(Check):
    """Test examples that are training examples too.

    Rule: inputs are compared by their bytes. Of n test examples, x have a twin among the clients' training examples; in a clean
    split this happens at the rate r at which training examples have a twin among themselves (at least 1 in 1000), so the
    binomial tail P(X >= x) with n and r is tested. Where the run itself says that its training examples stand in for a test
    set, this is information.
    """

    name, title = "leak", "Test and training examples differ"

    def end(self) -> Iterator[Outcome]:
        from scipy.stats import binom

        data = self.case.dataset
        if not data.tested:
            yield Skip("the run has no test examples")
            return
        try:
            train_indices = np.unique(np.concatenate(self.case.parts))
        except FldiagError:  # nobody says which are the clients'
            train_indices = np.arange(len(data.train_y))
        train, test = Counter(_bytes(data.train_x[train_indices])), _bytes(data.test_x)
        twins = [x in train for x in test]
        count, n = sum(twins), len(test)
        rate = max(sum(c for c in train.values() if c > 1) / len(train_indices), 1e-3)
        self.tests += 1
        p = float(binom.sf(count - 1, n, min(rate, 1.0)))
        if count and p <= LEVEL:
            is_admitted = any(
                "what is called test is the training data" in note
                for note in self.case.run.origin.get("notes", [])
            )
            is_same = count == n and len(train) <= n
            fault = (
                "the test set is the training set"
                if is_same
                else "the test set is part of the training set"
                if count == n
                else "the test set overlaps the training set"
            )
            yield Finding(
                INFORMATION if is_admitted else FAULT,
                fault,
                f"{count} of {n} test examples ({count / n:.0%}) are training "
                f"examples, bit by bit; {rate:.1%} would be usual"
                + ("; the run says so" if is_admitted else ""),
                "test accuracy is partly training accuracy, and too high",
                "hold examples out that no client trains on",
                value=count / n,
                p=p,
            )
        yield Clear(
            f"{count} of {n} test examples are among {len(train_indices)} training examples"
        )


def _bytes(x: Tensor) -> list[bytes]:
    rows = x.detach().cpu().contiguous().numpy().reshape(len(x), -1)
    return [row.tobytes() for row in rows]


class Parts(Check):
    """A partition that differs from what the run says.

    Rule, for runs of fldiag: the partition that the config names is dealt again (of one from a file: its digest), and every
    client must hold the same examples.
    For others: a client reports another number of examples than the partition gives it (by more than a twentieth), two clients
    hold the same examples (5 or more, and more than half of the smaller's; of fewer it is information). Of both: a class of the
    test set that no client holds, which is information: it is so, and no description of the run denies it.
    """

    name, title = "partition", "Partition matches the config"

    def end(self) -> Iterator[Outcome]:
        dataset, parts = self.case.dataset, self.case.parts
        if self.case.is_native:
            yield from self._compare_config(dataset, parts)
        else:
            yield from self._compare_reports(parts)
        yield from self._missing(dataset, parts)
        yield Clear(
            f"{counted(len(parts), 'client')} with {counted(sum(map(len, parts)), 'example')}"
            + (", as the config deals them" if self.case.is_native else "")
        )

    def _compare_config(self, dataset: Dataset, parts: Sequence[np.ndarray]) -> Iterator[Finding]:
        from fldiag.data.public import deal

        spec = PartitionSection.model_validate(self.case.section("partition"))
        if spec.kind == "file":
            yield from self._compare_digest(spec, parts)
            return
        config_parts = deal(dataset, spec, self.case.total, self.case.section("data").get("public"))
        odd = [
            k
            for k in range(max(len(parts), len(config_parts)))
            if k >= len(parts)
            or k >= len(config_parts)
            or not np.array_equal(parts[k], config_parts[k])
        ]
        if odd:
            k = odd[0]
            same = (
                len(np.intersect1d(parts[k], config_parts[k]))
                if k < min(len(parts), len(config_parts))
                else 0
            )
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

    def _compare_digest(
        self, spec: PartitionSection, parts: Sequence[np.ndarray]
    ) -> Iterator[Finding]:
        """Of a partition from a file, which need not be here any more, the config names the digest."""
        if partition_digest({str(k): part for k, part in enumerate(parts)}) != spec.digest:
            yield Finding(
                FAULT,
                f"the partition is not the one that the config names (from {spec.path})",
                "its digest is another",
                "the run's heterogeneity is not what its config says",
                "train on the partition of that file",
            )

    def _missing(self, data: Dataset, parts: Sequence[np.ndarray]) -> Iterator[Finding]:
        if data.regression:
            return
        classes = np.unique(
            np.asarray(data.train_y.cpu())[np.concatenate([p for p in parts if len(p)])]
        )
        absent = sorted(
            set(np.unique(np.asarray(data.test_y.cpu())).tolist()) - set(classes.tolist())
        )
        if absent:
            yield Finding(
                INFORMATION,
                f"no client holds class {', '.join(map(str, absent[:5]))}",
                f"{len(absent)} classes of the test set are in no client's data",
                "the model cannot learn them",
                "look at how examples were dealt",
                value=len(absent),
            )

    def _compare_reports(self, parts: Sequence[np.ndarray]) -> Iterator[Finding]:
        for k, n in sorted(self.case.run.origin.get("examples", {}).items()):
            if k < len(parts) and abs(len(parts[k]) - n) > max(1, 0.05 * max(n, len(parts[k]))):
                yield Finding(
                    WARNING,
                    f"{self.case.client(k)} trains on another number of examples than the partition gives it",
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
            mask = np.zeros(size, dtype=bool)
            mask[p] = True
            repeats = p[owners[p] > 0]
            for other in np.unique(first[repeats]).tolist():
                both = int(mask[parts[other]].sum())
                share = both / min(len(p), len(parts[other]))
                if both >= SHARED and share > 0.5:  # they may come from many clients, of each a few
                    yield Finding(
                        WARNING,
                        f"{self.case.client(other, k)} hold the same examples",
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


class Twins(Check):
    """Examples that a client holds twice, and clients that hold equal examples under different numbers.

    Rule: training examples are equal where their inputs are, byte by byte. A client holds examples twice where 5 at least, and
    more than a twentieth, repeat another of its own; two clients hold the same where they share 5 or more, and more than half of
    the smaller's. Each time the binomial probability of so many, at the rate of the median client (pair) or of 1 in 1000, must
    be below 1e-6: a table with few distinct rows has many equal ones. Pairs that share the numbers of their examples are left
    to the check of the partition. For runs of fldiag this is information: their data are so.
    """

    name, title = "duplicates", "Every example is held once"

    def end(self) -> Iterator[Outcome]:
        from scipy.stats import binom

        dataset = self.case.dataset
        parts = {k: p for k, p in enumerate(self.case.parts) if len(p)}
        indices = np.unique(np.concatenate(list(parts.values())))
        number: dict[bytes, int] = {}
        content = np.zeros(int(indices.max()) + 1, dtype=np.int64)
        for i, row in zip(indices.tolist(), _bytes(dataset.train_x[indices]), strict=True):
            content[i] = number.setdefault(row, len(number))
        contents = {k: content[p] for k, p in parts.items()}
        severity = INFORMATION if self.case.is_native else WARNING

        repeats = {k: len(ids) - len(np.unique(ids)) for k, ids in contents.items()}
        rate = max(float(np.median([n / len(contents[k]) for k, n in repeats.items()])), NATURAL)
        for k, n in repeats.items():
            size = len(contents[k])
            if n >= SHARED and n > 0.05 * size and binom.sf(n - 1, size, rate) < CHANCE:
                yield Finding(
                    severity,
                    f"{self.case.client(k)} holds examples twice",
                    f"{n} of its {size} examples repeat another one; in the median client {rate:.1%} do",
                    "they count double in its training, and in its share of the mean",
                    "look for a list that was extended instead of replaced, or drawn with replacement",
                    client=k,
                    value=n / size,
                )
        shared = _shared(contents)
        sizes = {k: len(np.unique(ids)) for k, ids in contents.items()}
        shares = {(a, b): n / min(sizes[a], sizes[b]) for (a, b), n in shared.items()}
        pairs = len(contents) * (len(contents) - 1) // 2
        usual = float(np.median([*shares.values(), *[0.0] * (pairs - len(shares))] or [0.0]))
        for (a, b), n in shared.items():
            least = min(sizes[a], sizes[b])
            if n < SHARED or shares[a, b] <= 0.5:
                continue
            is_numbered = 2 * len(np.intersect1d(parts[a], parts[b])) > least
            if not is_numbered and binom.sf(n - 1, least, max(usual, NATURAL)) < CHANCE:
                yield Finding(
                    severity,
                    f"{self.case.client(a, b)} hold equal examples",
                    f"{n} of the smaller one's {least}, under different numbers; the median pair shares {usual:.1%}",
                    "the federation is less diverse than it looks, and these examples count twice",
                    "deal every example once",
                    client=a,
                    client_b=b,
                    value=shares[a, b],
                )
        yield Clear(f"{len(number)} different inputs among {counted(len(indices), 'example')}")


def _shared(contents: Mapping[int, np.ndarray]) -> dict[tuple[int, int], int]:
    """Pair of clients -> how many contents both hold."""
    from scipy.sparse import csr_array

    clients = list(contents)
    rows = [np.unique(ids) for ids in contents.values()]
    ends = np.cumsum([0, *map(len, rows)])
    ones = np.ones(ends[-1], dtype=np.int64)
    matrix = csr_array((ones, np.concatenate(rows), ends))
    both = (matrix @ matrix.T).tocoo()
    return {
        (clients[a], clients[b]): int(n)
        for a, b, n in zip(both.row, both.col, both.data, strict=True)
        if a < b
    }
