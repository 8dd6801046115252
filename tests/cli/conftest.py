"""Verbs write where they are called: every test in a folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
