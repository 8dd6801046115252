"""Products of transformers' building blocks, against differences of the gradient and dense Hessians."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fldiag.diagnostics.spectrum import spectrum
from fldiag.diagnostics.trace import trace
from fldiag.errors import FldiagError
from fldiag.problem.checkpointing import CHECKPOINTING
from fldiag.problem.problem import Problem

N, T, V, D = 6, 5, 7, 4
torch.manual_seed(0)
TOKENS = torch.randint(1, V, (N, T))
TOKENS[1, 3:] = 0
LABELS = torch.arange(N) % 3
NUMBERS = torch.randn(N, D)


class Net(nn.Module):
    """Embedding, a body on [B, T, D], mean, classifier."""

    def __init__(self, body, **embedding):
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(V, D, **embedding), body, nn.Linear(D, 3)

    def forward(self, x):
        return self.out(self.body(self.embed(x)).mean(1))


class Attention(nn.Module):
    """As users write it, with torch's function."""

    def __init__(self, rotary=False, **options):
        super().__init__()
        self.qkv, self.rotary, self.options = nn.Linear(D, 3 * D), rotary, options

    def forward(self, h):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        if self.rotary:
            angle = torch.arange(T, dtype=h.dtype)[:, None]
            q, k = (
                torch.cat(
                    [
                        t[..., :1] * angle.cos() - t[..., 1:] * angle.sin(),
                        t[..., :1] * angle.sin() + t[..., 1:] * angle.cos(),
                    ],
                    -1,
                )
                for t in (q, k)
            )
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


