import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test has a working folder of its own, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
