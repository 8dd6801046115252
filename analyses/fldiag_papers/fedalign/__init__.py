"""The studies of the FedAlign paper, its printed numbers and its statements."""
