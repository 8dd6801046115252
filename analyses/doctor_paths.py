"""Where clients start and which way they go: kinds of faults that the doctor finds in the weights, and sound kinds beside them.

    python analyses/doctor_paths.py [--seeds 1] [--only REGEX] [--runs /tmp/paths] [--out analyses]

As doctor_kinds.py, whose loop and words for outcomes it shares: ``BROKEN`` kinds are found, half found or missed; ``CODED``
kinds (uploads in half precision, on a grid, sparse, clipped, with noise for privacy) are right where information names them and
nothing else is said; of ``SOUND`` kinds any fault or warning is an accusation. Limits were set on loops in numpy, of a plain MLP
and a linear model. "Held out" kinds were not run as such while limits were set; loops in numpy had relatives of some (two rounds
late, weight decay, large rates, local Adam). The first run accused the asynchronous one, which was then mended. Writes
doctor_paths.csv. About three minutes of CPU time a seed.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from doctor_kinds import (
    Federation,
    Kind,
    State,
    by_class,
    doctor,
    equal,
    mean,
    moved,
    named,
    normed,
    optimiser,
    outcome,
    skewed,
)
from torch import Tensor, nn


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


@dataclass
class Elsewhere(Federation):
    """A federation whose clients may start elsewhere: ``start`` (t, k, federation) -> the state that client k trains."""

    start: Callable[[int, int, Elsewhere], State] | None = None
    past: list[State] = field(default_factory=list)  # received, by round
    own: dict[int, State] = field(default_factory=dict)  # the last results
    rates: Callable[[int, int], float] | None = None

    def _trained(self, t: int, k: int, net: nn.Module, state: State) -> State:
        if len(self.past) < t:
            self.past.append(state)
            self.before: State | None = None  # of the round's cohort
        if self.rates:
            self.rate = self.rates(t, k)
        self.before = self.own[k] = super()._trained(
            t, k, net, self.start(t, k, self) if self.start else state
        )
        return self.before


def at_one(who: int, start: Callable[[int, int, Elsewhere], State]) -> Callable[..., State]:
    return lambda t, k, f: start(t, k, f) if k == who else f.past[-1]


def late(rounds: int) -> Callable[..., State]:
    return lambda t, k, f: f.past[max(t - 1 - rounds, 0)]


def pinned(r: int) -> Callable[..., State]:
    return lambda t, k, f: f.past[min(t - 1, r)]


def not_loaded(*prefixes: str) -> Callable[..., State]:
    """Tensors whose names begin so stay the client's own."""
    return lambda t, k, f: {
        n: f.own[k][n] if k in f.own and n.startswith(prefixes) else v
        for n, v in f.past[-1].items()
    }


def one_after_the_other(t: int, k: int, f: Elsewhere) -> State:
    return f.before or f.past[-1]


def resumed(at: int, of: int) -> Callable[..., State]:
    return lambda t, k, f: f.past[of] if t == at else f.past[-1]


def broken(
    start: Callable[..., State], deal: Callable[[int], Any] = skewed, **options: Any
) -> Callable[[int], Federation]:
    return lambda seed: Elsewhere(deal(seed), start=start, **{"rounds": 10, **options})


# -- uploads


def sent(
    change: Callable[[Tensor], Tensor], who: tuple[int, ...] = (), *, weights: bool = False
) -> Callable[..., State]:
    """What a client sends: ``change`` (of its update, or of its weights) tensor by tensor, of all clients or of some."""

    def upload(t: int, k: int, received: State, state: State) -> State:
        if who and k not in who:
            return state
        if weights:
            return {n: change(v) for n, v in state.items()}
        return {n: received[n] + change(v - received[n]) for n, v in state.items()}

    return upload


def going(
    upload: Callable[..., State], deal: Callable[[int], Any] = equal, **options: Any
) -> Callable[[int], Federation]:
    return lambda seed: Federation(deal(seed), upload=upload, **{"rounds": 8, **options})


