"""`jaxtp check`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import jax

import jaxtp
from jaxtp.config import entry
from jaxtp.config.affects import Argument, in_short_help
from jaxtp.config.command_line import Command
from jaxtp.config.console import Display
from jaxtp.config.entry import UserError
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.schema import ConfigError, OptionalFile, replace_nested, to_plain
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.tools.check import parity
from jaxtp.tools.check.first_difference import describe_error, first_difference
from jaxtp.tools.check.parity import Errors, Tolerance
from jaxtp.tools.check.shrink import MAX_DEVICES, ONE_DEVICE, Case
from jaxtp.tools.check.subject import Subject, open_subject
from jaxtp.train.config import IGNORED_BY_STEP, TrainConfig
from jaxtp.train.defaults import Decider, DeviceInfo

PROGRAM = "jaxtp check"
DESCRIPTION = """Checks that a mesh gives the numbers of one device, for a training configuration.

The model is shrunk, with the same architecture and parallel structure, and trained for three
updates on one device and on each mesh, on virtual CPU devices. Losses, gradient norms, every
gradient and every updated array are compared, and the compiled step is audited for unintended
replicas, and collectives that no module declares. The exit code is 1 if anything differs; the
output names the first module that differs.

Numbers are compared in float32; with --model.precision.compute bfloat16 also in bfloat16. With
products in float8 (model.precision.matmul) they are also compared with these products, and all else
in float32.

--model.build FILE.py:build, --train.loss, --data.batches and --optimizer.build check a task of your
own, as in jaxtp train. Your model is not shrunk: model.arguments can make it small. Your batches
stay as they are, so a decoder keeps its vocabulary and length. The compiled step is not audited,
because the compiler chooses collectives between your modules.

--config FILE reads the configuration of a training run (see configs/); dotted flags override it.
"""
NO_SUM = (
    "the loss is not a sum over single rows: it depends on the micro-batches, so "
    "train.accumulation must be 1"
)
COARSE = "bfloat16", "float16"
IN_FLOAT32 = {
    f"model.precision.{part}": "float32" for part in ("param", "compute", "reduce", "logits")
} | {"optimizer.first_moment": "param"}
VIRTUAL = DeviceInfo(count=8, per_process=8, bfloat16=True, kind="devices")
"""Devices for the defaults of the model."""
_WIDTH = 56
HEADER = (
    f"{'':4}  "
    f"{'mesh':<{_WIDTH}}{'dtype':<10}{'loss':>9}{'grad norm':>11}{'gradient':>10}{'updated':>9}"
)


@dataclass(frozen=True, kw_only=True)
class CheckConfig(TrainConfig):
    """Command line of a check: a training configuration, and meshes."""

    meshes: Annotated[tuple[str, ...], Argument("tp=8 cp=2,tp=4", name="mesh")] = ()
    """Meshes to compare with one device, by default several; an axis that is left out is 1. The
    default is the configuration's own mesh, scaled down to 16 devices, and meshes that use each
    axis separately and together. With cp, each possible attention method is checked; mesh.context
    selects one. For a model of your own, the default is the configuration's own mesh, tp 2, tp 4,
    fsdp 2, fsdp 2 with tp 2, and dp 2."""

    json: OptionalFile = None
    """JSON file for all numbers."""


COMMAND = Command(
    program=PROGRAM,
    schema=CheckConfig,
    description=DESCRIPTION,
    short_help=("meshes", "json", *in_short_help(TrainConfig)),
    ignored=(*(name for name in IGNORED_BY_STEP if name != "data.batches"), "launch"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 1 if a mesh differs, 2 for a user's mistake."""
    return entry.attempt(PROGRAM, lambda: _check(argv))


