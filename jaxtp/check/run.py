"""Every case of a configuration against one device."""

import math
from collections.abc import Iterator
from dataclasses import asdict

from jaxtp.check import parity
from jaxtp.check.config import CheckConfig
from jaxtp.check.locate import describe_error, first_difference
from jaxtp.check.report import Verdict
from jaxtp.check.shrink import MAX_DEVICES, ONE_DEVICE, Case, cases_of, default_cases, methods_of, shrink, unfit
from jaxtp.config import ConfigError, changed
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import check_sizes, describe_mesh, parse_mesh
from jaxtp.train.config import TrainConfig, check


def plan(config: CheckConfig) -> tuple[TrainConfig, list[Case]]:
    """Returns what will be run: the shrunk configuration, and the cases.

    Raises:
      ConfigError: the configuration does not hold on its own mesh, or a chosen mesh cannot hold it.
    """
    given = config.mesh.sizes
    check_sizes(given)
    own = {axis: 1 if config.meshes or size == -1 else size for axis, size in given.items()}  # -1 may be one
    check(config, own, lambda: None)
    wide = {axis: 2 if size == -1 else size for axis, size in given.items()}
    cases = _chosen_cases(config) if config.meshes else default_cases(config, wide)
    if not cases:
        raise ConfigError("no mesh of several devices can hold this model; choose one with --mesh")
    return shrink(config, cases), cases


def dtypes(small: TrainConfig) -> list[str]:
    """Returns the dtypes of a check: float32, and the configuration's own, by the narrowest, if that is another."""
    own = set(asdict(small.model.precision).values())
    return ["float32", *sorted(own - {"float32"})]


def verdicts(small: TrainConfig, cases: list[Case]) -> Iterator[Verdict]:
    """Runs each case in float32, and in the configuration's own dtypes if they are others.

    A generator, so that each result can be shown as it comes.
    """
    exact = None
    for dtype in dtypes(small):
        config = _with_dtype(small, dtype)
        initial = parity.initial_arrays(config)
        expected = _run(config, ONE_DEVICE, initial, dtype, exact)
        if isinstance(expected, Verdict):
            yield expected
            continue
        exact = exact or expected  # of float32, which is the first
        for case in cases:
            actual = _run(config, case, initial, dtype, exact)
            if isinstance(actual, Verdict):
                yield actual
            else:
                yield _compare(config, case, initial, dtype, parity.compare(actual, expected, exact), actual.problems)


def _run(
    config: TrainConfig, case: Case, initial: parity.Arrays, dtype: str, exact: parity.Numbers | None
) -> parity.Numbers | Verdict:
    """Returns the numbers of a case, or why there are none; `exact` are those of one device in float32, if known."""
    try:
        return parity.run(config, case, initial, audited=case != ONE_DEVICE, replayed=exact)
    except Exception as error:  # a broken layer fails in whatever way it is broken; the verdict says how
        tolerance = parity.TOLERANCES[dtype]
        where = first_difference(config, case, initial, tolerance.tensor)
        return Verdict(case, dtype, tolerance, None, (where or describe_error(error),), where)


def _compare(
    config: TrainConfig,
    case: Case,
    initial: parity.Arrays,
    dtype: str,
    errors: parity.Errors,
    problems: tuple[str, ...],
) -> Verdict:
    tolerance = parity.TOLERANCES[dtype]
    where = None
    if not errors.within(tolerance):
        where = first_difference(config, case, initial, tolerance.tensor) or _own(errors, tolerance)
    return Verdict(case, dtype, tolerance, errors, problems, where)


def _own(errors: parity.Errors, tolerance: parity.Tolerance) -> str:
    """Returns what is left when every module's output and its gradient agree."""
    if not errors.margin <= tolerance.tensor:
        return f"a router: {errors.flips:,} of {errors.choices:,} choices are others, by up to {errors.margin:.1e}"
    gradient, update = (errors.worst(each, tolerance) for each in (errors.gradients, errors.updates))
    if not errors.gradients[gradient] <= errors.allowed(gradient, tolerance):
        return f"{gradient}: its own gradient, where outputs and their gradients agree"
    return f"{update}: its update, where all gradients agree"


def _chosen_cases(config: CheckConfig) -> list[Case]:
    cases: list[Case] = []
    for text, sizes in {text: parse_mesh(text) for text in config.meshes}.items():
        if (count := math.prod(sizes.values())) == 1:
            raise ConfigError(f"--mesh {text}: that is the one device which meshes are compared with")
        if count > MAX_DEVICES:
            raise ConfigError(
                f"--mesh {text}: {describe_mesh(sizes)} is {count} devices, and a check runs on at most {MAX_DEVICES} "
                "virtual ones; a larger dp or fsdp than 2 changes nothing in kind"
            )
        first = Case(sizes, config.model.sequence_parallel or False, methods_of(config, sizes)[0])
        if problems := list(unfit(config, first, fixed=config.run.init_from is not None)):
            raise ConfigError(f"--mesh {text}:\n" + "\n".join(f"  {problem}" for problem in problems))
        cases += [case for case in cases_of(config, sizes) if case not in cases]
    return cases


def _with_dtype(config: TrainConfig, dtype: str) -> TrainConfig:
    """Returns the run with all of it in float32; with another compute dtype, as configured."""
    return changed(config, {"model.precision": Precision()}) if dtype == "float32" else config
