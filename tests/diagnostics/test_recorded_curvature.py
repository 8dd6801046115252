"""Matching, account and flatness of a recorded loop against dense float64 Hessians of the loop's own modules."""

from itertools import combinations

import numpy as np
import pytest
import torch
from loops import ask, cosine, flat, loss
from reference import dense, rows, value, values
from torch.nn.functional import cross_entropy


def of(net, data):
    return dense(net, cross_entropy, data)


def test_matching(loop):
    table = ask(loop, "matching", k=2)
    nets, close = loop.trained[-1], {"rel": 1e-5, "abs": 1e-6}  # diagonals travel in float32
    for on in ("client", "global"):
        data = {k: loop.data[k] if on == "client" else loop.all for k in nets}
        h = {k: of(net, data[k]).hessian for k, net in nets.items()}
        parts = of(loop.net, loop.all)
        traces = {
            k: [float(d.sum()) for d in m.diagonal().split(parts.sizes)] for k, m in h.items()
        }
        for k, m in h.items():
            own = {"client": k, "slice": f"client:{k}/train" if on == "client" else "train"}
            own["scope"] = "client"
            assert value(table, "trace", **own) == pytest.approx(float(m.trace()))
            assert value(table, "diagonal_norm", **own) == pytest.approx(float(m.diagonal().norm()))
            if on == "client":
                top = torch.linalg.eigvalsh(m)[[-1, -2]].tolist()
                assert values(table, "eigenvalue", **own) == pytest.approx(top, abs=1e-3 * top[0])
        forms = {
            "diag": {k: m.diagonal() for k, m in h.items()},
            "tensor_trace": {k: torch.tensor(t).double() for k, t in traces.items()},
        }
        for form, d in forms.items():
            pairs = [*combinations(sorted(d), 2)]
            expected = {
                "H_N": [float((d[j].norm() - d[k].norm()) ** 2) for j, k in pairs],
                "H_D": [cosine(d[j], d[k]) for j, k in pairs],
            }
            for name, numbers in expected.items():
                own = {"data": on, "diag_mode": form}
                found = values(table, name, scope="pair", **own)
                assert found == pytest.approx(numbers, **close)
                own["scope"] = "global"
                found = value(table, name, self_pairs=False, **own)
                assert found == pytest.approx(np.mean(numbers), **close)
                same, n = (name == "H_D") * 1.0, len(d)
                mean = (same + (n - 1) * np.mean(numbers)) / n
                found = value(table, name, self_pairs=True, **own)
                assert found == pytest.approx(mean, **close)


def test_overlap_of_eigenspaces(loop):
    """The mean squared cosine; the spaces are known as well as the eigenvalues' residuals say."""
    table, nets = ask(loop, "matching", k=2), loop.trained[-1]
    tops = {k: of(n, loop.data[k]).hessian for k, n in nets.items()}
    tops["global"] = of(loop.past[-1], loop.all).hessian
    tops = {k: torch.linalg.eigh(m).eigenvectors[:, -2:] for k, m in tops.items()}
    overlap = {
        p: float((tops[p[0]].T @ tops[p[1]]).square().sum() / 2) for p in combinations(tops, 2)
    }
    clients = [p for p in overlap if "global" not in p]
    for j, k in clients:
        j, k = sorted((j, k))
        found = value(table, "eigenspace_overlap", client=j, client_b=k)
        assert found == pytest.approx(overlap.get((j, k), overlap.get((k, j))), abs=2e-3)
    found = value(table, "eigenspace_overlap", scope="global")
    assert found == pytest.approx(np.mean([overlap[p] for p in clients]), abs=2e-3)
    for k in nets:
        found = value(table, "global_overlap", client=k)
        assert found == pytest.approx(overlap[k, "global"], abs=2e-3)


