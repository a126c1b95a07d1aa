"""Reports the CPU seconds of cases, and the commands that repeat failures."""

import os

import pytest

TIERS = ("wide", "journey", "slow", "cluster")
LIGHT_SECONDS = 2.0
"""A case of the default suite that takes more CPU seconds than this is marked `heavy`, or made
cheaper.
"""
STARTED = pytest.StashKey()
seconds_of_cases = {}
"""CPU seconds by the id of a case; in the process that reports, not in its workers."""
too_heavy = []
commands_of_failures = []


def tier_of(names):
    """Returns the tier among the names of a case's markers; empty for the default suite."""
    return next((tier for tier in TIERS if tier in names), "")


def cpu_seconds():
    """Returns the CPU seconds of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("CPU seconds", cpu_seconds() - item.stash[STARTED]))
    return report


def pytest_runtest_logreport(report):
    tier = tier_of(report.keywords)
    if report.failed:
        marker = f" -m {tier}" if tier else ""
        command = f"python -m pytest -n 0{marker} '{report.nodeid}'"
        if command not in commands_of_failures:
            commands_of_failures.append(command)
    for name, seconds in report.user_properties:
        if report.when == "teardown" and name == "CPU seconds":
            seconds_of_cases[report.nodeid] = seconds
            if seconds > LIGHT_SECONDS and not tier and "heavy" not in report.keywords:
                too_heavy.append(report.nodeid)


def pytest_terminal_summary(terminalreporter):
    expensive = sorted(seconds_of_cases, key=seconds_of_cases.get, reverse=True)[:10]
    if len(seconds_of_cases) > len(expensive):
        total = sum(seconds_of_cases.values())
        terminalreporter.section(
            f"{len(seconds_of_cases)} cases took {total:.0f} CPU seconds; the ten most expensive"
        )
        for name in expensive:
            terminalreporter.line(f"{seconds_of_cases[name]:8.1f}  {name}")
        if too_heavy:
            terminalreporter.line(
                f"{len(too_heavy)} cases over {LIGHT_SECONDS} s are not marked `heavy`:"
            )
            for name in sorted(too_heavy, key=seconds_of_cases.get, reverse=True):
                terminalreporter.line(f"{seconds_of_cases[name]:8.1f}  {name}")
    if commands_of_failures:
        terminalreporter.section("commands that repeat the failures")
        for command in commands_of_failures:
            terminalreporter.line(command)
