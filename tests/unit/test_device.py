"""The device: one name for Python and the command line, and one error where it is not there."""

import doctest
import inspect
import os
import platform
import subprocess
import sys

import helpers
import pytest
import torch
import torch._dynamo  # reads what the fixtures below replace when it is first imported

import fldiag
from fldiag import device
from fldiag.device import device_of, full_precision
from fldiag.errors import FldiagError
from fldiag.training.setup import Setup

NET, DATA = torch.nn.Linear(2, 3), (torch.eye(2), torch.tensor([0, 2]))


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def with_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_auto_is_what_is_there(without):
    assert (
        device_of("auto") == "cpu"
        and device_of(torch.device("cpu")) == "cpu"
        and doctest.testmod(device).failed == 0
    )


def test_auto_prefers_cuda_and_never_takes_mps(with_all, monkeypatch):
    assert (
        device_of("auto") == "cuda"
        and device_of("cuda:1") == "cuda:1"
        and device_of("mps", torch.float32) == "mps"
    )
    with pytest.raises(FldiagError, match="cuda:2"):
        device_of("cuda:2")
    with pytest.raises(FldiagError, match="mps has no float64"):
        device_of("mps", torch.float64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == "cpu"


@pytest.mark.parametrize(
    "name, what",
    [
        ("gpu", "unknown device 'gpu'"),
        ("cuda", "no device 'cuda'"),
        ("mps", "no device 'mps'"),
        ("cuda:x", "unknown device"),
        ("", "unknown device"),
        (None, "unknown device"),
    ],
)
def test_what_is_not_there_is_one_error(without, name, what):
    with pytest.raises(FldiagError, match=what) as caught:
        device_of(name)
    assert caught.value.usage


def test_every_door_takes_the_same_names(without, tmp_path):
    config = fldiag.Config.load(
        "digits",
        rounds=1,
        clients__per_round=2,
        train__epochs=1,
        checkpoint__clients="sampled",
        model__name="mlp",
    )
    run = fldiag.train(config, out=tmp_path / "run", device="auto")
    doors = [
        lambda d: fldiag.train(config, out=tmp_path / f"new-{d}", device=d),
        lambda d: fldiag.History(run, device=d),
        lambda d: fldiag.diagnose(run, "spectrum", samples=20, device=d),
        lambda d: fldiag.diagnose(run, "forgetting", device=d),
        lambda d: fldiag.diagnose(run, "personalise", epochs="0", device=d),
        lambda d: Setup(config, device=d),
    ]
    for door in doors:
        door("auto")
        for wrong in ("gpu", "cuda", "mps"):
            with pytest.raises(FldiagError, match="device"):
                door(wrong)
    with pytest.raises(FldiagError, match="no device"):
        fldiag.Problem(NET, torch.nn.functional.cross_entropy, DATA, device="cuda")
    assert not (tmp_path / "new-gpu").exists()


def test_auto_is_the_default_of_python_too():
    for function in (fldiag.train, fldiag.History, Setup):
        assert inspect.signature(function).parameters["device"].default == "auto"


PAGES = """
import resource, torch
from fldiag.device import keep_memory
keep_memory()
def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(3 * 2**20, dtype=torch.uint8) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(sum([work() for _ in range(14)][4:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what it relies on is glibc's")
def test_memory_that_was_freed_is_kept():
    """New pages for eight blocks of 3 MB, ten times; without ``keep_memory`` 61,000 of 4 kB in two processes of three, and none
    in the third: it depends on where the heap happens to lie. (Dask sets MALLOC_TRIM_THRESHOLD_ for its workers, and leaves it.)"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    for _ in range(3):
        result = subprocess.run(
            [sys.executable, "-c", PAGES], check=True, capture_output=True, text=True, env=env
        )
        assert int(result.stdout) < 1000


CUDNN = torch.backends.cudnn
#: What somebody may have set, and set back; since torch 2.9 in another way too.
CHOICES = [(CUDNN, "allow_tf32", False), (CUDNN, "allow_tf32", True)]
if hasattr(CUDNN, "conv"):
    CHOICES += [
        (place, "fp32_precision", value)
        for place in (CUDNN.conv, CUDNN, torch.backends)
        for value in ("ieee", "tf32")
    ]


@pytest.mark.parametrize(("place", "name", "value"), CHOICES)
def test_full_precision_holds_inside_alone_whatever_was_chosen(place, name, value):
    chosen = getattr(place, name)
    setattr(place, name, value)
    try:
        before = helpers.precision()
        with full_precision(), full_precision():
            assert helpers.precision() == (False, True)
            with CUDNN.flags(
                enabled=False
            ):  # as models do whose recurrent layers are differentiated twice
                pass
        assert helpers.precision() == before
    finally:
        setattr(place, name, chosen)


class Observer(torch.nn.Linear):
    """Notes in which precision it is called."""

    seen: list = []  # noqa: RUF012

    def forward(self, x):
        self.seen.append(helpers.precision())
        return super().forward(x)


def train_observed(tmp_path):
    config, module = helpers.config(rounds=1), torch.nn.Sequential(Observer(6, 3))
    setup = helpers.setup(config, helpers.classification((9, 9, 9)), module=module)
    Observer.seen.clear()  # its shapes were tried
    fldiag.train(config, out=tmp_path, setup=setup)


def diagnose_observed(tmp_path):
    problem = fldiag.Problem(Observer(2, 3), torch.nn.functional.cross_entropy, DATA)
    Observer.seen.clear()
    fldiag.diagnose(problem, "sharpness")


@pytest.mark.parametrize("compute", [train_observed, diagnose_observed])
def test_training_and_diagnostics_compute_in_full_precision(compute, tmp_path):
    compute(tmp_path)
    assert Observer.seen and set(Observer.seen) == {(False, True)}
