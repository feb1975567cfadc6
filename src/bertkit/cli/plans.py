"""Prints what `--plan` found: one line per field, a table of an evaluation's tasks, or the document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertkit.cli.console import console, duration, result

MANY_PASSES = 200
"""With more passes over a text than this, a plan names the option for fewer; BERT made about 40."""


def print_plan(plan: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what would run: the document, or one line per field."""
    if as_json:
        result(plan, as_json=True)
        return
    total, backbone = plan["parameters"]["total"], plan["parameters"]["backbone"]
    # An embedder has neither heads nor the family's pooler, which the backbone as published includes.
    without = f" ({backbone:,} without heads)" if backbone < total else ""
    at_most = "at most " if plan.get("vocabulary", {}).get("at_most") else ""
    terms = sorted(plan["memory_terms_mb"].items(), key=lambda term: -term[1])
    parts = ", ".join(f"{name.replace('_', ' ')} {megabytes:,.0f}" for name, megabytes in terms if megabytes >= 0.5)
    rows = {
        "recipe": f"{plan['recipe']} ({plan['what_hash'][:8]})",
        **({"runs": f"{runs:,}, whose steps are added up"} if (runs := plan.get("runs", 1)) > 1 else {}),
        "parameters": f"{at_most}{total:,}{without}",
        "steps": f"{'about ' * plan.get('steps_estimated', False)}{plan['steps']:,}",
        "tokens": f"{plan['tokens']:,}{_passes(plan)}",
        **({"sequences": f"{mean:.0f} tokens on average"} if (mean := plan.get("mean_sequence_tokens")) else {}),
        **_example_row(plan),
        "FLOPs": flops_in_words(plan),
        **_teacher_row(plan),
        "memory": f"{plan['memory_mb']:,.0f} MB ({parts})",
        "disk": f"{plan['disk_mb']:,.0f} MB",
        "time here": duration(plan["seconds"]),
        **_data_rows(plan),
    }
    print_rows(rows)


def print_evaluation_plan(plan: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what an evaluation would fine-tune: the document, or a table of the tasks and one line per total."""
    if as_json:
        result(plan, as_json=True)
        return
    columns = ("task", "examples", "runs", "steps", "tokens", "FLOPs", "memory MB", "time here")
    rows = [
        (
            task,
            f"{own['examples']['train']:,}",
            own["runs"],
            *(f"{own[key]:,}" for key in ("steps", "tokens")),
            flops_in_words(own),
            f"{own['memory_mb']:,.0f}",
            duration(own["seconds"]),
        )
        for task, own in plan["tasks"].items()
    ]
    if rows:
        console.table(columns, rows)
    for task in plan["evaluated_as_is"]:
        console.info(f"{task}: is evaluated with the model's own head, without fine-tuning")
    print_rows(
        {
            "suite": plan["suite"],
            "model": plan["model"],
            "runs": f"{plan['runs']:,}",
            "steps": f"{plan['steps']:,}",
            "tokens": f"{plan['tokens']:,}",
            "FLOPs": flops_in_words(plan),
            "memory": f"{plan['memory_mb']:,.0f} MB",
            "disk": f"{plan['disk_mb']:,.0f} MB",
            "time here": f"{duration(plan['seconds'])}, plus the time for predicting",
        }
    )


def print_rows(rows: Mapping[str, str]) -> None:
    """Print names and values in two columns."""
    width = max(12, *(len(name) + 2 for name in rows))
    for name, value in rows.items():
        result(f"{name:<{width}}{value}")


def flops_in_words(plan: Mapping[str, Any]) -> str:
    """The model's floating-point operations, plus the optimiser's own matrix products, if it has any."""
    added = f", plus {own:.3g} for the optimiser" if (own := plan["optimizer_flops"]) else ""
    return f"{plan['flops']:.3g}{added}"


def _passes(plan: Mapping[str, Any]) -> str:
    """How often the text is read, if its size is known."""
    passes = plan.get("text_passes")
    if passes is None:
        return ""
    number = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
    fewer = "; --max-steps N reduces them" if passes > MANY_PASSES else ""
    return f" (about {number} {'pass' if number == '1' else 'passes'} over the text{fewer})"


def _example_row(plan: Mapping[str, Any]) -> dict[str, str]:
    """How many examples each split of a task has."""
    if "examples" not in plan:
        return {}
    return {"examples": ", ".join(f"{split} {count:,}" for split, count in plan["examples"].items())}


def _teacher_row(plan: Mapping[str, Any]) -> dict[str, str]:
    """The size of a student's teacher, and its part of the FLOPs."""
    if "teacher" not in plan:
        return {}
    found = plan["teacher"]
    return {"teacher": f"{found['parameters']:,} parameters, {found['flops']:.3g} of the FLOPs"}


def _data_rows(plan: Mapping[str, Any]) -> dict[str, str]:
    """The labels of each split, and the examples left out of it."""
    if "labels" not in plan:
        return {}
    from bertkit.finetuning.label_counts import in_words

    rows = {f"{split} labels": in_words(counts) for split, counts in plan["labels"].items()}
    for split, reasons in plan["skipped"].items():
        rows[f"{split} skips"] = ", ".join(f"{count:,} rows: {reason}" for reason, count in reasons.items())
    return rows
