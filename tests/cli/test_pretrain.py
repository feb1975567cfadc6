"""What `bertkit pretrain` shows of a finished run."""

from __future__ import annotations

import pytest

from bertkit.cli.pretrain import print_held_out


def test_scores_of_translations_are_percentages_as_in_eval_translation(capsys: pytest.CaptureFixture[str]) -> None:
    print_held_out({"held_out": {"loss": 1.836, "bleu": 0.02841, "exact": 0.0, "accuracy/seq2seq_lm": 0.3703}})
    shown = dict(line.split() for line in capsys.readouterr().err.splitlines()[1:])
    assert shown == {"loss": "1.836", "bleu": "2.8%", "exact": "0.0%", "accuracy/seq2seq_lm": "37.0%"}