def _check(argv: Sequence[str]) -> int:
    config, notes = COMMAND.load(argv, Decider(VIRTUAL))
    coarsest = dtypes(config)[-1]
    flags = ("--model.precision", "--optimizer.first-moment")
    has_flag = any(word.replace("_", "-").startswith(flags) for word in argv)
    if coarsest in COARSE and not has_flag:
        config = replace_nested(config, IN_FLOAT32)
        notes = [note for note in notes if not note.startswith("model.precision")]
        notes.append(
            f"model.precision=float32: --model.precision.compute {coarsest} also compares in "
            f"{coarsest}"
        )
    require_writable("--json", config.json)
    jax.config.update("jax_platforms", "cpu")
    request_virtual_devices(MAX_DEVICES)
    small, subject = open_subject(config, config.meshes)
    cases = small.cases
    print(f"jaxtp   {jaxtp.__version__} with jax {jax.__version__}, virtual CPU devices")
    shown = ("model",) if config.meshes else small.noted
    print("".join(f"default {note}\n" for note in notes if note.startswith(shown)), end="")
    print(*small.lines, sep="\n")
    if not subject.is_audited:
        print("audit   none: the compiler may choose collectives outside of jaxtp's modules")
    in_dtypes = " and ".join(dtypes(small.config))
    print(f"cases   {len(cases)} in {in_dtypes}; three updates; errors relative to one device\n")
    print(HEADER, flush=True)
    results: list[Verdict] = []
    with Display("case {done}/{total}") as display:
        display.begin(0, len(cases) * len(dtypes(small.config)))
        for verdict in verdicts(small.config, cases, subject):
            display.line("\n".join(verdict.lines()))
            results.append(verdict)
            display.move(len(results))
    compared = [verdict for verdict in results if not verdict.left_out]
    left_out = [verdict for verdict in results if verdict.left_out and verdict.case.devices > 1]
    if left_out and (config.meshes or all(verdict.case.devices == 1 for verdict in compared)):
        raise ConfigError(f"cannot run on {left_out[0].case}: {left_out[0].problems[0]}")
    failed = sum(not verdict.passed for verdict in compared)
    record = {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "passed": not failed,
        "config": to_plain(config),
        "shrunk": to_plain(small.config),
        "cases": [verdict.record() for verdict in results],
    }
    write_json("--json", config.json, record)
    if failed:
        print(f"\n{failed} of {len(compared)} differ")
        return 1
    print(f"\nall {len(compared)} equal one device")
    return 0


@dataclass(frozen=True)
class Verdict:
    """A case compared with one device."""

    case: Case
    dtype: str
    tolerance: Tolerance
    errors: Errors | None  # None if the step failed
    problems: tuple[str, ...]  # from the audit, or why the step failed
    first_difference: str | None = None
    left_out: bool = False  # not possible, and no failure

    @property
    def passed(self) -> bool:
        """Whether all errors are allowed, and the audit found no problems."""
        return self.errors is not None and self.errors.within(self.tolerance) and not self.problems

    def lines(self) -> list[str]:
        """Returns the table row and any problems."""
        status = "ok" if self.passed else "FAIL"
        if self.left_out:
            status = "--"
        row = f"{status:4}  {self.case!s:<{_WIDTH}}{self.dtype:<10}"
        details: list[str] = []
        errors = self.errors
        if errors is not None:
            gradient, update = errors.worst(self.tolerance)
            row += (
                f"{errors.loss:>9.1e}{errors.grad_norm:>11.1e}"
                f"{errors.gradients[gradient]:>10.1e}{errors.updates[update]:>9.1e}"
            )
            if errors.flips:
                details.append(
                    f"{errors.flips:,} of {errors.choices:,} expert choices differ, with scores up "
                    f"to {errors.margin:.1e} apart ({self.tolerance.tensor:.1e} allowed)"
                )
            if not errors.within(self.tolerance):
                if self.first_difference:
                    details.append(f"first difference: {self.first_difference}")
                details.append(
                    f"worst gradient {gradient} "
                    f"(up to {errors.allowed(gradient, self.tolerance):.1e} allowed), "
                    f"worst updated array {update} "
                    f"(up to {errors.allowed(update, self.tolerance):.1e} allowed)"
                )
        return [row, *(f"        {detail}" for detail in (*details, *self.problems))]

    def record(self) -> dict[str, object]:
        """Returns the verdict as JSON values, with the errors of all arrays."""
        record = asdict(self)
        case = record.pop("case")
        return {"mesh": case.pop("sizes"), **case, **record, "passed": self.passed}