def test_account(loop):
    """L(w + d) - L(w) = g'd + d'Hd / 2 + rest, by eigenvector, and by client."""
    table, nets, received = ask(loop, "account", k=2), loop.trained[-1], loop.past[-2]
    start = of(received, loop.all)
    g, h, before = start.gradient, start.hessian, loss(received, loop.all)
    pairs = torch.linalg.eigh(h)
    n = torch.tensor([len(loop.data[k][1]) for k in nets]).double()
    p = dict(zip(nets, (n / n.sum()).tolist(), strict=True))
    new = flat(loop.past[-1]) - start.w
    ends = [({"client": k, "moment": "trained"}, net) for k, net in nets.items()]
    ends.append(({"scope": "global", "moment": "aggregated"}, loop.past[-1]))
    for at, net in ends:
        d = flat(net) - start.w
        linear, quadratic = float(g @ d), float(d @ h @ d) / 2
        change = loss(net, loop.all) - before
        numbers = {"change": change, "linear": linear, "quadratic": quadratic}
        numbers["rest"] = change - linear - quadratic
        for name, number in numbers.items():
            found = value(table, name, estimator="exact", **at)
            assert found == pytest.approx(number, abs=1e-8), (at, name)
        rest = [linear, quadratic]
        for i in (1, 2):
            v, size = pairs.eigenvectors[:, -i], float(pairs.eigenvalues[-i])
            terms = float(v @ g) * float(v @ d), size * float(v @ d) ** 2 / 2
            for j, (name, term) in enumerate(zip(("linear", "quadratic"), terms, strict=True)):
                found = value(table, name, estimator="eigen", index=i, **at)
                assert found == pytest.approx(term, abs=2e-3 * float(d.norm()))
                rest[j] -= found
        for name, term in zip(("linear", "quadratic"), rest, strict=True):
            found = value(table, name, estimator="eigen", index=0, **at)
            assert found == pytest.approx(term, abs=1e-8)
    for k, net in nets.items():
        share = p[k] * (flat(net) - start.w)
        at = {"estimator": "client", "client": k}
        assert value(table, "linear", **at) == pytest.approx(float(g @ share), abs=1e-9)
        found = value(table, "quadratic", **at)
        assert found == pytest.approx(float(share @ h @ new) / 2, abs=1e-9)


def sharpness(net, data, rho=0.05):
    at = of(net, data)
    return float(at.loss(at.w + rho * at.gradient / at.gradient.norm()) - at.loss(at.w))


def test_flatness(loop):
    """The whole against the mean of its parts: at the clients' own weights, and at one point."""
    table, nets, new = ask(loop, "flatness", rho=0.05), loop.trained[-1], loop.past[-1]
    n = np.array([len(y) for _, y in loop.data])
    points = {
        "trained": [(nets[k], loop.data[k]) for k in range(3)],
        "aggregated": [(new, data) for data in loop.data],
    }
    measures = {
        "sharpness": sharpness,
        "trace": lambda *at: float(of(*at).hessian.trace()),
        "eigenvalue": lambda *at: float(torch.linalg.eigvalsh(of(*at).hessian)[-1]),
    }
    for name, measure in measures.items():
        close = {"rel": 1e-3} if name == "eigenvalue" else {"rel": 1e-6, "abs": 1e-9}
        whole = measure(new, loop.all)
        at = {"round": 3, "moment": "aggregated"}
        assert value(table, name, scope="global", **at) == pytest.approx(whole, **close)
        for moment, parts in points.items():
            numbers = [measure(*part) for part in parts]
            at["moment"] = moment
            found = values(table, name, scope="client", **at)
            assert found == pytest.approx(numbers, **close)
            mean = n @ numbers / n.sum()
            assert value(table, f"{name}_parts", **at) == pytest.approx(mean, **close)
            gap = value(table, f"{name}_gap", **at)
            assert gap == pytest.approx(whole - mean, abs=2e-3 * abs(whole) + 1e-9)
            if moment == "trained":  # clients as a sample
                spread = (1.5 * np.sum((n / n.sum() * (numbers - mean)) ** 2)) ** 0.5
                (row,) = rows(table, f"{name}_gap", **at).to_dict("records")
                assert row["stderr"] == pytest.approx(spread, rel=1e-2)


def test_adaptive_sharpness_is_a_maximum(loop):
    """Over ||delta / |w| || <= rho: not below one step of ascent, nor below any of many random points."""
    table, new = ask(loop, "flatness", adaptive_rho=0.5), loop.past[-1]
    at = {"round": 3, "moment": "aggregated", "scope": "global"}
    found = value(table, "adaptive_sharpness", **at)
    start = of(new, loop.all)
    size = start.w.abs()
    z = torch.randn(200, len(size), generator=torch.Generator().manual_seed(0)).double()
    z = torch.cat([(size * start.gradient)[None], z])
    points = 0.5 * size * z / z.norm(dim=1, keepdim=True)
    rises = [float(start.loss(start.w + d) - start.loss(start.w)) for d in points]
    assert found >= max(rises) - 1e-9 and max(rises) > 0
    g, h = size * start.gradient, size[:, None] * start.hessian * size
    steepest = 0.5 * float(g.norm()) + 0.125 * float(torch.linalg.eigvalsh(h)[-1])
    assert found <= 1.5 * steepest  # what two orders allow
