"""Every diagnostic gives the same table wherever its parts are done, to the last bit."""

import os

import pandas as pd
import pytest

import fldiag
from fldiag import registry
from fldiag.errors import FldiagError

ON = {
    kind: [
        n
        for n in registry.diagnostic.names()
        if registry.diagnostic.get(n).on == kind and not n.startswith("personal")
    ]
    for kind in ("run", "problem")
}
TRAINS = ["personalise"]
#: Small answers.
FEW = {
    "matching": {"samples": 20, "every_round": True, "k": 2},
    "landscape": {"points": 9, "samples": 100},
    "profile": {"points": 9},
    "density": {"samples": 100},
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = fldiag.Config.load(
        "digits",
        rounds=3,
        model__name="mlp",
        model__hidden=[8],
        clients__total=6,
        clients__per_round=3,
        train__epochs=1,
        checkpoint__clients="sampled",
        metrics__steps=True,
    )
    return fldiag.train(config, out=tmp_path_factory.mktemp("executors") / "run", device="cpu")


@pytest.fixture(scope="module")
def adapted(trained):
    return fldiag.train(
        trained.config.replace(model__lora_rank=2),
        out=trained.path.parent / "adapted",
        device="cpu",
    )


@pytest.fixture(scope="module", autouse=True)
def _workers_find_the_tests():
    """A Dask worker is started anew and finds modules by PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(os.path.dirname(__file__)), before or ""]
    )
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def same(target, name, executor, **options):
    here = fldiag.diagnose(target, name, device="cpu", **options)
    there = fldiag.diagnose(target, name, device="cpu", executor=executor, **options)
    pd.testing.assert_frame_equal(here, there, check_exact=True)


@pytest.mark.parametrize("executor", ["processes:2", "dask"])
@pytest.mark.parametrize("name", ON["run"])
def test_of_a_run(trained, adapted, name, executor):
    same(adapted if name == "lora" else trained, name, executor, **FEW.get(name, {}))


@pytest.mark.parametrize("name", ON["problem"])
def test_of_several_checkpoints(trained, name):
    same([trained.checkpoint(1), trained.checkpoint(3)], name, "processes:2", **FEW.get(name, {}))


@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_a_landscape_of_one_checkpoint(trained, executor):
    same(trained.checkpoint(3), "landscape", executor, points=9, samples=100)


@pytest.mark.parametrize("executor", ["processes:2", "dask"])
@pytest.mark.parametrize("name", TRAINS)
def test_what_trains(trained, name, executor):
    same(trained, name, executor, **FEW.get(name, {}))


@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_connectivity_of_the_clients_and_of_checkpoints(trained, executor):
    same(trained, "connectivity", executor, samples=60, points=3)
    same(
        [trained.checkpoint(1), trained.checkpoint(3)],
        "connectivity",
        executor,
        samples=60,
        points=3,
    )


def test_a_history_of_the_callers_own_functions_stays_here(trained):
    history = fldiag.History.of(trained)
    history.recipe = None
    with pytest.raises(FldiagError, match="cannot be sent to worker processes"):
        fldiag.diagnose(history, "drift", executor="processes:2")


def test_an_unknown_executor_is_refused_before_anything(trained):
    with pytest.raises(FldiagError, match="unknown executor 'threads'"):
        fldiag.diagnose(trained, "drift", executor="threads")
