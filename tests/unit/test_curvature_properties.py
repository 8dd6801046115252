"""What spectrum, trace, diagonal, density, landscape and paths share: the unit of the loss, the order of the examples,
losses that are not finite, and the memory they are allowed."""

import functools
import weakref

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fldiag.diagnostics.density import density
from fldiag.diagnostics.diagonal import diagonal
from fldiag.diagnostics.landscape import landscape
from fldiag.diagnostics.paths import paths
from fldiag.diagnostics.spectrum import spectrum
from fldiag.diagnostics.trace import trace
from fldiag.errors import FldiagError
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.problem import Problem

#: In units of the loss; the density is per unit, so its axis scales with the loss and its values inversely.
QUESTIONS = {
    "spectrum": functools.partial(spectrum, k=4, tol=1e-8),
    "per layer": functools.partial(spectrum, k=2, tol=1e-8, per_layer=True),
    "trace": functools.partial(trace, max_products=30),
    "diagonal": functools.partial(diagonal, max_products=30),
    "density": functools.partial(density, k=2, steps=12, probes=2, tol=1e-8),
    "landscape": functools.partial(landscape, points=5, directions="random"),
    "paths": functools.partial(lambda p, **o: paths([p], **o), points=5),
}
BENDS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def net(bend="relu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), BENDS[bend](), nn.Linear(6, 3))


def examples(n=24):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 5, generator=g, dtype=torch.float64), torch.arange(n) % 3


def problem(bend="relu", scale=1.0, order=slice(None)):
    x, y = examples()
    return Problem(
        net(bend),
        lambda z, y: scale * cross_entropy(z, y),
        (x[order], y[order]),
        dtype=torch.float64,
    )


def numbers(frame, column="value"):
    return frame[column].to_numpy(dtype=float, na_value=np.nan)


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize(
    "scale", [1e-8, 1e3, 1e8]
)  # powers of ten: the default width has two digits
@pytest.mark.slow
def test_scaling_the_loss_scales_every_value(name, bend, scale):
    one, other = QUESTIONS[name](problem(bend)), QUESTIONS[name](problem(bend, scale))
    for column in ("metric", "layer", "estimator", "converged"):
        pd.testing.assert_series_equal(one[column], other[column])
    unitless = one.metric.isin(["accuracy", "eigenvalue_ratio", "interpolation_error", "evaluated"])
    factor = np.where(one.metric == "density", 1 / scale, np.where(unitless, 1, scale))
    size = np.nanmax(np.abs(numbers(other) / factor))
    np.testing.assert_allclose(numbers(other) / factor, numbers(one), rtol=1e-5, atol=1e-9 * size)
    if name == "density":
        np.testing.assert_allclose(
            numbers(other, "x") / scale, numbers(one, "x"), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_order_of_the_examples_changes_nothing(name, bend):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    one, other = QUESTIONS[name](problem(bend)), QUESTIONS[name](problem(bend, order=order))
    np.testing.assert_allclose(numbers(other), numbers(one), rtol=1e-6, atol=1e-9)


# -- what is not finite


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("bend", BENDS)
def test_a_loss_that_is_not_a_number_beyond_the_probed_examples_is_refused(name, bend):
    x, y = examples(200)
    x[20] = np.nan  # not among the probe's 32 examples
    with pytest.raises(
        FldiagError, match=r"loss on slice 'data' is nan.*before the training diverged"
    ):
        QUESTIONS[name](Problem(net(bend), cross_entropy, (x, y)))


def test_exact_curvature_that_overflows_is_refused():
    x, y = torch.ones(100, 2), torch.zeros(100, dtype=torch.int64)
    x[20] = 1e25  # its square is infinite in single precision, its loss is not
    p = Problem(nn.Linear(2, 2), lambda z, y: (1e-30 * z).square().sum(1).mean(), (x, y))
    with pytest.raises(
        FldiagError, match=r"curvature of weight on slice 'data' is not finite.*float64"
    ):
        trace(p)
    fine = diagonal_of(
        Problem(
            nn.Linear(2, 2),
            lambda z, y: (1e-30 * z).square().sum(1).mean(),
            (x, y),
            dtype=torch.float64,
        )
    )
    assert fine.trace == pytest.approx(4 * 2 * 1e-60 * 1e50 / 100, rel=1e-6)


# -- memory


class Held(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for storage in [
            t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)
        ]:
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
                self.most = max(self.most, sum(self.sizes.values()))
        return out


def autoencoder(memory, outputs=80):
    torch.manual_seed(0)
    x = torch.randn(60, outputs)
    return Problem(
        nn.Sequential(nn.Linear(outputs, 8), nn.ReLU(), nn.Linear(8, outputs)),
        lambda z, y: 0.5 * (z - y).square().sum(1).mean(),
        (x, x),
        memory=memory,
    )


def classifier(memory):
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    )
    return Problem(
        nn.Sequential(*layers),
        cross_entropy,
        (torch.randn(120, 3, 16, 16), torch.arange(120) % 10),
        memory=memory,
    )


@pytest.mark.parametrize("entries", [False, True])
@pytest.mark.parametrize("make, small", [(autoencoder, 4 * 2**20), (classifier, 10 * 2**20)])
def test_the_exact_trace_stays_within_its_memory(make, small, entries):
    peaks, traces = [], []
    for memory in (2**31, small):
        p = make(memory)
        p.probe()
        with Held() as held:
            traces.append(diagonal_of(p, entries=entries).trace)
        peaks.append(held.most)
    assert peaks[1] <= small < peaks[0]  # what is allowed changes what is held
    assert traces[0] == pytest.approx(traces[1], rel=1e-5)
