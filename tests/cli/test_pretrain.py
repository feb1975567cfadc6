"""What `bertkit pretrain` shows of a finished run."""

from __future__ import annotations

import pytest

from bertkit.cli.pretrain import print_held_out


def test_scores_of_translations_are_percentages_as_in_eval_translation(capsys: pytest.CaptureFixture[str]) -> None:
    print_held_out({"held_out": {"loss": 1.836, "bleu": 0.02841, "exact": 0.0, "accuracy/seq2seq_lm": 0.3703}})
    shown = dict(line.split() for line in capsys.readouterr().err.splitlines()[1:])
    assert shown == {"loss": "1.836", "bleu": "2.8%", "exact": "0.0%", "accuracy/seq2seq_lm": "37.0%"}


def test_baselines_are_percentages_next_to_the_accuracies(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"accuracy/replaced_token": 0.8452, "baseline/replaced_token": 0.84, "recall/replaced_token": 0.0}
    print_held_out({"held_out": figures})
    shown = dict(line.split() for line in capsys.readouterr().err.splitlines()[1:])
    assert shown == {
        "accuracy/replaced_token": "84.5%",
        "baseline/replaced_token": "84.0%",
        "recall/replaced_token": "0.0%",
    }
