"""Trains on the hosts of a Ray cluster, with one process on each.

    python scripts/cluster/ray_hosts.py --gpus 8 -- --mesh fsdp=2,tp=8 --run.dir /shared/runs/a

After `--` come the flags of `jaxtp train`. If a process fails, the others end too, and all start
again, at most five times, but not after a mistake (exit code 2) or wrong numbers (3). Tested with
Ray 2.60, on one machine.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOPELESS = (2, 3)
LOST = 75
MAX_STARTS = 6


@ray.remote
class Host:
    """A process of Ray on a host, with the host's GPUs in CUDA_VISIBLE_DEVICES."""

    def free_address(self):
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def train(self, arguments, **variables):
        command = [sys.executable, "-m", "jaxtp", "train", *arguments]
        return subprocess.run(command, env=os.environ | variables, check=False).returncode


def train(arguments, count, resources, strategy):
    """Starts a process on each host once; returns an exit code of the run."""
    group = placement_group([resources] * count, strategy=strategy)
    ray.get(group.ready())
    own = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
    hosts = []
    for index in range(count):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        hosts.append(Host.options(scheduling_strategy=place, **own).remote())
    meeting = {
        "JAX_COORDINATOR_ADDRESS": ray.get(hosts[0].free_address.remote()),
        "JAX_NUM_PROCESSES": str(count),
    }
    endings = []
    for index, host in enumerate(hosts):
        endings.append(host.train.remote(arguments, JAX_PROCESS_ID=str(index), **meeting))
    codes = []
    # After a failure the others end by themselves.
    for ending in endings:
        try:
            codes.append(ray.get(ending))
        except ray.exceptions.RayActorError as error:
            print(f"a host is lost: {error}", file=sys.stderr)
            codes.append(LOST)
    remove_placement_group(group)
    return min(filter(None, codes), default=0)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="of each host")
    parser.add_argument(
        "--strategy",
        default="STRICT_SPREAD",
        help="SPREAD allows several processes on a host (default STRICT_SPREAD)",
    )
    parser.add_argument("flags", nargs="*", help="of jaxtp train")
    arguments = parser.parse_args()
    resources = {"CPU": 1} | ({"GPU": arguments.gpus} if arguments.gpus else {})
    for _ in range(MAX_STARTS):
        code = train(arguments.flags, arguments.hosts, resources, arguments.strategy)
        if code in (0, *HOPELESS):
            break
    return code


if __name__ == "__main__":
    sys.exit(main())
