"""Configs by name: ``fldiag train digits``."""
