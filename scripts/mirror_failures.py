"""Kills runs with a mirror at random instants, over a faulty network, and resumes them elsewhere.

    pip install 'jaxtp[s3]' 'moto[server]'
    python scripts/mirror_failures.py [--kills 20]

Each round trains in a new empty folder, as on a new host, with `run.mirror` at moto's S3 on
loopback behind a proxy that answers 500 to one request of three, cuts bodies, or stops for ten
seconds; it is killed with SIGKILL. The last round runs to the end. Its metrics must equal those of
a run without a mirror, kills and faults, bit for bit.
"""

import argparse
import contextlib
import http.client
import http.server
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from torture import SMALL, read

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}
SIGNATURE = (
    "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=s"
)
HOP = {"transfer-encoding", "content-length", "connection", "date", "server", "host", "expect"}
QUICK = """
import sys
from jaxtp.checkpoint import mirror
mirror.SILENT_SECONDS = 4.0
mirror.BEAT_SECONDS = 0.5
from jaxtp.train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def s3_server():
    """Starts moto's server with a bucket `run`; yields its port."""
    program = shutil.which(
        "moto_server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    port = free_port()
    server = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    request = urllib.request.Request(f"http://127.0.0.1:{port}/run", method="PUT")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        until = time.monotonic() + 60
        while True:
            try:
                direct.open(request)
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


class FaultyProxy(http.server.ThreadingHTTPServer):
    """Forwards requests to a server on loopback.

    `fault(method, path, number)` returns None, a status with which the request ends, "cut" for half
    of the body, "hang", or "ignore" for a store without conditional writes.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream):
        self.upstream = upstream
        self.fault = lambda method, path, number: None
        self.numbers = itertools.count()
        super().__init__(("127.0.0.1", 0), Forward)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that was killed is no error."""


class Forward(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path, next(self.server.numbers))
        if fault == "hang":
            time.sleep(3600)
        if isinstance(fault, int):
            self.answer(fault, {}, b"<Error><Code>Injected</Code></Error>")
            return
        headers = {k.lower(): v for k, v in self.headers.items() if k.lower() not in HOP}
        if fault == "ignore":
            headers.pop("if-none-match", None)
        # Google's XML interface is that of S3, with another precondition and another signature.
        if headers.pop("x-goog-if-generation-match", None) is not None:
            headers["if-none-match"] = "*"
        if not headers.get("authorization", "").startswith("AWS4"):
            headers["authorization"] = SIGNATURE
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        # The signature covers the host's name.
        host = {"Host": self.headers["Host"]}
        upstream.request(self.command, self.path, body, headers | host)
        response = upstream.getresponse()
        content = response.read()
        found = {k: v for k, v in response.getheaders() if k.lower() not in HOP}
        if self.command == "HEAD":
            found["Content-Length"] = response.getheader("Content-Length") or "0"
        self.answer(response.status, found, content, is_cut=fault == "cut")
        upstream.close()

    def answer(self, status, headers, content, is_cut=False):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if is_cut:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815


def no_fault(method, path, number):
    return None


def one_in_three_is_500(method, path, number):
    return 500 if number % 3 == 0 else None


def bodies_are_cut(method, path, number):
    return "cut" if method == "GET" and number % 5 == 0 else None


def stops_for_ten_seconds():
    """Answers 503 in ten seconds of every thirty."""
    return lambda method, path, number: 503 if time.monotonic() % 30 < 10 else None


FAULTS = {
    "none": no_fault,
    "500 for one in three": one_in_three_is_500,
    "cut bodies": bodies_are_cut,
    "stopped for ten seconds": stops_for_ten_seconds(),
}


def start(folder, text, steps, environment, *flags):
    settings = SMALL | {"run.dir": folder, "data.path": text, "train.steps": steps}
    settings |= {"mesh": "fsdp=2,tp=2", "model.num-layers": 1, "eval.every": 1000}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    return subprocess.Popen(
        [sys.executable, "-c", QUICK, *words, *flags],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def has_saved(run):
    """Returns whether a run has a checkpoint besides the one that it fetched."""
    return sum(path.name.isdecimal() for path in (run / "checkpoints").glob("*")) > 1


def lines_of(output, *words):
    return [line.strip() for line in output.splitlines() if any(word in line for word in words)]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name, s3_server() as port:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text("".join(f"line {i}: {i * i} lazy dogs\n" for i in range(3000)))
        proxy = FaultyProxy(port)
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
        environment = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": proxy.url,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "PYTHONUNBUFFERED": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        whole = folder / "whole"
        output, _ = start(whole, text, arguments.steps, environment).communicate()
        print(f"undisturbed: steps {min(read(whole))} to {max(read(whole))}", flush=True)
        mirror = ("--run.mirror", "s3://run/mirror")
        for kill in range(arguments.kills + 1):
            fault = list(FAULTS)[kill % len(FAULTS)]
            proxy.fault = FAULTS[fault]
            run = folder / f"host{kill}"
            process = start(run, text, arguments.steps, environment, *mirror)
            is_last = kill == arguments.kills
            while not is_last and process.poll() is None and not has_saved(run):
                time.sleep(0.02)
            if not is_last:
                time.sleep(chance.uniform(0, 3))
                process.kill()
            output, _ = process.communicate()
            assert process.returncode in (0, -signal.SIGKILL), output
            resumed = lines_of(output, "resumed from", "making the initial")
            print(
                f"host {kill}, {fault}: {resumed[0] if resumed else 'killed before it began'}; "
                f"{'ended' if is_last else 'killed'} after step {max(read(run), default=0)}, "
                f"{len(lines_of(output, 'uploaded step'))} uploads",
                flush=True,
            )
            for line in lines_of(output, "tried", "succeed again", "damaged", "was alive"):
                print(f"    {line[:160]}", flush=True)
            if not is_last:
                shutil.rmtree(run)
        expected = read(whole)
        found = read(run)
        names = ("loss", "grad_norm", "param_norm", "tokens")
        differing = [
            step
            for step in expected
            if any(expected[step][name] != found.get(step, {}).get(name) for name in names)
        ]
        print(f"{len(expected)} steps compared, {len(differing)} differ: {differing[:5]}")
        proxy.fault = no_fault
        print(opened_by_orbax(folder / "plain", port), flush=True)
        assert not differing
        assert found.keys() == expected.keys()


def opened_by_orbax(folder, port):
    """Downloads the URL's checkpoints by boto3, and opens them with plain Orbax."""
    import boto3

    names = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **names)
    prefix = "mirror/checkpoints/"
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="run", Prefix=prefix)
    for item in itertools.chain.from_iterable(page["Contents"] for page in pages):
        path = folder / item["Key"].removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file("run", item["Key"], str(path))
    with ocp.CheckpointManager(folder) as manager:
        steps = manager.all_steps()
    state = (folder / str(max(steps)) / "state").resolve()
    reader = ocp.PyTreeCheckpointer()
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
        reader.metadata(state).item_metadata.tree,
    )
    arrays = reader.restore(state, restore_args=as_numpy)
    return f"plain Orbax lists steps {steps} of a download, and reads {len(arrays)} arrays"


if __name__ == "__main__":
    main()
