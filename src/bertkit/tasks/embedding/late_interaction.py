"""A vector for each token as a task: like Embedding, but texts are compared token by token.

Khattab and Zaharia 2020, ColBERT, arXiv:2004.12832, sections 3.3 and 3.4. The first text of an example is a query, the
others are documents. `logits` are the vectors of the scored tokens of all texts, end to end, so those of a batch's
parts are simply joined; the losses read scores (losses/base.py, `of_scores`). The linear map is trained beside the
model and written with it.

Shapes: T packed tokens, I examples, A texts of each, B = I A sequences, M scored tokens, E width of the vectors, C = I
(A - 1) candidates, L tokens of the longest text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn
from torch.nn import functional

from bertkit.errors import UsageError
from bertkit.files import write_text
from bertkit.models.encoder import Encoder
from bertkit.models.headed import HeadedModel
from bertkit.models.late_interaction import (
    PROJECTION,
    LateInteraction,
    check_expansion,
    maxsim,
    maxsim_of_own,
    padded,
    write_token_files,
)
from bertkit.models.loss_sum import LossSum
from bertkit.models.operators.matmul import Linear
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, TaskBatch
from bertkit.tasks.classification import LABEL
from bertkit.tasks.embedding.similarity import compared
from bertkit.tasks.embedding.task import METRICS_OF, TEXT_NUMBER, Embedding
from bertkit.tasks.embedding.token_reader import TokenReader
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import SentenceExample
from bertkit.text.tokenizer_files import load_tokenizer

SCORED = "scored"
"""Which tokens are scored."""


class LateInteractionTask(Embedding):
    """Texts as a vector for each token.

    Args:
        arguments, settings: of `Embedding`; pooling and normalisation have no effect.
        interaction: which tokens are read and scored.
        projected_width: E.
        projection: the linear map that training starts from; None: a new one.

    Raises:
        UsageError: the loss, or another setting, does not fit.
    """

    of_encoder: ClassVar[bool] = False

    def __init__(
        self,
        *arguments: Any,
        interaction: LateInteraction,
        projected_width: int,
        projection: nn.Linear | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.interaction = interaction
        self.projection = projection
        self.projected_width = projected_width
        name = getattr(self.objective, "name", "")
        if self.objective.reads_scores is None:
            raise UsageError(
                f"embedding.loss: {name} reads one vector per text, but late interaction scores pairs of texts; choose"
                " multiple_negatives, or margin or kl_divergence with a teacher"
            )
        if getattr(self.objective, "similarity", "maxsim") != "maxsim":
            raise UsageError(
                f"embedding.loss.similarity: is {self.objective.similarity}, but token vectors are compared by maxsim;"  # type: ignore[attr-defined]  # of multiple_negatives
                " set it to maxsim"
            )
        if self.matryoshka is not None:
            raise UsageError(
                "embedding.matryoshka: is for one vector per text; leave it out, or set"
                " embedding.late_interaction.width"
            )

    def vector_width(self, encoder: Encoder) -> int:
        return self.projected_width

    def encode(self, examples: Sequence[SentenceExample], encoder: SequenceEncoder) -> Features:
        """Each text as a sequence, the first of an example as a query."""
        reader = TokenReader(encoder, self.interaction, self.reading)
        queries = iter(reader.queries([each.texts[0] for each in examples]))
        documents = iter(reader.documents([text for each in examples for text in each.texts[1:]]))
        writer, keys, scored = FeatureWriter(), list[int](), list[list[bool]]()
        cut = dropped = 0
        for number, example in enumerate(examples):
            lost = 0
            for own in [next(queries), *(next(documents) for _ in example.texts[1:])]:
                writer.add(own.ids, own.types)
                keys.append(own.keys)
                scored.append(own.scored)
                lost += own.cut
            writer.close(number)
            cut += lost > 0
            dropped += lost
        tokens = {SCORED: np.fromiter(chain.from_iterable(scored), dtype=np.bool_)}
        counts = EncodedTokenCounts(len(examples), 0, 0, cut, dropped)
        labelled = self.metrics == METRICS_OF.get(compared(examples))
        features = writer.finish(counts, self.example_labels(examples), tokens, labelled=labelled)
        hidden = self.interaction.expansion == "hidden"
        return replace(features, keys_S=np.asarray(keys, dtype=np.int64)) if hidden else features

    def modules(self, model: HeadedModel, seed: int, directory: Path | None = None) -> dict[str, nn.Module]:
        """The linear map, trained along with the encoder: a given one, or drawn like torch's layers.

        Raises:
            UsageError: the family cannot leave the expansion of queries out of its attention.
        """
        length = self.interaction.query_length
        if self.interaction.expansion == "hidden" and length is not None:
            check_expansion(model.encoder, length, "embedding.late_interaction")
        if self.projection is not None:
            return {PROJECTION: copy.deepcopy(self.projection)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return {PROJECTION: Linear(model.encoder.width, self.projected_width, bias=False)}

    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """The vectors of the scored tokens, (M, E), in float32."""
        scored_TD = hidden_TD[batch.token_labels[SCORED]]
        return functional.normalize(model.companions[PROJECTION](scored_TD).float(), dim=-1)

    def loss_with(self, model: HeadedModel, logits: Tensor, batch: TaskBatch) -> LossSum:
        return self.loss_of(logits, batch)

    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        count_IA, start_IA = _bounds(batch)
        query_IQE, _ = padded(logits, start_IA[:, 0], count_IA[:, 0])
        if self.objective.reads_scores == "all":
            others = padded(logits, start_IA[:, 1:].T.flatten(), count_IA[:, 1:].T.flatten())
            scores = maxsim(query_IQE, *others)
        else:
            vectors_CLE, real_CL = padded(logits, start_IA[:, 1:].flatten(), count_IA[:, 1:].flatten())
            shape = (batch.num_examples, -1, real_CL.shape[1])
            scores = maxsim_of_own(query_IQE, vectors_CLE.view(*shape, logits.shape[1]), real_CL.view(shape))
        labels = batch.example_labels
        return self.objective.of_scores(scores, labels.get(LABEL), labels.get(TEXT_NUMBER))

    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[Any]:
        """The vectors of each example's texts, a list of A arrays (L, E)."""
        vectors_ME = self.logits(model, hidden_TD, batch).cpu()
        counts = _bounds(batch)[0].cpu()
        parts = iter(torch.split(vectors_ME, counts.flatten().tolist()))
        return [[next(parts).numpy() for _ in row] for row in counts]

    def write_files(self, directory: Path, model: HeadedModel, *, max_tokens: int) -> None:
        weight_ED = model.companions[PROJECTION].get_parameter("weight")
        length = min(max_tokens, self.interaction.document_length or max_tokens)
        interaction = replace(self.interaction, document_length=length)
        write_token_files(directory, weight_ED, interaction, max_tokens=max_tokens, reading=self.reading)
        encoder = SequenceEncoder(load_tokenizer(directory), max_tokens=max_tokens)
        register_markers(directory, TokenReader(encoder, interaction, self.reading).markers)


def register_markers(directory: Path, markers: Sequence[str]) -> None:
    """Make each marker a single token in a directory's tokenizer.json, as this project reads it; sentence-transformers
    encodes a prompt like any text, and would split it."""
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_special_tokens([tokenizers.AddedToken(each, special=True, normalized=False) for each in markers])
    write_text(path, backend.to_str(pretty=True))


def _bounds(batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """The number of scored tokens of each text, and the first of them among all, (I, A) each."""
    before_T1 = functional.pad(batch.token_labels[SCORED].long().cumsum(0), (1, 0))
    edge_B1 = before_T1[batch.packed.sequences.cu_seqlens_B1.long()]
    shape = (batch.num_examples, -1)
    return edge_B1.diff().view(shape), edge_B1[:-1].view(shape)
