"""Measures checkpoints with a mirror beside those of a folder, and of plain Orbax at one server.

    pip install 'jaxtp[s3]' 'moto[server]' s3fs
    python scripts/mirror_speed.py | tee scripts/results/mirror_speed.txt

The server is moto's S3 on loopback, a program in Python that takes the same cores. Each turn saves
and restores the same arrays:

1. in a folder: a save, and one while another process uploads the first checkpoint to the server;
2. with a mirror: a save while nothing is uploaded, one during the upload of the first, the uploads,
   and a restart in an empty folder, which downloads and restores;
3. by plain Orbax at s3://, which it refuses without the lines of `patch_orbax`;
4. by plain Orbax in a folder that boto3 downloads from the mirror.

Numbers are medians of the turns; a ratio is the median of the ratios in each turn. 1 and 2 change
places in each.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from checkpoint_speed import MESH, forget, plan, seconds
from flax import nnx
from jax.sharding import NamedSharding
from mirror_failures import CREDENTIALS, download, s3_server
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxtp.checkpoint import silence_orbax
from jaxtp.checkpoint.logical import abstract_logical, to_logical
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.checkpoint.mirror import Mirror
from jaxtp.checkpoint.storage import kept_steps
from jaxtp.train.state import Blueprint

UPLOAD = """
import hashlib, sys
from pathlib import Path
from jaxtp.checkpoint.mirror import _in_threads
from jaxtp.checkpoint.object_store import ObjectStore
store = ObjectStore(f"s3://run/{sys.argv[2]}/other")
paths = {str(path): path for path in Path(sys.argv[1]).rglob("*") if path.is_file()}
while True:
    for path in paths.values():
        hashlib.sha256(path.read_bytes())
    print("uploads", flush=True)
    _in_threads(lambda key: store.put(key.lstrip("/"), paths[key]), paths)
"""
"""A process that uploads as a mirror does, again and again."""


def patch_orbax() -> None:
    """Makes Orbax 0.12.8 write to s3://, whose paths it takes for relative ones."""

    def spec(path: str) -> dict[str, object]:
        bucket, _, key = path.removeprefix("s3://").partition("/")
        return {
            "driver": "s3",
            "bucket": bucket,
            "path": key,
            "endpoint": os.environ["AWS_ENDPOINT_URL"],
            "aws_region": os.environ["AWS_REGION"],
            "aws_credentials": {"type": "environment"},
        }

    is_s3 = re.compile("s3:/").match
    of_folders = gcs_utils.get_kvstore_for_gcs
    normalized = tensorstore_utils._normalize_path
    gcs_utils.get_kvstore_for_gcs = lambda path: (spec if is_s3(path) else of_folders)(path)
    gcs_utils.is_gcs_path = lambda path: bool(is_s3(path.as_posix()))
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False
    tensorstore_utils._use_gcs_driver = lambda path: bool(is_s3(path))
    tensorstore_utils._normalize_path = lambda path: re.sub("^s3:/+", "s3://", normalized(path))


print_aside = partial(print, file=sys.stderr)


def random_state(blueprint: Blueprint) -> nnx.State:
    """Returns a state that compression cannot shorten."""
    chance = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = chance.standard_normal(leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, NamedSharding(blueprint.mesh, leaf.sharding.spec))

    return jax.tree.map(fill, blueprint.abstract)


