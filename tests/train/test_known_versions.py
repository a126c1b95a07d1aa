"""Versions that are known to be bad, on fakes of devices and of what is installed."""

import re

import pytest

from jaxtp.train import known_versions
from jaxtp.train.known_versions import TABLE, known_problems

A6000, H100 = ("NVIDIA RTX A6000", "cuda 8.6"), ("NVIDIA H100 80GB HBM3", "cuda 9.0")
CPU, B300, RUBIN = ("cpu", "cpu"), ("NVIDIA B300", "cuda 10.3"), ("NVIDIA Rubin", "cuda 10.7")


@pytest.mark.parametrize(
    ("package", "version", "device", "thread"),
    [
        ("jax", "0.11.0", A6000, "jax-ml/jax/issues/40633"),
        ("jax", "0.11.1.dev20260725", A6000, "jax-ml/jax/issues/40633"),
        ("jax", "0.10.2", A6000, None),
        ("jax", "0.12.0.1", A6000, None),
        ("jax", "0.11.1", H100, None),
        ("nvidia-nccl-cu13", "2.30.7", H100, "NVIDIA/jaxpp/issues/11"),
        ("nvidia-nccl-cu12", "2.30.7", H100, "NVIDIA/jaxpp/issues/11"),
        ("nvidia-nccl-cu13", "2.31.2", H100, None),
        ("nvidia-nccl-cu13", "2.28.9", H100, None),
        ("nvidia-nccl-cu13", "2.30.7", CPU, None),
        ("nvidia-cudnn-cu13", "9.13.0.50", H100, "jax-ml/jax/issues/32430"),
        ("nvidia-cudnn-cu13", "9.14.0.64", H100, None),
        ("nvidia-cudnn-cu12", "9.13.0.50", H100, None),
        ("nvidia-cudnn-cu12", "9.10.2.21", B300, "jax-ml/jax/pull/30242"),
        ("nvidia-cudnn-cu13", "9.24.0.43", RUBIN, "pytorch/pytorch/pull/192843"),
        ("nvidia-cudnn-cu13", "9.25.0.15", RUBIN, None),
    ],
)
def test_a_version_that_is_known_to_be_bad_is_named_with_its_thread(package, version, device, thread):
    lines = list(known_problems({package: version, "flax": "0.12"}, *device))
    assert len(lines) == (thread is not None)
    if thread is not None:
        assert lines[0].startswith(f"WARNING {package} {version}, {device[0]}: ")
        assert lines[0].endswith(f"(https://github.com/{thread})")


def test_each_row_names_a_thread_and_packages_that_the_preflight_looks_up():
    for known in TABLE:
        assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", known.thread)
        assert set(known.packages) <= {"jax", *known_versions.NATIVE}
        assert known.first < known.fixed


def test_a_run_warns(monkeypatch):
    monkeypatch.setattr(known_versions, "versions_here", lambda: {"nvidia-nccl-cu13": "2.30.7"})
    assert known_versions.version_warnings() == []
    monkeypatch.setattr(known_versions, "architecture_of", lambda device: "cuda 9.0")
    (line,) = known_versions.version_warnings()
    assert line.startswith("WARNING nvidia-nccl-cu13 2.30.7, cpu: transfers between processes can hang")
