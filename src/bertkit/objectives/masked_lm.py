"""Masked language modelling: predict a few tokens that are masked, replaced or kept.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3.1 and appendix A.1; counts and draws as in the released
create_pretraining_data.py. A masking strategy (masking/) chooses the tokens that are masked together: single tokens as
in BERT, whole words, ALBERT's n-grams, SpanBERT's spans, ERNIE's phrases and annotated spans. ELECTRA's generator is
`mask_share: 0.85, random_share: 0`. GPT-BERT's masking rate falls during the run: `rate: {start: 0.3, end: 0.15}`.

Quirks honoured: the masking rate is a share of the whole length, including [CLS] and [SEP], although these two are
never chosen; the count is exact, not a draw for each token; a random word is drawn from the whole vocabulary, including
special tokens. SpanBERT's released code draws random words by their frequency in the corpus: `random_from: corpus`.
Quirks left: RoBERTa's code can mask <s> and </s>, draws no special token at random, and rounds its count up or down at
random; ELECTRA's draws positions with replacement, so some sequences have fewer.
`data.static_copies` determines whether masks are static or dynamic (redrawn each epoch). With a changing masking rate,
static copies have the same draws but different numbers of masks.

Shapes: T packed tokens, B sequences, M predicted tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from bertkit.arrays import Float64Array, Int64Array
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.models.encoder import EncoderConfig
from bertkit.objectives.base import TokenPrediction
from bertkit.objectives.masking import AnyUnits, Tokens
from bertkit.objectives.schedule import Rate, rate_at
from bertkit.settings import UnreadKey
from bertkit.text.tokenizer import Tokenizer


class MaskedLM(TokenPrediction):
    """Predict an exact number of masked tokens per sequence, as far as whole units allow."""

    rate: Rate = Field(
        0.15,
        description="Masking rate, the share of a sequence's tokens that is predicted: a number, or a linear change"
        " over the run, such as {start: 0.3, end: 0.15}.",
    )
    max_predictions: int | None = Field(
        None, ge=1, description="Maximum number of predictions per sequence; null: no limit."
    )
    mask_share: float = Field(0.8, ge=0, le=1, description="Share of the predicted tokens that is replaced by [MASK].")
    random_share: float = Field(
        0.1, ge=0, le=1, description="Share that is replaced by a random token; the rest is unchanged."
    )

    random_from: Literal["vocabulary", "corpus"] = Field(
        "vocabulary",
        description="Distribution of random tokens: uniform over the vocabulary, or by frequency in the corpus.",
    )
    units: AnyUnits = Field(
        default_factory=Tokens, description="Masking strategy: which tokens are predicted together."
    )

    _upper_V: Float64Array | None = PrivateAttr(None)
    """The upper end of each token's share of the corpus, when all shares are laid end to end."""

    term: ClassVar[str] = "masked_lm"
    in_place: ClassVar[bool] = True
    fills_masks: ClassVar[bool] = True
    learnt_by: ClassVar[str | None] = "generator"

    @model_validator(mode="after")
    def _shares_fit(self) -> MaskedLM:
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"mask_share ({self.mask_share}) and random_share ({self.random_share}) must not add up to more than 1"
            )
        return self

    @property
    def scoring_rule(self) -> str | None:
        return "original"

    @property
    def reads_annotated_spans(self) -> bool:
        """Whether it masks spans that are annotated in the corpus."""
        return self.units.reads_annotated_spans

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.random_share == 0:
            why = f"objective.{self.term}.random_share is 0: no token becomes a random one"
            yield UnreadKey("random_from", why, "give random_share a value above 0")

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        return [f"objective.{self.term}.{each}" for each in self.units.errors(data)] + super().errors(data, model)

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        if self.mask_share > 0:
            self.require_mask(tokenizer, f", or set mask_share: 0 for {self.term}")
        prepared = self.model_copy(update={"units": self.units.prepared(tokenizer, shards)})
        if self.random_from == "corpus":
            prepared._upper_V = np.cumsum(shards.token_counts_V) / shards.token_counts_V.sum()
        return prepared

    def counts_B(self, lengths_B: Int64Array, ordinary_B: Int64Array) -> Int64Array:
        """The number of tokens of each sequence to predict, if whole units allow; if the rate changes and `at` has not
        set it, at the rate of the run's first step.

        Args:
            lengths_B: tokens of each sequence.
            ordinary_B: those that may be predicted.
        """
        counts_B = np.minimum(self.units.counts_B(rate_at(self.rate, 0), lengths_B, ordinary_B), ordinary_B)
        return counts_B if self.max_predictions is None else np.minimum(counts_B, self.max_predictions)

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Choose the units and replace their tokens.

        If one draw decides for a whole unit, `places["unit"]` of the targets has the first token of each target's unit.
        """
        ordinary_B = np.bincount(samples.sequence_T[~samples.fixed_T], minlength=samples.lengths_B.size)
        counts_B = self.counts_B(samples.lengths_B, ordinary_B)
        chosen = self.units.choose(samples, vocabulary, counts_B, draw)
        index_M, first_M = chosen.index_M, chosen.first_M if self.units.replaced_as_one else None
        id_M = samples.ids_T[index_M]
        action_M = draw.uniform("mask/action", **_address(samples, index_M if first_M is None else first_M))
        random_id_M = self._random_id_M(vocabulary, draw, _address(samples, index_M))
        replaced_M = np.where(action_M < self.mask_share + self.random_share, random_id_M, id_M)
        replaced_M = np.where(action_M < self.mask_share, vocabulary.mask_id, replaced_M)
        ids_T = samples.ids_T.copy()
        ids_T[index_M] = replaced_M
        places = {} if first_M is None else {"unit": first_M}
        return samples.with_targets(self.term, Targets(index_M, id_M, places), ids_T=ids_T)

    def _random_id_M(self, vocabulary: Vocabulary, draw: Draw, address: dict[str, Int64Array]) -> Int64Array:
        if self.random_from == "vocabulary":
            return draw.integers("mask/word", vocabulary.size, **address)
        assert self._upper_V is not None, "prepared() counts the corpus"
        return np.searchsorted(self._upper_V, draw.uniform("mask/word", **address), side="right")

    def expected_count(self, length: int) -> float:
        return float(self.counts_B(np.array([length]), np.array([max(1, length - 2)]))[0])


def _address(samples: Samples, index_M: Int64Array) -> dict[str, Int64Array]:
    """The address of these tokens' random draws."""
    sequence_M = samples.sequence_T[index_M]
    return {
        "epoch": samples.epoch_B[sequence_M],
        "sample": samples.sample_B[sequence_M],
        "position": samples.position_T[index_M],
    }
