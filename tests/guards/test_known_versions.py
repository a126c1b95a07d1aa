"""Versions that are known to be bad, on fakes of devices and of what is installed."""

import re
from types import SimpleNamespace

import pytest
from tables import read_table

from jaxtp.guards import known_versions
from jaxtp.guards.known_versions import TABLE, known_problems

DEVICES = read_table(__file__, "devices")
VERSIONS = read_table(__file__, "known_versions")


@pytest.mark.parametrize(("package", "version", "device", "thread"), VERSIONS)
def test_a_version_that_is_known_to_be_bad_is_named_with_its_thread(
    package, version, device, thread
):
    lines = list(known_problems({package: version, "flax": "0.12"}, *DEVICES[device]))
    assert len(lines) == (thread is not None)
    if thread is not None:
        assert lines[0].startswith(f"WARNING {package} {version}, {DEVICES[device][0]}: ")
        assert lines[0].endswith(f"(https://github.com/{thread})")


def test_each_row_names_a_thread_and_packages_that_the_preflight_looks_up():
    for known in TABLE:
        assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", known.thread)
        assert set(known.packages) <= {"jax", *known_versions.NATIVE}
        assert known.first < known.fixed


def test_a_bad_version_is_a_warning(monkeypatch):
    device = SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(known_versions, "versions_here", lambda: {"nvidia-nccl-cu13": "2.31.2"})
    (finding,) = known_versions.check_versions(device)
    assert finding.verdict == "ok"
    monkeypatch.setattr(known_versions, "versions_here", lambda: {"nvidia-nccl-cu13": "2.30.7"})
    (finding,) = known_versions.check_versions(device)
    assert finding.verdict == "WARNING"
    assert finding.exit_code == 0
    assert finding.text.startswith(
        "WARNING nvidia-nccl-cu13 2.30.7, NVIDIA H100: transfers between processes can hang"
    )
