"""How clients drift apart, and in which sense: weights, gradients, proximal loss and representations, round by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from fldiag.diagnostics.drift import divergence, picture
from fldiag.diagnostics.drift.propositions import check
from fldiag.diagnostics.drift.representation import cka, features
from fldiag.diagnostics.drift.section import section
from fldiag.diagnostics.drift.summary import summary
from fldiag.errors import FldiagError
from fldiag.execution.pool import Serial
from fldiag.execution.start import started
from fldiag.losses import Proximal, Rule, Strength, mean_strengths, noise_floor, proximal_name, strengths
from fldiag.models.network import Network
from fldiag.params import cosine
from fldiag.registry import Progress, diagnostic
from fldiag.results.table import Row, table
from fldiag.rounds import proximal
from fldiag.rounds.history import History
from fldiag.rounds.proximal import Losses
from fldiag.rounds.round_weights import Stored

Radius = Annotated[float, Field(ge=0)]
#: Of what training records of every local step when asked to (``Run.steps``): what is also measured here.
STEP_METRICS = ("cos_gu_gp", "proximal_loss", "lambda_mean")
ETAS, RHOS = (1e-4, 1e-3, 1e-2), (3e-3, 1e-2, 3e-2)


def cost(history: History, options: Mapping[str, Any]) -> float:
    """A round: a gradient of all training data, and 1 + len(rho) of every stored client's own."""
    share = history.sampled / max(1, len(history.parts))
    return len(history.rounds) * (float(options["gradients"]) + share * (3 + len(options["rho"])))


@diagnostic("drift", on="run", parts=True, needs="clients", draw=picture.draw, summary=summary, cost=cost,
            section=section, order=40,
            example="checkpoints/digits-fedavg-s0-1a2b3c4d --rho 0 --rho 2")
def drift(history: History, progress: Progress | None = None, *,
          rho: Annotated[tuple[Radius, ...], Field(description="Radius of the perturbation in g_u.")] = (0.0, 0.5, 1.0, 2.0),
          loss: Annotated[Proximal, Field(description="Proximal loss: kl or l2.")] = "kl",
          tau: Annotated[float, Field(gt=0, description="Temperature of kl.")] = 3.0,
          strength: Annotated[Strength, Field(description="adaptive or fixed.")] = "adaptive",
          per: Annotated[Rule, Field(description="What the adaptive strengths are normalised over: layer, tensor or dim0."
                                     )] = "layer",
          part: Annotated[str, Field(description="Perturbed weights: full, body or head.")] = "full",
          batch: Annotated[int | None, Field(ge=1, description="Minibatches of so many examples (default: all of a "
                                                               "client's).")] = None,
          gradients: Annotated[bool, Field(description="Cosines with the global gradient.")] = True,
          representation: Annotated[bool, Field(description="CKA of trained and received models.")] = True,
          propositions: Annotated[bool, Field(description="Propositions 1 and 2 in the last round.")] = True) -> pd.DataFrame:
    """How clients drift apart: distances and cosines of weights, updates and gradients, proximal loss, CKA.

    Rows of every stored round with client weights; scope client (each), pair (two clients) and global (the mean, over
    ``n_clients`` clients or their pairs). d_k is a client's update: trained minus received weights.

    - ``global_local_divergence`` ||d_k||, ``local_local_divergence`` ||w_k - w_j||, whole and by ``layer`` (also
      ``part:body``, ``part:head``); ``squared_divergence`` ||w_k - w_new||^2 to the aggregated model; ``update_norm`` of
      every client and (moment aggregated) of the server; ``update_cosine`` between two updates, ``server_cosine`` between
      a client's and the server's.
    - with ``gradients``: ``gradient_cosine`` between the gradient of a client's own training loss and that of all clients'
      data, at the received weights; ``gradient_norm`` of both.
    - at the trained weights, on the client's training data (full batch, or the mean over fixed minibatches of ``batch``):
      ``proximal_loss`` L_p (``loss``: kl with temperature ``tau``, or l2); ``cos_gu_gp`` for every radius ``rho``, with
      g_u the gradient of the local loss at w + e, e from ``part`` of the weights, ``strength`` and ``per`` as in FedSOL
      (layer part:head: over the head's entries only); ``lambda_mean`` by layer, and in column ``scaled`` times the root
      of the layer's size (1 when all entries moved alike; not with ``per`` = dim0, where a layer's strengths have no norm of 1).
    - The same names with estimator ``steps`` are means over the ``n_steps`` local steps that training recorded with
      ``metrics.steps = true`` (see ``Run.steps``), at the weights and minibatches of those steps and the method's own
      perturbation. Column ``proximal`` names the proximal loss.
    - with ``representation``: ``cka`` between what the heads of the trained and the received model see of the test data.
    - with ``propositions``: of the last round, what ``fldiag.diagnostics.drift.propositions.check`` says, in float64.

    A cosine with a vector that is zero (or g_p below its rounding noise) has no value and is ``masked``.
    Cost a round: one gradient of all training data, and 1 + len(rho) of every stored client's own.

    Raises FldiagError when no round has client weights, or the model has no such part.
    """
    if part not in ("full", "body", "head"):
        raise FldiagError(f"part = {part!r} is not one of full, body, head", "choose one of them", usage=True)
    if part != "full":
        _ = history.layout.head_size
    options = {"kind": loss if not history.dataset.regression else "l2", "tau": tau}
    asked = Asked(gradients, representation, rho, strength, per, part, batch, options)
    rows: list[Row] = []
    last = None
    with started(history.executor, _of_round, (history, asked), name=lambda r: f"round {r}", most=len(history.rounds)) as pool:
        ahead = None if isinstance(pool, Serial) else zip(history.rounds, pool.map(history.rounds), strict=True)
        for stored in history.each(progress):
            if not stored.complete:
                continue
            stored = _finite(history, stored)
            if not stored.ids:
                continue
            last = stored
            found = None if ahead is None else next((rows for r, rows in ahead if r == stored.round), None)
            rows += _rows(history, asked, stored) if found is None else found
    if propositions and last is not None:
        rows += _propositions(history, last, options)
    rows = [{"masked": row["value"] is None or bool(np.isnan(row["value"])), "estimator": "exact", **row} for row in rows]
    rows += _recorded(history)
    return table([*rows, *history.notes], **history.common)


