"""Per-FedAvg."""

from fldiag.method import Method, PersonalPlan, method
from fldiag.parts.personal import Epochs, MetaStep, Rate
from fldiag.sections import Count, NonNegative, Positive


@method("perfedavg", source="Fallah et al., NeurIPS 2020, Algorithm 1, first-order variant")
def perfedavg(
    inner_lr: NonNegative | None = None,
    beta_outer: Positive = 0.01,
    official: bool = False,
    tune_split: Count = 5,
    tune_epochs: Epochs = (0, 1, 5),
    tune_lr: Rate = "decayed",
) -> Method:
    """First-order MAML: the model is trained to be good after one local step.

    Local step:  w' = w_k - inner_lr (grad L(w_k; b1) + wd w_k),  w_k := w_k - beta_outer (grad L(w'; b2) + wd w_k),
                 b1 and b2 the halves of a minibatch. inner_lr: by default the round's lr (which decays; beta_outer does not)
    Server:      as FedAvg.
    Personal:    the same two-step procedure, e epochs of ceil(L / tune_split) steps for each e of tune_epochs, L the
                 halves in a pass over the client's data; inner lr from tune_lr "decayed": lr * lr_decay ** rounds, or
                 "initial": lr (where inner_lr is not given).
    Cost:        1 P a step (two halves; 2 P in terms of the paper's minibatches), uplink 1x.
    Values:      beta_outer = 0.01. FedSOL's protocol makes E ceil(L / E) outer steps a round on pairs of minibatches of
                 B = 50, about L of them, E = 5: set train.batch_size = 2 B and train.epochs = 2, which gives 2 ceil(L / 2)
                 steps on the same pairs; tune_split = E.
    Paper vs code: in the released code of FedSOL one momentum buffer sees both gradients (official); here the inner
    step has no momentum.
    """
    return Method(
        MetaStep(inner_lr, beta_outer, official, PersonalPlan(tune_epochs, lr=tune_lr), tune_split)
    )
