"""LDA partitions draw by draw as FedSOL's released code makes them: with its seed, the clients of the paper itself.

That code draws from numpy's legacy generator, whose stream numpy keeps unchanged, so the seed alone gives the same clients
everywhere. They are dealt per class, and only the classes' sizes and the order of their examples enter.
"""

from __future__ import annotations

import numpy as np

from fldiag.errors import FldiagError

#: What FedSOL's code seeds the generator with before it deals the data, whatever the seed of the training.
FEDSOL_SEED = 19940817
#: A draw shuffles all examples, unlike those of ``partition._lda``, so fewer are affordable.
MAX_TRIES = 2_000


def deal(
    by_class: list[np.ndarray], clients: int, seed: int, alpha: float, min_size: int
) -> list[np.ndarray]:
    """The examples of every client, shuffled.

    Every class in turn is shuffled and cut by a Dirichlet draw without the clients that hold ``n // clients`` examples already,
    and the clients' examples are shuffled; all is drawn anew until the smallest client has ``min_size``. What a draw that is
    not kept has shuffled stays so, and what it took of the generator's stream is gone, as there.

    by_class: indices of each class, in the order of the data set.
    Raises FldiagError for a seed that the generator does not take, and where no draw reaches ``min_size``.
    """
    if not 0 <= seed < 2**32:
        raise FldiagError(
            f"partition.seed = {seed}, and lda_fedsol draws from a generator with seeds of 32 bits",
            "use one from 0 to 4294967295",
            usage=True,
        )
    rng = np.random.RandomState(seed)
    by_class, share = [members.copy() for members in by_class], sum(map(len, by_class)) // clients
    for _ in range(MAX_TRIES):
        held, pieces = np.zeros(clients, dtype=np.int64), []
        for members in by_class:
            rng.shuffle(members)
            weight = rng.dirichlet(np.repeat(alpha, clients)) * (held < share)
            if (
                not weight.sum() > 0
            ):  # with a tiny alpha all can underflow: such a draw splits nothing
                break
            cuts = (np.cumsum(weight / weight.sum()) * len(members)).astype(np.int64)[:-1]
            pieces.append(np.split(members, cuts))
            held += [len(piece) for piece in pieces[-1]]
        else:
            dealt = [np.concatenate(mine) for mine in zip(*pieces, strict=True)]
            for mine in dealt:
                rng.shuffle(mine)
            if held.min() >= min_size:
                return dealt
    raise FldiagError(
        f"lda_fedsol with alpha {alpha:g} and {clients} clients: none of {MAX_TRIES} draws gave every client "
        f"{min_size} examples",
        "use a larger alpha, fewer clients or a smaller min_size",
    )