@dataclass(frozen=True)
class Asked:
    """What is measured of every round."""

    gradients: bool
    representation: bool
    rho: tuple[float, ...]
    strength: Strength
    per: Rule
    part: str
    batch: int | None
    options: dict[str, Any]


def _of_round(shared: tuple[History, Asked], round: int) -> list[Row] | None:
    """The rows of one round; None where the main process will say why there are none."""
    history, asked = shared
    try:
        stored = history.stored(round)
    except FldiagError:
        return None
    if not stored.complete or any(k >= len(history.parts) for k in stored.ids):
        return None
    stored = _finite(history, stored)
    return _rows(history, asked, stored) if stored.ids else None


def _rows(history: History, asked: Asked, stored: Stored) -> list[Row]:
    found = divergence.rows_of(stored, history.layout)
    found += _gradients(history, stored) if asked.gradients else []
    for j, k in enumerate(stored.ids):
        if history.pool.own(k).stop > history.pool.own(k).start:
            found += _proximal(history, stored, j, asked.rho, asked.strength, asked.per, asked.part, asked.batch, asked.options)
    found += _representation(history, stored) if asked.representation else []
    found += _means(found, {"test": history.pool.test.stop, "train": history.pool.n - history.pool.test.stop})
    return [{"round": stored.round, **row} for row in found]


def _finite(history: History, stored: Stored) -> Stored:
    """The round without the clients whose weights are not numbers, which are noted."""
    assert stored.clients is not None
    good = torch.isfinite(stored.clients).all(1)
    for k, fine in zip(stored.ids, good.tolist(), strict=True):
        if not fine:
            history.note(stored.round, f"the trained weights of client {k} are not finite: left out", k)
    keep = good.nonzero().flatten().tolist()
    return replace(stored, ids=tuple(stored.ids[j] for j in keep), clients=stored.clients[keep],
                   client_buffers={n: b[keep] for n, b in stored.client_buffers.items()})


