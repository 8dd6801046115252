"""The studies of the FedProj paper, its printed numbers and its statements."""
