"""How far two computations of the same numbers may lie apart, and which tests other processors repeat."""

import numpy as np
import pytest
import torch
from helpers import close, terms
from processors import NUMERIC, PROCESSORS, ROOT, lesser, numeric


def sums(n, dtype, seed=0):
    """Sums of n products added one by one and side by side."""
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(40, n, generator=g, dtype=dtype) for _ in range(2))
    serial = torch.zeros(40, dtype=dtype)
    for i in range(n):
        serial = serial + x[:, i] * y[:, i]
    return serial, (x * y).sum(1), (x.double() * y.double()).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 10, 1000])
def test_the_order_of_a_sum_passes_and_an_error_beyond_it_does_not(dtype, n):
    serial, other, exact = sums(n, dtype)
    close(serial, other, terms=n)
    if dtype == torch.float32:
        close(serial, exact, terms=n)  # the coarser of the two counts
        if n > 1:
            with pytest.raises(AssertionError, match=r"in torch\.float64 explains"):
                close(serial, exact, terms=n, dtype=torch.float64)
    with pytest.raises(AssertionError, match="differ by"):
        close(serial * (1 + 20 * n**0.5 * torch.finfo(dtype).eps), other, terms=n)


def test_floats_and_arrays_count_as_what_they_are_and_nothing_else_passes():
    close(0.1 + 0.2, 0.3, terms=2)
    close(np.float32(0.1) + np.float32(0.2), 0.3, terms=2)
    close([0.1 + 0.2, 1e-20], [0.3, 0.0], terms=2)  # beside 0.3
    close(1e-17, 0.0, terms=2, size=0.3)
    for wrong in (0.3 + 1e-14, float("nan")):
        with pytest.raises(AssertionError):
            close(wrong, 0.3, terms=2)
    with pytest.raises(AssertionError, match="shapes"):
        close(torch.ones(2), torch.ones(1), terms=1)
    assert terms(
        torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Flatten(), torch.nn.Linear(20, 4)),
        examples=2,
    ) == 2 * (12 + 20)


def test_what_other_processors_repeat_is_there():
    assert all((ROOT / name).exists() for name in NUMERIC)
    assert numeric(ROOT / "golden" / "test_golden_fedproj.py") and numeric(
        ROOT / "curvature" / "test_cases.py"
    )
    assert not numeric(ROOT / "cli" / "test_verbs.py") and not numeric(
        ROOT.parent / "fldiag" / "config.py"
    )


def test_a_processor_plays_lesser_ones_of_its_family():
    assert [lesser(name) for name in ("DEFAULT", "AVX2", "AVX512", "SVE256")] == [
        [],
        ["DEFAULT"],
        ["DEFAULT", "AVX2"],
        [],
    ]
    assert torch.backends.cpu.get_cpu_capability() in PROCESSORS or not lesser(
        torch.backends.cpu.get_cpu_capability()
    )
