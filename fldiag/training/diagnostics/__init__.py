"""Diagnostics that train: each starts from stored weights and goes on from there."""
