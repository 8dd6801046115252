"""Large linear products by oneDNN: the numbers of torch's own, and its precision."""

import pytest
import torch
from torch.nn import functional as F

from fldiag.models.kernels import by_onednn, product


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_torch_s(bias):
    torch.manual_seed(0)
    a, w, b = torch.randn(64, 200), torch.randn(300, 200), torch.randn(300) if bias else None
    with torch.no_grad():
        torch.testing.assert_close(product(a, w, b), F.linear(a, w, b), atol=1e-4, rtol=0)


def test_under_autocast_the_precision_is_autocast_s_however_large_the_product():
    torch.manual_seed(0)
    a, w = torch.randn(64, 200), torch.randn(300, 200)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not by_onednn(a, w)
        assert torch.equal(product(a, w), F.linear(a, w)) and product(a, w).dtype == torch.bfloat16
