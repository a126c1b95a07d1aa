"""The order in which programs are timed, and what is made of their times."""

import itertools

from jaxtp.bench.timing import WARM_UP, medians


def test_programs_take_turns_and_medians_are_of_timed_calls():
    now, calls = [0.0], []

    def program(name, seconds):
        left = itertools.chain([100.0] * WARM_UP, seconds)  # a slow start, which counts nowhere

        def run():
            calls.append(name)
            now[0] += next(left)

        return run

    programs = {"a": program("a", [1, 1, 5, 5, 2, 2]), "b": program("b", [30, 10, 20, 10, 10, 90])}
    assert medians(programs, 3, calls=2, clock=lambda: now[0]) == {"a": 2.0, "b": 20.0}
    assert calls[2 * WARM_UP :] == ["a", "a", "b", "b"] * 3
