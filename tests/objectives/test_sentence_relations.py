"""Sentence objectives: the loss is a plain cross-entropy on the pooled [CLS] state, and unsuitable data are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.layouts import DocSentences, SegmentPair, SentencePair
from bertkit.data.layouts.base import Layout
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.objectives.forward import heads_of, pretraining_model
from bertkit.objectives.registry import OBJECTIVES
from bertkit.objectives.sentence_relations import NextSentence, PairRelation, SentenceOrder, SentenceStructure
from tests.objectives.test_masked_lm import VOCABULARY_SIZE, made_samples

SIZES = {"hidden_size": 22, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 30}
LENGTHS = [40, 13, 27, 9, 31]


@pytest.mark.parametrize(
    ("objective", "config", "classes"),
    [
        (NextSentence(), BertConfig(**SIZES), 2),
        (SentenceOrder(), BertConfig(**SIZES), 2),
        (SentenceOrder(), AlbertConfig(**SIZES, embedding_size=14), 2),
        (SentenceStructure(), BertConfig(**SIZES), 3),
    ],
)
def test_the_loss_is_cross_entropy_over_the_classes_of_each_pair(
    objective: PairRelation, config: EncoderConfig, classes: int
) -> None:
    """Against the plain formula on the pooled state of each sequence alone."""
    assert OBJECTIVES[objective.term] is type(objective)
    assert heads_of([objective]) == [objective.term]
    model = pretraining_model(config, [objective], VOCABULARY_SIZE)
    model.initialise(0)
    model.eval()
    label_B = np.random.default_rng(0).integers(0, classes, len(LENGTHS))
    batch = PackedBatch.from_samples(made_samples(LENGTHS).with_changes(labels={objective.term: label_B}))
    hidden_TD = model(batch)
    part = objective.loss(model, hidden_TD, batch)
    pooled_BD = torch.tanh(model.pooler.dense(hidden_TD[batch.first_token_B]))
    log_probability_BK = getattr(model, objective.term)(pooled_BD).log_softmax(dim=-1)
    assert log_probability_BK.shape == (len(LENGTHS), classes)
    expected = -sum(log_probability_BK[sequence, label] for sequence, label in enumerate(label_B.tolist()))
    torch.testing.assert_close(part.sum, expected)
    assert part.count == objective.count(batch) == len(LENGTHS) == len(LENGTHS) * objective.expected_count(40)
    assert int(part.correct) == int((log_probability_BK.argmax(-1) == torch.from_numpy(label_B)).sum())


THIRDS = {"random_partner_probability": 1 / 3, "swap_probability": 0.5}


@pytest.mark.parametrize(
    ("objective", "layout", "model"),
    [
        (NextSentence(), SegmentPair(), BertConfig()),
        (NextSentence(), SentencePair(), RobertaConfig(type_vocab_size=2)),
        (SentenceOrder(), SegmentPair(random_partner_probability=0.0, swap_probability=0.5), AlbertConfig()),
        (SentenceStructure(), SegmentPair(**THIRDS), BertConfig()),
        (SentenceStructure(), SentencePair(**THIRDS), BertConfig()),
    ],
)
def test_data_and_model_of_the_papers_are_without_fault(
    objective: PairRelation, layout: Layout, model: EncoderConfig
) -> None:
    assert objective.errors(DataConfig(layout=layout), model) == []


@pytest.mark.parametrize(
    ("objective", "layout", "model", "words"),
    [
        (
            NextSentence(),
            SegmentPair(),
            RobertaConfig(),
            ["next_sentence", "segment embeddings", "'roberta'", "model.type_vocab_size to 2"],
        ),
        (
            SentenceOrder(),
            SegmentPair(**THIRDS),
            DistilBertConfig(),
            ["sentence_order", "segment embeddings", "'distilbert'", "family that has them, such as bert"],
        ),
        (NextSentence(), DocSentences(), BertConfig(), ["next_sentence", "'doc-sentences'", "segment-pair"]),
        (
            NextSentence(),
            SegmentPair(random_partner_probability=0.0),
            BertConfig(),
            ["next_sentence", "random", "data.layout", "random_partner_probability: 0.5"],
        ),
        (SentenceOrder(), SegmentPair(), AlbertConfig(), ["sentence_order", "previous", "swap_probability: 0.5"]),
        (
            SentenceStructure(),
            SegmentPair(random_partner_probability=1.0),
            BertConfig(),
            ["sentence_structure", "next and previous", "random_partner_probability: 0.3333"],
        ),
    ],
)
def test_what_cannot_serve_is_named_with_its_remedy(
    objective: PairRelation, layout: Layout, model: EncoderConfig, words: list[str]
) -> None:
    (fault,) = objective.errors(DataConfig(layout=layout), model)
    assert all(word in fault for word in words), fault


def test_the_separator_alone_may_tell_segments_apart_where_the_recipe_says_so() -> None:
    objective = SentenceOrder(told_apart_by="separator")
    assert objective.errors(DataConfig(layout=SegmentPair(**THIRDS)), DistilBertConfig()) == []
