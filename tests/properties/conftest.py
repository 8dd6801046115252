"""Small runs that every diagnostic and verb can be asked about."""

import pytest

#: Options that make an answer quick, where a diagnostic has them.
SMALL = {"points": 3, "k": 2, "chains": 2, "draws": 4, "steps": 5, "max_products": 40}


@pytest.fixture(scope="session")
def trained(toy, tmp_path_factory):
    """Folders of two runs that differ by the method, and of one with low-rank adapters."""
    folder, model = tmp_path_factory.mktemp("trained"), {"name": "mlp", "hidden": (5,)}
    runs = [toy.train(m, folder / m, rounds=2, model=model) for m in ("fedavg", "scaffold")]
    runs.append(toy.train("fedavg", folder / "adapters", rounds=2, model=model | {"lora_rank": 2}))
    return [run.path for run in runs]


@pytest.fixture
def small():
    """The quick options among some names."""
    return lambda names: {k: v for k, v in SMALL.items() if k in names}
