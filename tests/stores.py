"""Object stores for tests: a folder, and moto's S3 behind a proxy that makes faults.

For gs:// the proxy translates the headers of Google's XML interface.
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
    account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account |= {"gcs_base_url": os.environ["AWS_ENDPOINT_URL"], "disable_oauth": True}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    write_json(tmp_path / "account.json", account)
    return bucket.replace("s3:", f"{request.param}:")
