"""kNN-Per."""

from fldiag.method import Method, Neighbours, method
from fldiag.parts.personal import Epochs, FineTune, Rate
from fldiag.sections import Count, Positive, Unit


@method("knnper", source="Marfoq et al., ICML 2022, Algorithm 1")
def knnper(
    weight: Unit = 0.5,
    k: Count = 5,
    capacity: Count = 500,
    scale: Positive = 1.0,
    official_logits: bool = False,
    tune_epochs: Epochs = (0, 1, 5),
    tune_lr: Rate = "decayed",
) -> Method:
    """FedAvg, after which each client combines the model with a vote of its nearest training examples.

    Local step:  w_k := w_k - lr g_l(w_k)
    Server:      as FedAvg.
    Personal:    fine-tuning as in fedavg_ft (tune_epochs, tune_lr), then a store of features phi (what the head sees)
                 and labels of at most capacity of the client's training examples (a random subset);
                 s_j = exp(-||phi(x) - phi_j||^2 / (dim scale)) for the k nearest, dim the length of phi,
                 p_knn(c) = sum_{j: y_j = c} s_j / sum_j s_j,  prediction argmax weight p_knn + (1 - weight) p_model.
    Cost:        1 P a step, uplink 1x; afterwards a forward pass of the store.
    Values:      weight = 0.5, k = 5, capacity = 500, scale = 1 (dim = 512); e = 1 and 5 (the original does not tune: e = 0).
    Paper vs code: FedSOL's released code mixes p_knn with raw logits (official_logits) and fills the store with
    augmented inputs; here the inputs of the store are those of evaluation.
    """
    return Method(
        FineTune(tune_epochs, tune_lr, Neighbours(weight, k, capacity, scale, official_logits))
    )