def dtypes(config: TrainConfig) -> list[str]:
    """Returns the dtypes to check.

    The list is float32, `precision.matmul`, and the coarsest 16-bit dtype of the configuration.
    """
    precision = config.model.precision
    checked = ["float32"]
    if precision.matmul != "compute":
        checked.append(precision.matmul)
    used = {*asdict(precision).values(), config.optimizer.first_moment}
    return checked + [dtype for dtype in COARSE if dtype in used][:1]


def verdicts(
    small: TrainConfig, cases: list[Case], subject: Subject = Subject()
) -> Iterator[Verdict]:
    """Runs each case in each dtype.

    Raises:
      ConfigError: the task cannot be checked, because its numbers on one device are not finite or
        not repeatable.
    """
    exact: parity.Numbers | None = None  # another run on one device, in the first dtype
    for dtype in dtypes(small):
        config = small if dtype in COARSE else replace_nested(small, IN_FLOAT32)
        if dtype != small.model.precision.matmul:
            config = replace_nested(config, {"model.precision.matmul": "compute"})
        tolerance = parity.TOLERANCES[dtype]
        verdict = partial(Verdict, dtype=dtype, tolerance=tolerance)
        locate = partial(first_difference, config, tolerance=tolerance.tensor, subject=subject)
        initial = parity.initial_arrays(config, subject)
        try:
            initial, expected, again = parity.on_one_device(
                config, initial, subject, replayed=exact
            )
        except Exception as error:  # a broken layer may raise any exception
            if subject.is_own and isinstance(error, UserError):
                raise
            yield _failure(verdict, ONE_DEVICE, locate(ONE_DEVICE, initial), error)
            continue
        exact = exact or again
        options = {"audited": subject.is_audited, "replayed": exact, "subject": subject}
        for case in cases:
            is_optional = case.accumulation is not None and small.train.accumulation == 1
            try:
                actual = parity.run(config, case, initial, *expected.states, **options)
            except Exception as error:
                is_mistake = isinstance(error, UserError)
                if is_optional or (is_mistake and subject.is_own):
                    reason = str(error) if is_mistake else describe_error("it", error)
                    yield verdict(case, errors=None, problems=(reason,), left_out=True)
                else:
                    yield _failure(verdict, case, locate(case, initial), error)
                continue
            errors = parity.compare(actual, expected, exact if dtype in COARSE else again)
            if not errors.within(tolerance) and again is expected:
                # Three updates may let rounding errors grow beyond the tolerance.
                states = parity.in_other_digits(initial)
                again = parity.run(config, ONE_DEVICE, *states, replayed=expected, subject=subject)
                errors = parity.compare(actual, expected, again)
            if errors.within(tolerance):
                yield verdict(case, errors=errors, problems=actual.problems)
            elif case.accumulation is not None:
                yield verdict(case, errors=errors, problems=(NO_SUM,), left_out=is_optional)
            else:
                where = locate(case, initial) or _remaining_cause(errors, tolerance)
                yield verdict(case, errors=errors, problems=actual.problems, first_difference=where)


def _failure(
    verdict: Callable[..., Verdict], case: Case, where: str | None, error: Exception
) -> Verdict:
    problem = where or describe_error(str(case), error)
    return verdict(case, errors=None, problems=(problem,), first_difference=where)


def _remaining_cause(errors: Errors, tolerance: Tolerance) -> str:
    if not errors.margin <= tolerance.tensor:
        return (
            f"a router: {errors.flips:,} of {errors.choices:,} expert choices differ, by up to "
            f"{errors.margin:.1e}"
        )
    gradient, update = errors.worst(tolerance)
    if not errors.gradients[gradient] <= errors.allowed(gradient, tolerance):
        return f"{gradient}: its own gradient, while outputs and their gradients agree"
    return f"{update}: its update, while all gradients agree"


if __name__ == "__main__":
    entry.run(PROGRAM, main)
