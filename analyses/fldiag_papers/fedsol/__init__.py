"""The studies of the FedSOL paper, its printed numbers and its statements."""