def noise_of(share: float) -> Callable[[int, int, State, State], State]:
    """White noise at client 4, of a share of its update's length; of more than all of it: nothing else."""

    def upload(t: int, k: int, received: State, state: State) -> State:
        if k != 4:
            return state
        d = {n: v - received[n] for n, v in state.items()}
        rms = float(torch.cat([v.reshape(-1) for v in d.values()]).square().mean().sqrt())
        return {
            n: received[n] + v * (share <= 1) + min(share, 1.0) * rms * torch.randn_like(v)
            for n, v in d.items()
        }

    return upload


def uniform(t: int, k: int, received: State, state: State) -> State:
    return (
        {n: v + 0.02 * (2 * torch.rand_like(v) - 1) for n, v in received.items()}
        if k == 4
        else state
    )


def clipped(t: int, k: int, received: State, state: State) -> State:
    length = float(torch.cat([(v - received[n]).reshape(-1) for n, v in state.items()]).norm())
    return moved(received, state, min(1.0, 0.3 / length))


def largest(d: Tensor) -> Tensor:
    limit = d.abs().reshape(-1).kthvalue(max(1, int(0.9 * d.numel()))).values
    return d * (d.abs() >= limit)


def in_8_bits(d: Tensor) -> Tensor:
    step = d.abs().max().clamp(min=1e-12) / 127
    return (d / step).round() * step


