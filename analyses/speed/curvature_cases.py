"""Models, data and float64 references of curvature.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from curvature_peers import Answer
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training import has_cifar

import fldiag
from fldiag import Problem, data, models
from fldiag.problem.hessian import diagonal
from fldiag.runs.open_problem import open_problem
from fldiag.seeding import torch_rng

ROOT = Path(__file__).parents[2]


def trained(
    module: nn.Module, x: Tensor, y: Tensor, *, epochs: int, lr: float, seed: int = 0
) -> nn.Module:
    """A copy after some epochs of SGD (momentum 0.9, batch 50)."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    for epoch in range(epochs):
        for batch in torch.randperm(
            len(y), generator=torch_rng(seed, "benchmark order", epoch)
        ).split(50):
            optimizer.zero_grad()
            cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    module.zero_grad(set_to_none=True)
    return module.eval()


def double_backward(module: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """One Hessian-vector product as textbooks write it: the whole slice as one batch."""
    params = list(module.parameters())
    slopes = torch.autograd.grad(cross_entropy(module(x), y), params, create_graph=True)
    inner = sum(
        (
            g.reshape(-1) @ part
            for g, part in zip(slopes, v.split([p.numel() for p in params]), strict=True)
        ),
        torch.zeros((), dtype=v.dtype),
    )
    return torch.cat([h.reshape(-1) for h in torch.autograd.grad(inner, params)])


@dataclass
class Case:
    """A trained module in eval mode, one slice of examples, and what is true of it in double precision."""

    name: str
    title: str
    module: nn.Module
    x: Tensor
    y: Tensor
    exact: bool  # whether trace and diagonal have a float64 reference

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    @cached_property
    def double(self) -> Problem:
        return Problem(self.module, cross_entropy, (self.x, self.y), dtype=torch.float64)

    def check_products(self) -> float:
        """Relative difference of our float64 product from the textbook's, on a random vector."""
        v = torch.randn(self.size, dtype=torch.float64, generator=torch_rng(0, "benchmark check"))
        theirs = double_backward(copy.deepcopy(self.module).double(), self.x.double(), self.y, v)
        return float((self.double.hessian()(v) - theirs).norm() / theirs.norm())

    def product_error(self, answer: Answer) -> float:
        """Of a vector and its product: relative in norm."""
        v, found = answer.value
        true = self.double.hessian()(v.double())
        return float((found.double() - true).norm() / true.norm())

    def _eigsh(self, which: str, start: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        h = self.double.hessian()
        operator = LinearOperator(
            (self.size, self.size),
            dtype=np.float64,
            matvec=lambda v: h(torch.from_numpy(np.ascontiguousarray(v).reshape(-1))).numpy(),
        )
        values, vectors = eigsh(operator, k=5, which=which, tol=1e-5, ncv=20, v0=start)
        return values, vectors

    @cached_property
    def _largest(self) -> tuple[np.ndarray, Tensor]:
        values, vectors = self._eigsh("LA", np.random.default_rng(0).standard_normal(self.size))
        order = np.argsort(-values)
        return values[order], torch.from_numpy(vectors[:, order].T.copy())

    @property
    def largest(self) -> np.ndarray:
        """The five largest eigenvalues, descending."""
        return self._largest[0]

    @property
    def vectors(self) -> Tensor:
        """Their eigenvectors [5, P]."""
        return self._largest[1]

    @cached_property
    def magnitude(self) -> np.ndarray:
        """The five largest in magnitude, descending in value."""
        start = (
            self.vectors.sum(0).numpy()
            + np.random.default_rng(1).standard_normal(self.size) / self.size**0.5
        )
        return np.sort(self._eigsh("LM", start)[0])[::-1]

    @cached_property
    def diagonal(self) -> Tensor:
        return diagonal(self.double).vectors()[0]

    def announce(self) -> None:
        print(
            f"\n## {self.title}: {self.size:,} parameters, {len(self.y)} examples, loss {self.double.loss()[0]:.4f}\n"
        )
        print(
            f"Reference: scipy eigsh on the float64 product; that product against a "
            f"textbook double backward: relative difference {self.check_products():.1e}."
        )
        print(f"Eigenvalues: {', '.join(f'{v:.6g}' for v in self.largest)}.")
        if self.exact:
            print(f"Trace of the float64 diagonal: {float(self.diagonal.sum()):.6g}.")


def _digits() -> Case:
    found = open_problem(
        fldiag.load(ROOT / "checkpoints" / "example" / "fedavg-digits.pt"), samples=1500
    )
    x, y = found.read(0, found.n)
    with torch.no_grad():  # the module holds other weights than the checkpoint's
        for name, w in found.layout.views(found.w).items():
            found.module.get_parameter(name).copy_(w)
    return Case(
        "digits", "Small CNN on digits (FedAvg, committed checkpoint)", found.module, x, y, True
    )


def _images(n: int) -> tuple[Tensor, Tensor, str]:
    if has_cifar():
        full = data.load("cifar10")
        return full.normalise(full.train_x[:n]), full.train_y[:n], "real images"
    rng = torch_rng(0, "benchmark images")
    return (
        torch.randn(n, 3, 32, 32, generator=rng),
        torch.randint(10, (n,), generator=rng),
        "random images: no CIFAR-10 found",
    )


def _cifar(examples: int = 200) -> Case:
    x, y, which = _images(5000)
    module = trained(models.build("fedavg_cifar", (3, 32, 32), 10), x, y, epochs=3, lr=0.02)
    return Case(
        "cifar",
        f"FedAvg CIFAR CNN, 3 epochs on 5,000 {which}",
        module,
        x[:examples],
        y[:examples],
        True,
    )


def _resnet(examples: int = 16) -> Case:
    x, y, which = _images(2000)
    module = trained(models.build("resnet18_gn", (3, 32, 32), 10), x, y, epochs=2, lr=0.01)
    return Case(
        "resnet",
        f"ResNet-18 with GroupNorm, 2 epochs on 2,000 {which}",
        module,
        x[:examples],
        y[:examples],
        False,
    )


CASES: dict[str, Callable[..., Case]] = {"digits": _digits, "cifar": _cifar, "resnet": _resnet}
