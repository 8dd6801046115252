"""FedSOL Table 4: other methods' proximal losses, alone and within FedSOL."""

from fldiag_papers.paper_tables import table_of

STUDY = table_of(
    "fedsol",
    "table4",
    title="FedSOL with other proximal losses",
    caption="Final test accuracy in percent of five methods alone, and of FedSOL with their proximal losses "
    "(loss=), with the full network perturbed and rho = 2. The proximal gradient of FedNova is "
    "reconstructed.",
)