class Multihead(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.attend, self.weights = nn.MultiheadAttention(D, 2, batch_first=True), weights

    def forward(self, h):
        return h + self.attend(h, h, h, need_weights=self.weights)[0]


class Encoder(nn.Module):
    """torch's encoder, which without gradients has another way of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(V, D), nn.Linear(D, 3)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 2, 6, activation="gelu", batch_first=True), 1
        )

    def forward(self, x):
        return self.out(self.layers(self.embed(x), src_key_padding_mask=x == 0).mean(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.out = (
            nn.Embedding(V, D),
            nn.RMSNorm(D),
            nn.Linear(D, V, bias=False),
        )
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.norm(self.embed(x))).mean(1)


class Within(nn.Module):
    """Evaluates its layer as ``how(layer, input)``."""

    def __init__(self, layer, how):
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, h):
        return self.how(self.layer, h)


NETS = {
    "attention": lambda: Net(Attention()),
    "causal": lambda: Net(Attention(is_causal=True)),
    "masked": lambda: Net(Attention(attn_mask=torch.ones(T, T).tril().bool())),
    "rotary": lambda: Net(Attention(rotary=True)),
    "multihead": lambda: Net(Multihead(False)),
    "multihead with weights": lambda: Net(Multihead(True)),
    "encoder": Encoder,
    "layer norm, gelu": lambda: Net(nn.Sequential(nn.LayerNorm(D), nn.GELU())),
    "rms norm, gelu by tanh": lambda: Net(nn.Sequential(nn.RMSNorm(D), nn.GELU("tanh"))),
    "silu": lambda: Net(nn.SiLU()),
    "tied": Tied,
    "sparse gradients": lambda: Net(nn.Tanh(), sparse=True),
}


def problem(make, **options):
    torch.manual_seed(1)
    return Problem(make(), F.cross_entropy, (TOKENS, LABELS), dtype=torch.float64, **options)


def allowed():
    flags = torch.backends.cuda
    return (
        flags.flash_sdp_enabled(),
        flags.mem_efficient_sdp_enabled(),
        flags.math_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


@pytest.mark.parametrize("name", NETS)
def test_products_are_those_of_the_gradient_and_of_the_dense_hessian(name):
    p, before = problem(NETS[name]), allowed()
    v = torch.randn(p.layout.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    product, step = p.hvp(v), 1e-4 / v.norm()
    difference = (p.gradient(p.w + step * v) - p.gradient(p.w - step * v)) / (2 * step)
    assert (product - difference).norm() < 1e-6 * product.norm()
    with sdpa_kernel(SDPBackend.MATH):

        def loss(w):
            return F.cross_entropy(p.call(w, TOKENS), LABELS)

        dense = torch.autograd.functional.hessian(loss, p.w)
        assert torch.allclose(product, dense @ v, rtol=1e-9, atol=1e-11)
        assert p.loss()[0] == pytest.approx(
            float(loss(p.w.clone().requires_grad_()).detach()), rel=1e-12
        )
    assert allowed() == before


def test_what_was_allowed_is_allowed_again_after_an_exception():
    def fused_only(layer, h):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return layer(h)

    p, before = problem(lambda: Net(Within(Attention(), fused_only))), allowed()
    assert p.by_differences and p.hvp(p.w).isfinite().all()
    assert allowed() == before


def test_a_row_of_padding_is_a_constant():
    """As its gradient is: torch's ``padding_idx`` says that it is not trained."""
    p = problem(lambda: Net(nn.Tanh(), padding_idx=0))
    v = torch.zeros_like(p.w)
    v[:D] = 1
    assert not p.gradient()[:D].any() and not p.hvp(v).any()


def checkpointed(reentrant=False, **options):
    return problem(
        lambda: Net(
            Within(
                nn.Linear(D, D),
                lambda layer, h: checkpoint(
                    lambda h: torch.tanh(layer(h)), h, use_reentrant=reentrant
                ),
            )
        ),
        **options,
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_products_through_checkpointing_are_those_without_it(reentrant, first):
    """Also where the first layer is checkpointed, whose inputs need no gradient: reentrant checkpointing would drop its own."""
    inner = torch.utils.checkpoint.checkpoint, checkpoint_parts()
    made = []
    for kind in (reentrant, None):
        torch.manual_seed(1)
        made.append(
            Problem(
                Checkpointed(kind, first), F.cross_entropy, (NUMBERS, LABELS), dtype=torch.float64
            )
        )
    p, plain = made
    w = plain.w + 0.1  # not the module's own, with which the layers would be evaluated again
    v = torch.randn(len(w), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert (
        torch.equal(p.gradient(w), plain.gradient(w))
        and torch.equal(p.hvp(v, w), plain.hvp(v, w))
        and p.hvp(v, w).any()
    )
    assert inner == (torch.utils.checkpoint.checkpoint, checkpoint_parts())


def checkpoint_parts():
    return [getattr(place, name) for place, name, _ in CHECKPOINTING]


class Checkpointed(nn.Module):
    def __init__(self, reentrant, first):
        super().__init__()
        self.one, self.two, self.out, self.how = (
            nn.Linear(D, D),
            nn.Linear(D, D),
            nn.Linear(D, 3),
            (reentrant, first),
        )

    def _within(self, layer, x, wanted):
        reentrant, first = self.how
        if reentrant is None or first != wanted:
            return torch.tanh(layer(x))
        return checkpoint(lambda x: torch.tanh(layer(x)), x, use_reentrant=reentrant)

    def forward(self, x):
        return self.out(self._within(self.two, self._within(self.one, x, True), False))


def test_other_hooks_are_refused_with_a_way_out():
    def kept(layer, h):
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(layer(h))

    with pytest.raises(FldiagError, match=r"hooks on saved tensors.*memory limit"):
        problem(lambda: Net(Within(nn.Linear(D, D), kept))).gradient()


def test_what_has_no_derivative_here_is_an_error_with_a_remedy():
    def forward_only(layer, h):
        if torch.is_grad_enabled() and h.requires_grad:
            raise NotImplementedError("FlexAttention does not support backward on CPU")
        return layer(h)

    with pytest.raises(FldiagError, match=r"cannot be differentiated: FlexAttention.*eager"):
        problem(lambda: Net(Within(nn.Linear(D, D), forward_only))).loss()


def test_memory_that_runs_out_is_not_called_a_missing_derivative():
    def greedy(layer, h):
        if torch.is_grad_enabled() and h.requires_grad:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"
            )
        return layer(h)

    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator: can't allocate memory"):
        problem(lambda: Net(Within(nn.Linear(D, D), greedy))).loss()


def test_an_embedding_that_writes_to_its_weights_is_refused():
    p = problem(lambda: Net(nn.Tanh(), max_norm=0.1))
    before = p.w.clone()
    with pytest.raises(FldiagError, match="changes the weights"):
        p.loss()
    assert torch.equal(p.w, before)


class Bag(nn.Module):
    """Its backward has no derivative."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(V, D), nn.Linear(D, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)))


class Mean(Bag):
    def forward(self, x):
        return self.out(torch.tanh(F.embedding(x, self.embed.weight).mean(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_stand_in_for_second_derivatives_and_say_their_error(dtype):
    def made(net, **options):
        torch.manual_seed(1)
        return Problem(net(), F.cross_entropy, (TOKENS, LABELS), dtype=dtype, **options)

    p, twin = made(Bag), made(Mean)
    rng = torch.Generator().manual_seed(3)
    for v in (
        *twin.hessian()(torch.randn(len(p.w), generator=rng, dtype=torch.float64))[None],
        1e3 * torch.ones_like(p.w).double(),
    ):
        found, expected = p.hvp(v), twin.hvp(v)
        assert (found - expected).norm() <= 10 * p.step.error * expected.norm()
    assert (
        p.step.error < torch.finfo(dtype).eps ** 0.5
    )  # central differences reach eps^(2/3) at their best
    assert not p.hvp(torch.zeros_like(p.w)).any()
    rows, sure = spectrum(p, k=2), spectrum(twin, k=2)
    own = rows[rows.metric == "eigenvalue"]
    assert own.value.tolist() == pytest.approx(
        sure[sure.metric == "eigenvalue"].value.tolist(), rel=2e-3
    )
    assert (
        own.converged.all()
        and own.estimator.str.fullmatch(r"lanczos \(differences, step .*, error .*\)").all()
    )
    whole = trace(p, max_products=60, rtol=0.1, estimate="hutchinson").iloc[0]
    assert (
        "differences" in whole.estimator
        and abs(
            whole.value - trace(twin, max_products=60, rtol=1e-3, estimate="hutchinson").value[0]
        )
        < 6 * whole.stderr + 1e-3
    )
    with pytest.raises(FldiagError, match="cannot be computed by differences of gradients"):
        p.hessian(matrix="ggn")