def _gradients(history: History, stored: Stored) -> list[Row]:
    """Cosines of the stored clients' gradients with that of everybody's data, at the received weights."""
    (w, buffers), pool = stored.start, history.pool
    everything = pool.clients
    total, kept = torch.zeros_like(w, dtype=torch.float64), {}
    for k in range(len(history.parts)):
        own = pool.own(k)
        if own.stop <= own.start:
            continue
        losses = Losses(history.network, pool, buffers, stored.start, proximal.batches(own, None)[0], kind="l2")
        g = proximal.gradient(losses.local(), w)[1].double()
        total.add_(g, alpha=(own.stop - own.start) / (everything.stop - everything.start))
        if k in stored.ids:
            kept[k] = g
    base: Row = {"moment": "received", "slice": "train", "n_examples": everything.stop - everything.start}
    rows: list[Row] = [{**base, "metric": "gradient_norm", "scope": "global", "value": float(torch.linalg.vector_norm(total))}]
    for k, g in kept.items():
        own = pool.own(k)
        about = {**base, "scope": "client", "client": k, "slice": f"client:{k}/train", "n_examples": own.stop - own.start}
        rows += [{**about, "metric": "gradient_cosine", "value": _number(cosine(g, total))},
                 {**about, "metric": "gradient_norm", "value": float(torch.linalg.vector_norm(g))}]
    return rows


def _proximal(history: History, stored: Stored, j: int, radii: tuple[float, ...], strength: Strength, per: Rule, part: str,
              size: int | None, options: dict[str, Any]) -> list[Row]:
    """Proximal loss, cosines of g_u and g_p for every radius, and Lambda, at client j's trained weights."""
    (w, buffers), k, layout = stored.client(j), stored.ids[j], history.layout
    start, own = stored.start, history.pool.own(k)
    base: Row = {"moment": "trained", "scope": "client", "client": k, "slice": f"client:{k}/train",
                 "n_examples": own.stop - own.start}
    cut = layout.size - layout.head_size if layout.has_head else None
    cosines: dict[tuple[float, str | None], list[float]] = {
        (rho, layer): [] for rho in radii for layer in ([None, "part:head"] if cut is not None else [None])}
    prox, parts = 0.0, proximal.batches(own, size)
    for some in parts:
        losses = Losses(history.network, history.pool, buffers, start, some, **options)
        mean, g_p = proximal.gradient(losses.proximal(), w)
        prox += mean * some.n / (own.stop - own.start)
        for rho in radii:
            e = proximal.perturbation(g_p, w - start[0], rho, layout, strength=strength, part=part, per=per)
            if e is None:
                continue
            g_u = proximal.gradient(losses.local(), w + e)[1]
            for layer, where in ((None, slice(None)), ("part:head", slice(cut, None))):
                value = _number(cosine(g_u[where], g_p[where], noise_floor(g_p.dtype))) if (rho, layer) in cosines else None
                if value is not None:
                    cosines[rho, layer].append(value)
    which = proximal_name(options["kind"], options["tau"])
    rows = [{**base, "metric": "proximal_loss", "value": prox, "proximal": which}]
    rows += [{**base, "metric": "cos_gu_gp", "rho": rho, "layer": layer, "value": float(np.mean(found)) if found else None,
              "proximal": which}
             for (rho, layer), found in cosines.items()]
    for name, (strong, n) in mean_strengths(strengths(w - start[0], layout, per), layout, per).items():
        scaled = {} if per == "dim0" else {"scaled": float(strong) * n**0.5}
        rows.append({**base, "metric": "lambda_mean", "layer": name, "value": float(strong), **scaled})
    return rows


def _number(value: Tensor) -> float | None:
    """None for NaN."""
    return None if bool(value.isnan()) else float(value)


def _representation(history: History, stored: Stored) -> list[Row]:
    test, (w, buffers) = history.pool.test, stored.start
    received = features(history, (w, buffers), test)
    return [{"metric": "cka", "moment": "trained", "scope": "client", "client": k, "slice": "test",
             "n_examples": test.stop, "value": cka(features(history, stored.client(j), test), received)}
            for j, k in enumerate(stored.ids)]


