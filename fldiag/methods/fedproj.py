"""FedProj."""

from typing import Annotated, Literal

from pydantic import Field

from fldiag.errors import FldiagError
from fldiag.method import Method, method
from fldiag.parts.distillation import Optimizer, Schedule, ServerDistillation
from fldiag.parts.ensemble import Ensemble, mean
from fldiag.parts.projection import MemoryProjection
from fldiag.sections import Count, NonNegative, Positive, Unit, Whole


@method(
    "fedproj",
    source="Chunduru et al., FedProj, Eq. 6-8",
    neutral={"proj_rate": 0.0, "gamma_wd": 0.0},
    equals="feddf",
    needs=("public",),
)
def fedproj(
    epochs: Whole = 1,
    tau: Positive = 3.0,
    lr: Positive = 1e-5,
    batch_size: Count = 128,
    optimizer: Optimizer = "adam",
    schedule: Schedule = "constant",
    weight_decay: NonNegative = 0.0,
    gamma_wd: NonNegative = 0.3,
    reference: Literal["avg", "prev_global", "clients"] = "avg",
    direction: Literal["teacher_student", "student_teacher"] = "teacher_student",
    proj_rate: Unit = 1.0,
    first_round: Whole = 0,
    last_round: Whole | None = None,
    memory_size: Annotated[int, Field(ge=-1)] = -1,
    memory_batch: Count = 128,
    eps: NonNegative = 1e-8,
    min_norm_sq: NonNegative = 0.0,
    clamp: Positive | None = None,
    official_trunc: bool = False,
) -> Method:
    """Local gradients that may not raise the loss on a public memory, and distillation on the server.

    Local step:  h = grad mean_{x in memory_batch} KL(softmax(zbar(x)/tau) || softmax(f(x; w)/tau)), zbar of the last round
                 g_u = g_l - (<g_l, h> / (||h||^2 + eps)) h if <g_l, h> < 0 and ||h||^2 > min_norm_sq, else g_l
    Memory:      memory_size public inputs (-1: all; 0: no projection), redrawn each round, and zbar on them
    Server:      zbar(x) = mean_k f(x; w_k); from w_avg, minimise tau^2 mean_x KL(softmax(zbar/tau) || softmax(f(x; w)/tau))
                 + gamma_wd ||w - w_ref||^2  for that many epochs (batch_size, optimizer, lr, schedule, weight_decay);
                 w_ref by reference: avg: w_avg; prev_global: w_g before the round; clients: mean_k ||w - w_k||^2
    Projection:  each client in a round with probability proj_rate, in rounds first_round to last_round (counted from 0;
                 never in round 0, which has no teacher)
    Data:        needs data.public.
    Cost:        2 P a step, uplink 1x, downlink 1x and the logits on the memory; server as FedDF.
    Values:      tau = 3, lr = 1e-5, epochs = 1 (CIFAR-10) or 3 (CIFAR-100), batch_size = 128 or 256; gamma_wd from
                 {0, 0.1, 0.3, 0.5}; memory_size 12500 (CIFAR-10), 15000 (CIFAR-100), 10000 (CINIC-10).
    Paper vs code: the code projects with min_norm_sq = 1e-6 and clamp = 10 (the coefficient within +-10), in rounds
    first_round = 10 to last_round = 89 of 100, its language variant with proj_rate = 0.7; it cuts public inputs and
    teacher logits to integers (official_trunc); its reference is the live student itself, so that its gamma_wd does
    nothing: here it is a true copy. The paper's Eq. 7 has the KL the other way round (direction = "student_teacher",
    for server and memory alike), its Algorithm 1 the reference prev_global and an unconditional projection with labels.
    The code trains the clients with Adam and lowers their lr to a tenth after E // 2 of E local epochs, in every round
    anew (train.optimizer = "adam", train.local_decay = 0.1).
    """
    if last_round is not None and last_round < first_round:
        raise FldiagError(
            f"last_round = {last_round} comes before first_round = {first_round}: nothing would be projected",
            "choose a later method.last_round, or method.proj_rate = 0 for no projection",
            usage=True,
        )
    teacher = Ensemble(mean)
    return Method(
        MemoryProjection(
            teacher,
            tau,
            rate=proj_rate,
            size=memory_size,
            batch_size=memory_batch,
            first=first_round,
            last=last_round,
            eps=eps,
            min_norm_sq=min_norm_sq,
            clamp=clamp,
            direction=direction,
            truncate=official_trunc,
        ),
        ServerDistillation(
            teacher,
            epochs,
            tau,
            lr,
            batch_size,
            optimizer=optimizer,
            schedule=schedule,
            weight_decay=weight_decay,
            direction=direction,
            gamma=gamma_wd,
            reference=reference,
        ),
    )
