"""The shown batch of a task has the examples, tokens and labels that the same update reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.errors import UsageError
from bertkit.finetuning.show_batch import show_task_batch
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer_files import load_tokenizer
from tests.distillation.task_place import TRAIN, Place
from tests.tasks.tiny_task import reviews


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("shown"))


def test_what_is_shown_is_what_the_update_reads(place: Place) -> None:
    recipe = place.recipe("logits", " [labels, soft_targets]")
    arguments = place.request(recipe)
    resolved = arguments.requested()
    trainer = arguments.trainer(
        resolved, [arguments.prepare(resolved)], RunDirectory(place.directory / "none", {}), None
    )
    tokenizer, examples = load_tokenizer(place.teacher), reviews(TRAIN, 1)
    for step in (1, 6, 7):
        shown = show_task_batch(arguments, step=step, sequences=100)
        read = sorted(
            [tokenizer.token(token) for token in part.tolist()]
            for batch in trainer._batches(step - 1)
            for part in batch.packed.ids_T.tensor_split(batch.packed.sequences.cu_seqlens_B1[1:-1].long())
        )
        assert sorted([token.token for token in sequence.tokens] for sequence in shown.sequences) == read
        assert shown.in_all == len(read)
        for sequence in shown.sequences:
            assert sequence.label_names["label"] == examples[sequence.sample][1]
            assert sequence.epoch == (step - 1) // 6


def test_a_step_that_the_run_does_not_have_is_refused(place: Place) -> None:
    recipe = place.recipe("logits", " [labels, soft_targets]")
    with pytest.raises(UsageError, match=r"--step 13: logits has steps 1 to 12"):
        show_task_batch(place.request(recipe), step=13, sequences=1)


def test_fewer_sequences_are_the_first_ones(place: Place) -> None:
    recipe = place.recipe("logits", " [labels, soft_targets]")
    few, all_of_them = (show_task_batch(place.request(recipe), step=2, sequences=number) for number in (2, 100))
    assert few.sequences == all_of_them.sequences[:2]
    assert few.in_all == all_of_them.in_all == 7


def test_a_run_is_shown_as_its_recipe_and_text_is_not_taken_for_it(place: Place, tmp_path: Path) -> None:
    recipe = place.recipe("logits", " [labels, soft_targets]")
    run = place.run(recipe, "optimisation.max_steps=1", run_dir=tmp_path / "run").run
    shown = show_task_batch(place.request(str(run.path / "recipe.yaml"), task=None, teachers=()), step=1, sequences=3)
    assert shown.sequences == show_task_batch(place.request(recipe), step=1, sequences=3).sequences