class Turns:
    """Saves and restores a state in turns, each at a place of its own."""

    def __init__(self, megabytes: int, port: int):
        self.blueprint = plan(megabytes)
        self.state = random_state(self.blueprint)
        self.arrays = to_logical(self.state, self.blueprint.mesh)
        self.target = abstract_logical(self.blueprint.abstract, self.blueprint.mesh)
        self.port = port
        self.times: dict[str, list[float]] = {}

    def note(self, name: str, action: Callable[[], object]) -> None:
        """Appends the duration of an action."""
        self.times.setdefault(name, []).append(seconds(action))

    def save(self, checkpoints: Checkpoints, step: int, name: str) -> None:
        """Measures how long a save blocks, and its rest."""
        mesh = self.blueprint.mesh
        self.note(f"{name}, blocking", lambda: checkpoints.save(step, self.state, mesh, {}))
        self.note(f"{name}, the rest", checkpoints.wait)

    def restore(self, folder: Path) -> None:
        """Restores the newest checkpoint of a folder."""
        blueprint = self.blueprint
        with Checkpoints(folder) as checkpoints:
            step = max(checkpoints.steps())
            jax.block_until_ready(checkpoints.restore(step, blueprint.abstract, blueprint.mesh))

    def restore_by_orbax(self, orbax: ocp.CheckpointManager) -> None:
        """Restores the newest checkpoint of a manager."""
        each = ocp.checkpoint_utils.construct_restore_args(self.target)
        state = ocp.args.PyTreeRestore(self.target, restore_args=each)
        restored = orbax.restore(orbax.latest_step(), args=ocp.args.Composite(state=state))
        jax.block_until_ready(restored["state"])

    def in_a_folder(self, folder: Path) -> None:
        """Saves twice, and restores."""
        with Checkpoints(folder / "local") as checkpoints:
            self.save(checkpoints, 1, "folder: save")
            command = [sys.executable, "-c", UPLOAD, str(folder / "local/1"), folder.name]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as upload:
                upload.stdout.readline()
                self.save(checkpoints, 2, "folder: save in another's upload")
                upload.kill()
        forget(folder)
        self.note("folder: restore", lambda: self.restore(folder / "local"))

    def with_a_mirror(self, folder: Path) -> None:
        """Saves twice, and restores in an empty folder."""
        kept = partial(kept_steps, keep=2, keep_every=0, keep_best=False)
        url = f"s3://run/{folder.name}/mirror"
        for run in ("here", "elsewhere"):
            (folder / run).mkdir()
        mirror = Mirror(url, folder / "here/checkpoints", print_aside, kept)
        with mirror, Checkpoints(mirror.folder) as checkpoints:
            mirror.begin(-1)
            self.save(checkpoints, 1, "mirror: save")
            while mirror._staged < 1:
                time.sleep(0.01)
            self.save(checkpoints, 2, "mirror: save in an upload")
            self.note("mirror: rest of two uploads", mirror._finish)
        forget(folder)
        mirror = Mirror(url, folder / "elsewhere/checkpoints", print_aside, kept)
        began = time.perf_counter()
        with mirror:
            self.note("mirror: restore, of which verified", lambda: self.restore(mirror.folder))
            self.times.setdefault("mirror: restore", []).append(time.perf_counter() - began)
            mirror.begin(2)

    def by_orbax(self, folder: Path) -> None:
        """Saves and restores at s3://, and restores what boto3 downloads from the mirror."""
        with ocp.CheckpointManager(
            f"s3://run/{folder.name}/orbax",
            options=ocp.CheckpointManagerOptions(
                create=True, temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath
            ),
        ) as orbax:
            save = ocp.args.Composite(state=ocp.args.PyTreeSave(self.arrays))
            self.note("Orbax at s3://: save, blocking", lambda: orbax.save(1, args=save))
            self.note("Orbax at s3://: save, the rest", orbax.wait_until_finished)
            self.note("Orbax at s3://: restore", lambda: self.restore_by_orbax(orbax))

        def fetch() -> None:
            prefix = f"{folder.name}/mirror/checkpoints/2/"
            download(self.port, prefix, folder / "fetched/2")
            with ocp.CheckpointManager(folder / "fetched") as orbax:
                self.restore_by_orbax(orbax)

        self.note("Orbax after boto3: restore", fetch)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=200, help="approximate size of the state (default 200)"
    )
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args(argv)
    silence_orbax()
    patch_orbax()
    MESH.clear()
    with tempfile.TemporaryDirectory() as name, s3_server() as port:
        os.environ |= CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        turns = Turns(arguments.megabytes, port)
        for turn in range(arguments.repeats + 1):
            if turn == 1:
                # The first turn compiles.
                turns.times = {}
            folder = Path(name, f"turn{turn}")
            folder.mkdir()
            # What comes first in a turn takes longer.
            both = (turns.in_a_folder, turns.with_a_mirror)
            for save_and_restore in both if turn % 2 else reversed(both):
                save_and_restore(folder)
            turns.by_orbax(folder)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(turns.state))
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"state of {size:,} bytes in {len(jax.tree.leaves(turns.state))} arrays")
    for action, durations in turns.times.items():
        median = statistics.median(durations)
        print(
            f"{action:<46}{median:>8.3f} s{size / 1e6 / median:>8,.0f} MB/s   "
            f"{min(durations):.3f} at least"
        )
    for one, other in (
        ("mirror: save, blocking", "folder: save, blocking"),
        (
            "mirror: save in an upload, blocking",
            "folder: save in another's upload, blocking",
        ),
        ("mirror: restore", "Orbax at s3://: restore"),
        ("mirror: restore", "Orbax after boto3: restore"),
    ):
        ratios = [a / b for a, b in zip(turns.times[one], turns.times[other], strict=True)]
        print(f"{one} / {other}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
