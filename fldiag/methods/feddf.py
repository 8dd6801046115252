"""FedDF."""

from fldiag.method import Method, method
from fldiag.parts.distillation import Optimizer, Schedule, ServerDistillation
from fldiag.parts.ensemble import Ensemble, mean
from fldiag.sections import Count, NonNegative, Positive, Whole


@method(
    "feddf",
    source="Lin et al., NeurIPS 2020, Algorithm 1",
    neutral={"epochs": 0},
    equals="fedavg",
    needs=("public",),
)
def feddf(
    epochs: Whole = 1,
    tau: Positive = 3.0,
    lr: Positive = 1e-5,
    batch_size: Count = 128,
    optimizer: Optimizer = "adam",
    schedule: Schedule = "constant",
    weight_decay: NonNegative = 0.0,
) -> Method:
    """Ensemble distillation: the averaged model learns from the clients' mean logits on public data.

    Clients:     as FedAvg
    Server:      zbar(x) = mean_k f(x; w_k) in eval mode;  from w_avg = sum_k p_k w_k, minimise
                 tau^2 mean_x KL(softmax(zbar(x)/tau) || softmax(f(x; w)/tau))  over the unlabelled public inputs,
                 for that many epochs of minibatches of batch_size, with the optimizer at learning rate lr and
                 weight_decay, constant or on a cosine schedule (half a period = 10 epochs, a step an epoch)
    Data:        needs data.public.
    Cost:        1 P a step, uplink 1x; server: one forward of each client's model and epochs P on the public data.
    Values:      tau = 3, lr = 1e-5, epochs = 1 (CIFAR-10) or 3 (CIFAR-100), batch_size = 128 or 256 (FedProj); in the
                 original tau = 1, Adam 1e-3 with cosine and early stopping on the softmax average.
    Paper vs code: FedProj's released code has the cosine schedule here, of consequence for epochs > 1 only. It trains the
    clients with Adam and lowers their lr to a tenth after E // 2 of E local epochs, in every round anew
    (train.optimizer = "adam", train.local_decay = 0.1); the paper speaks of Adam alone.
    """
    return Method(
        ServerDistillation(
            Ensemble(mean),
            epochs,
            tau,
            lr,
            batch_size,
            optimizer=optimizer,
            schedule=schedule,
            weight_decay=weight_decay,
        )
    )
