"""What the FedAlign paper says in words, checked where its figures were made; the ledger has the outcome."""

from functools import partial

from fldiag_papers.claims import (
    Claim,
    counted,
    everywhere,
    lowest,
    need,
    ordered,
    per_seed,
    top,
)

ALIGN = "partition=lda;alpha=0.5;clients=16;ratio=1;epochs="
SIX = ("fedavg", "fedprox", "moon", "mixup", "stochdepth", "gradaug")


def flattest(table, metric="lambda_max"):
    return lowest(per_seed(table, metric=metric), "gradaug", SIX)


def stagnates(table):
    """More local epochs than 20 do not help FedAvg and FedProx: 30 not clearly above 20; a clear gain refutes it."""
    parts = {}
    for name in ("fedavg", "fedprox"):
        values = per_seed(table, "setting", metric="accuracy", method=name)
        parts[name] = ordered(
            values, [f"{ALIGN}30;rounds=25", f"{ALIGN}20;rounds=25"], equal=[True]
        )
    return everywhere(parts, "methods")


def saves(base, percent, name="fedalign", metric="MFLOPs"):
    """``name`` needs at least so many percent (less 1) fewer multiply-adds than ``base``."""

    def check(table):
        values = per_seed(table, metric=metric)
        need(values, (name, base))
        saved = float((1 - values[name] / values[base]).mean() * 100)
        return counted(saved >= percent - 1, f"{saved:.3g} % saved", (name, base))

    return check


CLAIMS = (
    Claim(
        "fedalign-flattest",
        "GradAug has the smallest largest eigenvalue of the six methods.",
        "FedAlign Table 1",
        "fedalign/table1",
        flattest,
    ),
    Claim(
        "fedalign-sharpest",
        "FedAvg has the largest largest eigenvalue of the six methods.",
        "FedAlign Table 1",
        "fedalign/table1",
        lambda t: lowest(per_seed(t, metric="lambda_max"), "fedavg", SIX, highest=True),
    ),
    *(
        Claim(
            f"fedalign-{metric}",
            f"GradAug has the lowest {name} of the six methods.",
            "FedAlign Table 1",
            "fedalign/table1",
            partial(flattest, metric=metric),
        )
        for metric, name in (("trace", "trace H_T"), ("H_N", "H_N"))
    ),
    Claim(
        "fedalign-best",
        "GradAug is the most accurate of the six methods at every number of clients.",
        "FedAlign Table 4",
        "fedalign/table4",
        partial(top, method="gradaug"),
    ),
    Claim(
        "fedalign-epochs",
        "GradAug is the most accurate at every number of local epochs.",
        "FedAlign Table 3",
        "fedalign/table3",
        partial(top, method="gradaug"),
    ),
    Claim(
        "fedalign-stagnation",
        "FedAvg and FedProx gain nothing from 30 local epochs over 20.",
        "FedAlign Table 3",
        "fedalign/table3",
        stagnates,
    ),
    *(
        Claim(
            f"fedalign-saves-{percent}",
            f"FedAlign needs {percent} % fewer {what} than {label}.",
            "FedAlign Table 5",
            "fedalign/table5_counts",
            saves(base, percent, metric=metric),
        )
        for base, label, percent, metric, what in (
            ("gradaug (n=1)", "GradAug (n = 1)", 33, "MFLOPs", "multiply-adds"),
            ("gradaug (n=2)", "GradAug (n = 2)", 47, "MFLOPs", "multiply-adds"),
            ("moon", "MOON", 65, "MFLOPs", "multiply-adds"),
            ("moon", "MOON", 70, "params_M", "parameters"),
        )
    ),
)
