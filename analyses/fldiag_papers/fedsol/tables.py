"""The tables of the FedSOL paper whose cells come straight from the runs of their rows."""

from dataclasses import replace

from fldiag_papers.paper_tables import sizes_of, table_of, trials
from fldiag_papers.study import cost


def without_default(trial):
    """``head`` is FedSOL's default: one run with theirs."""
    return replace(
        trial, over={k: v for k, v in trial.over.items() if (k, v) != ("method.part", "head")}
    )


STUDIES = (
    table_of(
        "fedsol",
        "table1",
        title="Proximal loss: additive or projected",
        caption="Final test accuracy in percent: L2 (fedprox) and KL (strategy:A5) as additive terms, and the local "
        "gradient without the part that opposes their gradient (gradient_projection). The weight of KL is "
        "assumed to be 1.",
    ),
    table_of(
        "fedsol",
        "table2",
        title="Accuracy of eight methods",
        caption="Final test accuracy in percent under sharding and LDA partitions.",
    ),
    table_of(
        "fedsol",
        "table3",
        title="Accuracy with other architectures",
        caption="Final test accuracy in percent with VGG11, ResNet-18 and SL-ViT, LDA 0.1.",
    ),
    table_of(
        "fedsol",
        "table4",
        title="FedSOL with other proximal losses",
        caption="Final test accuracy in percent of five methods alone, and of FedSOL with their proximal losses "
        "(loss=), with the full network perturbed and rho = 2. The proximal gradient of FedNova is "
        "reconstructed.",
    ),
    table_of(
        "fedsol",
        "table5",
        title="Partial perturbation",
        caption="Final test accuracy in percent. Costs are in table5_counts.",
        trials=tuple(map(without_default, trials("fedsol", "table5"))),
    ),
    table_of(
        "fedsol",
        "table5_counts",
        title="Cost of partial perturbation, counted",
        caption="Multiply-adds of a local step divided by those of FedAvg, counted at every scale on the paper's model, images "
        "and classes, without the received model's outputs (the paper's delta). Here both passes of the head share the body's "
        "features; the paper counts one more forward pass.",
        trials=tuple(
            replace(t, ask=(cost(),), train=False) for t in trials("fedsol", "table5_counts")
        ),
        ask=(),
        pick={"flops_relative": {"metric": "flops_relative"}},
    ),
    sizes_of(
        "table7",
        {
            name: f"fedsol-{name}-lda0.1"
            for name in ("mnist", "cifar10", "svhn", "cinic10", "pathmnist", "tissuemnist")
        },
        source="FedSOL Table 7",
        caption="Number of training and test examples. The other columns of the paper's table are the clients, rounds and ratios "
        "of the presets.",
    ),
    table_of(
        "fedsol",
        "table10",
        title="Strategies",
        caption="Final test accuracy in percent of the strategies A0 (FedAvg), A1 (FedSOL) to A6. The paper does not "
        "print their radius and weight; here rho = 1.5, weight 1, with the head perturbed.",
    ),
)
