"""Settings of a model that do not fit are one problem each, which names them and what would fit."""

from tables import assert_errors, read_table
from variants import variant

import jaxtp
from jaxtp.mesh import mesh_shape
from jaxtp.models.config import violations


def problem_of(row):
    model = variant(jaxtp.ModelConfig(), row["model"])
    problems = [*violations(model, mesh_shape(**row.get("mesh", {})))]
    return problems[0] if len(problems) == 1 else f"{len(problems)} problems: {problems}"


def test_settings_that_do_not_fit_are_one_problem_each():
    assert_errors(read_table(__file__), problem_of)
