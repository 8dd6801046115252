"""Local training without federation."""

from fldiag.method import Method, method
from fldiag.parts.personal import LocalTraining


@method("local_only", source="the baseline without communication of Lee et al., CVPR 2024, Table 9")
def local_only() -> Method:
    """Every client trains its own model on its own data; nothing is exchanged.

    Local step:  w_k := w_k - lr g_l(w_k), from where the client was when it was last sampled (at first w_g^0)
    Server:      nothing; w_g stays w_g^0, whose accuracy is what a round reports
    Personal:    each client's own model, on the test examples of its own class mixture.
    Cost:        1 P a step, uplink 0.
    Values:      200 rounds of one epoch, every client in every round (clients.per_round = clients.total,
    train.epochs = 1): then train.lr_decay, applied once a round, is the paper's decay of 0.99 an epoch. With
    train.keep_momentum = true it is a single training of 200 epochs; else each epoch begins with fresh momentum.
    """
    return Method(LocalTraining())