def half(kind: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda v: v.to(kind).to(v.dtype)


def rounding(change: Callable[[Tensor], Tensor], *, weights: bool) -> Callable[..., State]:
    """A server that gets rounded uploads, where the record has them as they were before."""

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        send = sent(change, weights=weights)
        return mean([send(t, 0, received, s) for s in states], sizes)

    return server


def noisy_server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
    return {n: v + 0.001 * torch.randn_like(v) for n, v in mean(states, sizes).items()}


WRONG, RANDOM = r"client 4 have the wrong sign", r"client 4 (?:are random|carry noise)"
BROKEN: dict[str, Kind] = {
    "initial_at_one": Kind(broken(at_one(3, pinned(0))), r"client 3 starts from"),
    "initial_at_one_equal": Kind(broken(at_one(3, pinned(0)), equal), r"client 3 starts from"),
    "initial_at_all": Kind(broken(pinned(0)), r"initial model in every round"),
    "pinned_at_one": Kind(
        broken(at_one(3, pinned(2)), sampled=5, rounds=16),
        r"client 3 (?:starts from|does not)",
        True,
    ),
    "late_at_one": Kind(broken(at_one(3, late(1))), r"client 3 starts from"),
    "late_at_one_by_class": Kind(
        broken(at_one(3, late(2)), by_class), r"client 3 starts from", True
    ),
    "late_at_all": Kind(broken(late(1)), r"one round old"),
    "late_at_all_equal": Kind(broken(late(1), equal), r"one round old"),
    "two_rounds_late": Kind(broken(late(2), rounds=14), r"2 rounds old", True),
    "half_of_them_late": Kind(
        broken(lambda t, k, f: late(1)(t, k, f) if k % 2 else f.past[-1], rounds=12), r"old", True
    ),
    "resumed": Kind(broken(resumed(8, 3), rounds=12), r"round 8 start from an older"),
    "resumed_adam": Kind(
        broken(
            resumed(7, 2),
            equal,
            build=convolutional,
            optimise=lambda net, rate: torch.optim.Adam(net.parameters(), 0.003),
        ),
        r"round 7 start from an older",
        True,
    ),
    "one_after_the_other": Kind(broken(one_after_the_other), r"one after the other"),
    "one_after_the_other_equal": Kind(broken(one_after_the_other, equal), r"one after the other"),
    "one_after_the_other_convolutional": Kind(
        broken(one_after_the_other, build=convolutional, rounds=5), r"one after the other", True
    ),
    "not_reset_at_one": Kind(
        broken(at_one(3, not_loaded(""))), r"client 3 does not load the model"
    ),
    "not_reset_at_one_sampled": Kind(
        broken(at_one(3, not_loaded("")), sampled=5, rounds=16), r"client 3 does not load", True
    ),
    "not_reset": Kind(broken(not_loaded("")), r"do not load the model"),
    "head_not_loaded": Kind(broken(not_loaded("3.")), r"do not load layer 3"),
    "head_not_loaded_equal": Kind(broken(not_loaded("3."), equal), r"do not load layer 3"),
    "head_not_loaded_at_one": Kind(
        broken(at_one(3, not_loaded("3."))), r"client 3 does not load layer 3"
    ),
    "norm_not_loaded": Kind(
        broken(not_loaded("2."), equal, build=normed), r"do not load layer 2", True
    ),
    "convolution_not_loaded_at_one": Kind(
        broken(at_one(4, not_loaded("0.")), build=convolutional), r"client 4 does not load", True
    ),
    "flipped_equal": Kind(going(sent(lambda d: -d, (4,))), WRONG),
    "flipped": Kind(going(sent(lambda d: -d, (4,)), skewed), WRONG),
    "two_flipped": Kind(going(sent(lambda d: -d, (4, 7))), WRONG, True),
    "flipped_convolutional": Kind(
        going(sent(lambda d: -d, (4,)), build=convolutional), WRONG, True
    ),
    "random": Kind(going(noise_of(2)), RANDOM),
    "random_by_class": Kind(going(noise_of(2), by_class), RANDOM),
    "uniform": Kind(going(uniform), RANDOM, True),
    "noise": Kind(going(noise_of(1)), RANDOM),
    "some_noise": Kind(going(noise_of(0.3), skewed), RANDOM, True),
    "three_times": Kind(going(sent(lambda d: 3 * d, (4,))), r"client 4 are unusually long", True),
}
CODED: dict[str, Kind] = {
    "fp16": Kind(going(sent(half(torch.float16), weights=True)), r"half precision \(fp16\)"),
    "bf16": Kind(going(sent(half(torch.bfloat16), weights=True)), r"half precision \(bf16\)"),
    "updates_fp16": Kind(going(sent(half(torch.float16))), r"updates in half precision", True),
    "8_bits": Kind(going(sent(in_8_bits)), r"grid"),
    "signs": Kind(going(sent(lambda d: 0.005 * d.sign())), r"signs", True),
    "largest": Kind(going(sent(largest)), r"sparse"),
    "clipped": Kind(going(clipped), r"clipped"),
    "fp16_at_server": Kind(
        lambda s: Federation(skewed(s), server=rounding(half(torch.float16), weights=True)),
        r"weights in fp16",
    ),
    "8_bits_at_server": Kind(
        lambda s: Federation(skewed(s), server=rounding(in_8_bits, weights=False)),
        r"updates in 8 bits",
        True,
    ),
    "noise_at_server": Kind(
        lambda s: Federation(skewed(s), server=noisy_server), r"mean with noise"
    ),
}


def cyclic(seed: int) -> Federation:
    """Two cohorts in turn."""

    def server(t: int, received: State, states: list[State], sizes: list[int]) -> State:
        return mean(states[t % 2 :: 2], sizes[t % 2 :: 2])

    return Federation(skewed(seed), server=server, rounds=10)


SOUND: dict[str, Kind] = {
    "equal": Kind(lambda s: Federation(equal(s), rounds=10)),
    "skewed": Kind(lambda s: Federation(skewed(s), rounds=10)),
    "very_skewed": Kind(lambda s: Federation(skewed(s, alpha=0.1, least=4), rounds=12)),
    "by_class_sampled": Kind(
        lambda s: Federation(by_class(s), sampled=4, rounds=16), held_out=True
    ),
    "one_client": Kind(lambda s: Federation(equal(s, 1), rounds=8)),
    "two_clients": Kind(lambda s: Federation(skewed(s, 2), rounds=8), held_out=True),
    "sampled": Kind(lambda s: Federation(skewed(s, 20, 0.5, 4), sampled=5, rounds=16)),
    "local_adam": Kind(
        lambda s: Federation(
            skewed(s), rounds=8, optimise=lambda net, r: torch.optim.Adam(net.parameters(), 0.01)
        ),
        held_out=True,
    ),
    "local_momentum": Kind(
        lambda s: Federation(
            skewed(s),
            rounds=8,
            optimise=lambda net, r: torch.optim.SGD(net.parameters(), 0.05, momentum=0.9),
        )
    ),
    "weight_decay": Kind(
        lambda s: Federation(
            skewed(s),
            rounds=8,
            epochs=10,
            optimise=lambda net, r: torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.02),
        ),
        held_out=True,
    ),
    "decay": Kind(
        lambda s: Elsewhere(skewed(s), rounds=12, rates=lambda t, k: 0.2 * 0.7**t), held_out=True
    ),
    "large_rate": Kind(lambda s: Federation(skewed(s), rounds=8, rate=1.0), held_out=True),
    "tiny_rate": Kind(lambda s: Federation(skewed(s), rounds=8, rate=1e-5), held_out=True),
    "converged": Kind(lambda s: Federation(skewed(s), rounds=40, epochs=3), held_out=True),
    "full_batch": Kind(lambda s: Federation(skewed(s), rounds=8, batch=2000), held_out=True),
    "unequal_rates": Kind(
        lambda s: Elsewhere(equal(s), rounds=8, rates=lambda t, k: 0.02 * (1 + k)), held_out=True
    ),
    "server_momentum": Kind(named("fedavgm", lambda: optimiser("momentum"))),
    "batch_norm": Kind(lambda s: Federation(equal(s), build=normed, rounds=8), held_out=True),
    "convolutional": Kind(lambda s: Federation(equal(s), build=convolutional, rounds=6)),
    "personal_heads": Kind(broken(not_loaded("3."), options={"method": "fedper"}), held_out=True),
    "asynchronous": Kind(broken(at_one(3, late(2)), options={"method": "fedasync"}), held_out=True),
}


