"""FedET."""

from fldiag.method import Method, method
from fldiag.parts.distillation import Optimizer, Schedule, ServerDistillation
from fldiag.parts.ensemble import Ensemble, confident, confident_official
from fldiag.sections import Count, NonNegative, Positive, Whole


@method(
    "fedet",
    source="Cho et al., IJCAI 2022 (Fed-ET)",
    neutral={"epochs": 0},
    equals="fedavg",
    needs=("public",),
)
def fedet(
    epochs: Whole = 1,
    tau: Positive = 3.0,
    lr: Positive = 1e-5,
    batch_size: Count = 128,
    optimizer: Optimizer = "adam",
    schedule: Schedule = "constant",
    weight_decay: NonNegative | None = None,
    official_p3: bool = False,
) -> Method:
    """Ensemble distillation in which confident clients count more, here with equal architectures.

    Clients:     as FedAvg
    Server:      zbar(x) = sum_k alpha_k(x) f(x; w_k),  alpha_k(x) = Var_c[f_c(x; w_k)] / sum_j Var_c[f_c(x; w_j)];
                 then as FedDF: from w_avg, minimise tau^2 mean_x KL(softmax(zbar/tau) || softmax(f(x; w)/tau)) for
                 that many epochs (batch_size, optimizer, lr, schedule, weight_decay: by default none)
    Data:        needs data.public.
    Cost:        1 P a step, uplink 1x; server: one forward of each client's model and epochs P on the public data.
    Values:      tau = 3, lr = 1e-5, epochs = 1 (CIFAR-10) or 3 (CIFAR-100), batch_size = 128 or 256 (FedProj).
    Paper vs code: FedProj's released code (official_p3) takes the variance over the examples, of each client and
    class, divides it by its overall mean, sums the weighted logits, and gives Adam the weight_decay 5e-5. The
    original adds cross entropy on the ensemble's argmax and a diversity term, which are left out here. FedProj's code
    trains the clients with Adam and lowers their lr to a tenth after E // 2 of E local epochs, in every round anew
    (train.optimizer = "adam", train.local_decay = 0.1).
    """
    teacher = Ensemble(confident_official, at_once=True) if official_p3 else Ensemble(confident)
    decay = weight_decay if weight_decay is not None else 5e-5 if official_p3 else 0.0
    return Method(
        ServerDistillation(
            teacher,
            epochs,
            tau,
            lr,
            batch_size,
            optimizer=optimizer,
            schedule=schedule,
            weight_decay=decay,
        )
    )