def _means(rows: list[Row], sizes: dict[str, int]) -> list[Row]:
    """The mean over clients of what is measured client by client (divergence.py makes its own)."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["scope"] == "client" and row["metric"] in (*STEP_METRICS, "cka", "gradient_cosine"):
            groups.setdefault((row["metric"], row["moment"], row.get("layer"), row.get("rho")), []).append(row)
    found = []
    for (metric, moment, layer, rho), members in groups.items():
        values = [row["value"] for row in members if row["value"] is not None]
        slice_ = members[0]["slice"] if members[0]["slice"] == "test" else "train"
        scaled = [row["scaled"] for row in members if "scaled" in row]
        found.append({"metric": metric, "moment": moment, "scope": "global", "layer": layer, "rho": rho, "slice": slice_,
                      "n_examples": sizes[slice_], "proximal": members[0].get("proximal"),
                      "value": float(np.mean(values)) if values else None, "n_clients": len(values),
                      "stderr": float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None,
                      **({"scaled": float(np.mean(scaled))} if scaled else {})})
    return found


def _propositions(history: History, stored: Stored, options: dict[str, Any]) -> list[Row]:
    """Propositions 1 and 2 at every stored client's trained weights, in float64."""
    network = Network(history.network.module)
    network.module.double()
    pool = history.pool.to(torch.float64)
    rows = []

    def double(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: b.double() if b.is_floating_point() else b for n, b in buffers.items()}

    start = stored.start[0].double(), double(stored.start[1])
    for j, k in enumerate(stored.ids):
        own, (w, buffers) = pool.own(k), stored.client(j)
        if own.stop <= own.start:
            continue
        w = w.double()
        losses = Losses(network, pool, double(buffers), start, proximal.batches(own, None)[0], **options)
        g_p = proximal.gradient(losses.proximal(), w)[1]
        if float(torch.linalg.vector_norm(g_p)) < noise_floor(torch.float64):
            history.note(stored.round, f"client {k} did not move: no propositions", k)
            continue
        found = check(losses, g_p, w, ETAS, RHOS)
        rows += [{"round": stored.round, "moment": "trained", "scope": "client", "client": k, "slice": f"client:{k}/train",
                  "n_examples": own.stop - own.start, **row} for row in found]
    return rows


def _recorded(history: History) -> list[Row]:
    """Means over the local steps that training recorded, of the rounds that were read: every client's, and theirs."""
    rows: list[Row] = []
    for r in history.read:
        steps = history.steps(r)
        if steps is None or steps.empty:
            continue
        steps = steps[steps["metric"].isin(STEP_METRICS)].dropna(subset=["index", "client"])
        steps = steps.reindex(columns=["metric", "layer", "proximal", "client", "value", "scaled"])
        for (metric, layer, kind), part in steps.groupby(["metric", "layer", "proximal"], dropna=False, sort=False):
            about: Row = {"round": r, "metric": metric, "layer": None if pd.isna(layer) else layer, "moment": "trained",
                          "proximal": None if pd.isna(kind) else kind, "estimator": "steps"}
            per = part[["value", "scaled"]].astype(float).groupby(part["client"])
            means, counts = per.mean(), per["value"].count()
            for k, value, scaled in means.itertuples():
                rows.append({**about, "scope": "client", "client": int(k), "slice": f"client:{int(k)}/train", "value": value,
                             "scaled": scaled, "n_steps": int(counts[k])})
            known = means["value"].dropna()
            rows.append({**about, "scope": "global", "slice": "train", "n_clients": len(known), "n_steps": int(counts.sum()),
                         "stderr": known.std() / len(known) ** 0.5 if len(known) > 1 else None,
                         "value": known.mean() if len(known) else None, "scaled": means["scaled"].mean()})
    return [{**row, "value": v if known else None, "masked": not known}
            for row in rows for v in [row["value"]] for known in [v is not None and bool(np.isfinite(v))]]