def verdict(kind: Kind, group: str, table: pd.DataFrame) -> str:
    """found, half or missed of a fault; of the others ok, missed (a code that is not named) or accused."""
    if group == "broken":
        return outcome(kind, table)
    if table["severity"].isin(["fault", "warning"]).any():
        return "accused"
    return "missed" if group == "coded" and outcome(kind, table) == "missed" else "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="1", help="comma-separated")
    parser.add_argument("--only", default="", help="a regular expression of kinds")
    parser.add_argument("--runs", type=Path, help="a folder that keeps the runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    groups = {"broken": BROKEN, "coded": CODED, "sound": SOUND}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for group, name, kind in [
            (g, n, k) for g, kinds in groups.items() for n, k in kinds.items()
        ]:
            if not re.search(args.only, f"{group}-{name}"):
                continue
            for seed in map(int, args.seeds.split(",")):
                table = doctor(kind, f"{group}-{name}", seed, args.runs or Path(scratch))
                said = table[table["severity"].isin(["fault", "warning"])]
                texts = (
                    said["severity"] + ": " + said["what"] + " (" + said["evidence"] + ")"
                ).tolist()
                rows.append(
                    {
                        "group": group,
                        "kind": name,
                        "held out": kind.held_out,
                        "seed": seed,
                        "outcome": verdict(kind, group, table),
                        "findings": "; ".join(texts),
                    }
                )
                print(
                    f"{rows[-1]['outcome']:8} {group}-{name} {seed}: {'; '.join(texts)[:160]}",
                    flush=True,
                )
    frame = pd.DataFrame(rows)
    frame.to_csv(args.out / "doctor_paths.csv", index=False)
    for (group, held), part in frame.groupby(["group", "held out"]):
        counts = ", ".join(f"{n} {o}" for o, n in part["outcome"].value_counts().items())
        print(f"{group}{' (held out)' if held else ''}: {len(part)} runs, {counts}")
    print(args.out / "doctor_paths.csv")


if __name__ == "__main__":
    main()
