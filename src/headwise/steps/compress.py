"""From a plan to a model folder that others can open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.families.load import open_model, open_shape
from headwise.families.save import save_student
from headwise.families.student import Format, build_student, settle_plan
from headwise.records.files import check_free
from headwise.records.plan import Plan


def compress(source: str, plan_file: Path, output: Path, form: Format = "auto", command: str = "") -> dict[str, Any]:
    """Reduce the model at ``source`` as planned, write it to ``output``, and return what the check of it found."""
    check_free(output)
    plan = Plan.load(plan_file)
    plan.check(open_shape(source))  # before any weight is read
    model = open_model(source)
    plan = settle_plan(model, plan, form)
    student = build_student(model, plan, form=form)
    return save_student(student, output, plan=plan, source=source, command=command)
