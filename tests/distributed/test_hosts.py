"""The order of devices by host, whatever the order of processes from a scheduler."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from jaxtp.distributed.devices import by_host


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


def devices(processes, each):
    return [
        Device(2048 * process + index, process)
        for process in range(processes)
        for index in range(each)
    ]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_devices_of_a_host_are_neighbors_in_the_mesh(num_hosts, of_host, each, chance):
    hosts = [f"n{index}" for index in range(num_hosts)] * of_host
    chance.shuffle(hosts)
    there = devices(len(hosts), each)
    ordered = by_host(chance.sample(there, len(there)), hosts)
    assert sorted(ordered, key=lambda device: device.id) == there
    places = [hosts[device.process_index] for device in ordered]
    groups = [
        places[start : start + of_host * each] for start in range(0, len(places), of_host * each)
    ]
    assert [set(group) for group in groups] == [{host} for host in dict.fromkeys(hosts)]
    own = [(device.process_index, device.id) for device in ordered]
    for start in range(0, len(own), of_host * each):
        assert own[start : start + of_host * each] == sorted(own[start : start + of_host * each])
