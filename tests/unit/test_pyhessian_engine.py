"""PyHessian as an engine: the very numbers of that package, beside fldiag's own."""

import helpers
import numpy as np
import pyhessian
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.select import number, only
from fldiag.seeding import seed_for


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3)
    )


def problem(**options):
    data, _ = helpers.classification((40,))
    return Problem(network(), cross_entropy, (data.train_x, data.train_y), **options)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_the_numbers_are_those_of_the_package_and_near_the_true_ones():
    p = problem()
    before = torch.get_rng_state()
    frame = fldiag.diagnose(p, "spectrum", k=3, trace=True, engine="pyhessian", seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    engine = pyhessian.hessian(network().eval(), cross_entropy, dataloader=[p.batch(0)], cuda=False)
    torch.manual_seed(seed_for(5, "pyhessian"))
    expected, _ = engine.eigenvalues(maxIter=100, tol=1e-3, top_n=3)
    assert only(frame, metric="eigenvalue")["value"].tolist() == expected
    assert number(frame, "trace") == pytest.approx(np.mean(engine.trace(maxIter=100, tol=1e-3)))
    own, theirs = (
        fldiag.diagnose(p, "spectrum", k=1, tol=1e-7, max_products=400, engine=engine)
        for engine in ("lanczos", "pyhessian")
    )
    found = number(theirs, "eigenvalue", index=1)
    assert found == pytest.approx(number(own, "eigenvalue", index=1), rel=1e-3)


def test_what_pyhessian_does_not_know_is_refused():
    with pytest.raises(FldiagError, match="neither weight decay"):
        fldiag.diagnose(problem(weight_decay=0.1), "spectrum", engine="pyhessian")
    with pytest.raises(FldiagError, match="cannot do --per-layer"):
        fldiag.diagnose(problem(), "spectrum", engine="pyhessian", per_layer=True)
