"""``train.clip_before_quadratic``: every quadratic penalty joins after clipping, as in code that writes it as weight decay."""

import pytest
from helpers import classification, config, federation, play, trace

SIZES = (20, 13, 7)
DATA = classification(SIZES)
LR, WD, CLIP = 0.1, 0.01, 0.2


def dual(lam):
    """The strength of the penalty, and the linear terms of client k from what it holds and what it was sent."""
    return lambda k: lam, lambda k, w_g, own, sent: lam * (own["h_k"] - w_g)


def drift(lam, by_size):
    def omega(k):
        return SIZES[k] * 3 / sum(SIZES) if by_size else 1.0

    def linear(k, w_g, own, sent):
        return lam / omega(k) * (own["h_k"] - w_g) + sent["g"] / omega(k) - own["g_k"]

    return lambda k: lam / omega(k), linear


def centre(mu):
    return lambda k: mu, lambda k, w_g, own, sent: -mu * w_g


CASES = [
    ("fedprox", {"mu": 0.7}, *centre(0.7)),
    ("strategy", {"id": "A5", "loss": "l2", "beta_prox": 0.7}, *centre(0.7)),
    ("fedacg", {"mu": 0.35}, *centre(0.7)),
    ("feddyn", {"lam": 0.6}, *dual(0.6)),
    ("fedspeed", {"lam": 0.6}, *dual(0.6)),
    ("fedsmoo", {"lam": 0.6}, *dual(0.6)),
    ("fedlesam_d", {"lam": 0.6}, *dual(0.6)),
    ("feddc", {"lam": 0.6}, *drift(0.6, False)),
    ("feddc", {"lam": 0.6, "omega": "n"}, *drift(0.6, True)),
    (
        "fedtoga",
        {"lam": 0.6, "beta_dual": 0.9},
        lambda k: 0.6,
        lambda k, w_g, own, sent: 0.6 * (own["h_k"] - w_g) + 0.9 * sent["delta"],
    ),
]
every_penalty = pytest.mark.parametrize(
    ("method", "options", "strength", "linear"),
    CASES,
    ids=["-".join([m, *(v for v in o.values() if isinstance(v, str))]) for m, o, *_ in CASES],
)


def made(method, options, early, clip, stack="off"):
    return federation(
        config(
            method,
            options,
            clip=clip,
            clip_before_quadratic=early,
            momentum=0.0,
            weight_decay=WD,
            lr=LR,
            lr_decay=1.0,
            stack=stack,
        ),
        DATA,
    )


def far(a, b):
    return float((a - b).abs().max())


@every_penalty
def test_without_a_clip_the_place_does_not_matter(method, options, strength, linear):
    one, other = made(method, options, False, None), made(method, options, True, None, "on")
    play(one, 3)
    play(other, 3)
    assert far(one.w, other.w) <= 1e-12
    for i, state in other.clients.items():
        assert all(far(one.clients[i][k], v) <= 1e-11 for k, v in state.items())


@every_penalty
@pytest.mark.parametrize("early", [True, False])
def test_steps_with_an_active_clip(method, options, strength, linear, early):
    """early: clip(g + linear) + (wd + lam) w; else clip(g + linear + lam w) + wd w."""
    federated = made(method, options, early, CLIP)
    play(federated, 2)
    own, sent, w_g = federated.clients, dict(federated.state), federated.sent()
    own = {i: dict(s) for i, s in own.items()}
    raw, clipped = trace(federated, raw=True), 0
    [(seen, _)] = play(federated)
    for k in range(3):
        steps = [s for s, ids in enumerate(raw.ids) if ids == [k]]
        ends = [raw.w[s][0] for s in steps[1:]] + [seen.rows[k]]
        for s, after in zip(steps, ends, strict=True):
            w, lam = raw.w[s][0], strength(k)
            g = raw.g[s][0] + linear(k, w_g, own.get(k), sent) + (0 if early else lam * w)
            clipped += float(g.norm()) > CLIP
            used = g * min(1.0, CLIP / (float(g.norm()) + 1e-6)) + (WD + (lam if early else 0)) * w
            assert far(after, w - LR * used) <= 1e-12
    assert clipped >= 6
