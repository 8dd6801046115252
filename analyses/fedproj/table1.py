"""FedProj Table 1: nine methods."""

from fldiag.figures.paper_tables import table_of

STUDY = table_of("fedproj", "table1", title="Accuracy of nine methods",
                 caption="Final test accuracy in percent; FedProj with the weight penalty that was best on the paper's tests. "
                         "FedProx here has its proximal term, which is inert in the released code.")
