"""FedAvg with fine-tuning."""

from fldiag.method import Method, method
from fldiag.parts.personal import Epochs, FineTune, Rate


@method(
    "fedavg_ft",
    source="the fine-tuning protocol of Lee et al., CVPR 2024, Table 9; FedAvg: McMahan et al., AISTATS 2017",
)
def fedavg_ft(tune_epochs: Epochs = (0, 1, 5), tune_lr: Rate = "decayed") -> Method:
    """FedAvg, after which every client fine-tunes the final model on its own data.

    Local step:  w_k := w_k - lr g_l(w_k)
    Server:      as FedAvg.
    Personal:    w_k := w_g, then e epochs of local steps for each e of tune_epochs, with fresh momentum and
                 tune_lr "decayed": lr * lr_decay ** rounds, or "initial": lr; accuracy on the test examples of the
                 client's own class mixture, mean and standard deviation over all clients.
    Cost:        1 P a step, uplink 1x.
    Values:      e = 1 and 5 after 300 rounds (CIFAR-10).
    """
    return Method(FineTune(tune_epochs, tune_lr))
