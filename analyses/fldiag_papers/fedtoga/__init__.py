"""The studies of the FedTOGA paper, its printed numbers and its statements."""
