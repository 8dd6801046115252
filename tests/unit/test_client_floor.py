"""The client floor: known optima of quadratics, a budget that is too short, and the swing of known weights."""

from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import torch
from histories import one

from fldiag.errors import FldiagError
from fldiag.results.table import table
from fldiag.training.diagnostics.client_floor.measure import of_run, oscillation
from fldiag.training.diagnostics.client_floor.picture import draw
from fldiag.training.setup_of_run import setup_of


def run_of(setup, vectors, status="finished"):
    """A run that stored these global weights."""
    states = {r: SimpleNamespace(state=setup.network.layout.views(w)) for r, w in enumerate(vectors, start=1)}
    return SimpleNamespace(status=status, done=len(vectors), path=Path("made"), name="made", rounds=list(states), checkpoint=lambda r=None: states[r or len(vectors)],
                           origin={}, config=setup.config)


@pytest.fixture
def quadratic():
    q = helpers.quadratics((12, 9))
    setup = helpers.setup(q.config(rounds=1, lr=0.3), q.data)
    return q, setup, torch.tensor([1.0, -2, 0.5, 3]).double()


def measured(setup, w, epochs, fall=1e-4):
    rows = of_run(run_of(setup, [w]), setup, epochs, fall, "decayed", 0, "serial", None)
    return table(rows, run="made")


@pytest.mark.slow
def test_full_batch_descent_ends_at_each_client_s_optimum(quadratic):
    q, setup, w = quadratic
    frame = measured(setup, w, [1, 100, 2000], 1e-8)
    for k in range(2):
        distance = float((torch.linalg.solve(q.A[k], q.b[k]) - w).norm())
        row = one(frame, "client_floor", client=k)
        assert row.converged and row.value == pytest.approx(distance, rel=1e-5) and row["index"] in (100, 2000)
        after = w - 0.3 * q.gradient(k, w)
        assert one(frame, "floor_distance", client=k, index=1).value == pytest.approx(float((after - w).norm()), rel=1e-9)
        fell = float(q.gradient(k, after).norm() / q.gradient(k, w).norm())
        assert one(frame, "floor_gradient", client=k, index=1).value == pytest.approx(fell, rel=1e-6)
    floors = frame[(frame.metric == "client_floor") & (frame.scope == "client")].value.astype(float)
    assert one(frame, "client_floor", scope="global").value == pytest.approx(floors.mean())
    assert len(draw(frame).axes) == 2


def test_a_budget_that_ends_first_says_so(quadratic):
    _, setup, w = quadratic
    row = one(measured(setup, w, [1, 2]), "client_floor", client=0)
    assert not row.converged and row["index"] == 2 and row.fall > 1e-4


def test_a_client_at_its_optimum_is_masked(quadratic):
    q, setup, _ = quadratic
    row = one(measured(setup, torch.linalg.solve(q.A[1], q.b[1]), [1]), "client_floor", client=1)
    assert row.masked and "rounding noise" in row.note


def test_the_swing_of_known_weights(quadratic):
    _, setup, w = quadratic
    u = torch.tensor([0.0, 3, 4, 0]).double()
    row, = oscillation(run_of(setup, [100 * w, w + u, w - u]), setup, 2)
    assert row["value"] == pytest.approx(5) and row["n_rounds"] == 2 and row["stderr"] == pytest.approx(0, abs=1e-12)
    assert oscillation(run_of(setup, [w]), setup, 5)[0]["masked"]
    with pytest.raises(FldiagError, match="diverged"):
        setup_of(run_of(setup, [w], "diverged"))
