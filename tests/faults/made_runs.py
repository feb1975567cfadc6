"""Small finished runs of every kind on generated text, in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.progress import silent_progress

KINDS = ("pretrain", "suite", "distill", "distill-text", "mlm", "study")


def made_run(directory: Path, kind: str) -> Path:
    """The directory of a finished run of this kind."""
    place = directory / kind
    place.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return {
            "pretrain": _pretrained,
            "suite": _suite,
            "distill": _distilled,
            "distill-text": _distilled_on_text,
            "mlm": _evaluated,
            "study": _studied,
        }[kind](place)


def _pretrained(place: Path, *overrides: str) -> Path:
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.run import run_pretraining
    from tests.overrides import parsed
    from tests.training.tiny_run import write_recipe

    recipe, text = write_recipe(place)
    settings = parsed(["optimisation.steps=8", "optimisation.schedule.warmup_steps=2", *overrides])
    request = PretrainArguments(
        str(recipe), sources=[str(text)], run_dir=place / "run", cache=place / "cache", overrides=settings
    )
    return run_pretraining(request, progress=silent_progress).run.path


def _suite(place: Path) -> Path:
    from tests.finetuning.test_finetune import Place

    return Place(place).run("epochs=1", "engine.save_every_steps=2", seeds=[0, 1]).run.path


def _distilled(place: Path) -> Path:
    from tests.distillation.task_place import ALL_TERMS, Place

    home = Place(place)
    return home.run(home.recipe("all", ALL_TERMS), "engine.save_every_steps=4").run.path


def _distilled_on_text(place: Path) -> Path:
    from tests.distillation.tiny_teacher import write_classroom

    return write_classroom(place).run("run").run.path


def _evaluated(place: Path) -> Path:
    from bertkit.evaluation.mlm import evaluate_mlm
    from bertkit.evaluation.run import EvalArguments
    from bertkit.evaluation.settings import MlmSettings
    from tests.evaluation.test_mlm import write_documents
    from tests.probing.tiny_models import save_tiny, tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    save_tiny(tiny_model(tokenizer), tokenizer, place / "model")
    request = EvalArguments(model=str(place / "model"), device="cpu", runs_root=place / "runs", command=["x"])
    return evaluate_mlm(request, [str(write_documents(place))], MlmSettings()).run.path


def _studied(place: Path) -> Path:
    from bertkit.study.run import run_study
    from tests.study.tiny_study import arguments, write_study

    write_study(place)
    return run_study(arguments(place, "run"), progress=silent_progress).run.path
