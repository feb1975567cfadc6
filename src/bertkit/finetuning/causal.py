"""Fine-tuning of a causal model as in GPT: an additional language-modelling loss, and tokens around the texts.

Radford et al. 2018, GPT, sections 3.2 (equation 5: the task's loss plus lambda times the language model's, lambda 0.5)
and 3.3 (start, delimiter and extract tokens, appended to the vocabulary); values and names as in
openai/finetune-transformer-lm, train.py. There the language model's loss is averaged over each sequence's tokens and
then over sequences; here over the batch's tokens.

Shapes: T packed tokens, B sequences, D width, M predicted tokens.
"""

from __future__ import annotations

import logging

from pydantic import Field
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import template

log = logging.getLogger(__name__)

HEAD = "causal_lm"
START, DELIMITER, EXTRACT = DELIMITERS = ("_start_", "_delimiter_", "_classify_")


class CausalFinetuning(Settings):
    """Settings of GPT's fine-tuning."""

    lm_weight: float = Field(
        0.5, ge=0, le=100, description="Weight of the language-modelling loss on the task's texts; 0: none."
    )
    delimiters: bool = Field(
        True,
        description="Add a start, a delimiter and an extract token to a vocabulary whose sequences have no special"
        " tokens.",
    )

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads that the model needs in addition to the task's."""
        return (HEAD,) if self.lm_weight else ()

    def check(self, config: EncoderConfig) -> None:
        """Raise UsageError if the family is not causal."""
        if HEAD not in config.heads():
            raise UsageError(
                f"causal: model.family {config.model_type!r} has no head that predicts the next token; leave causal"
                " out, or start from a GPT"
            )

    def framed(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with the three tokens added, unless it has its own special tokens around a text."""
        if not self.delimiters or has_delimiters(tokenizer):
            return tokenizer
        own = SequenceEncoder(tokenizer, max_tokens=64).single
        if not own.special_tokens:
            return with_delimiters(tokenizer)
        log.info("causal.delimiters: the vocabulary's own special tokens around texts are used in place of GPT's")
        return tokenizer if own.frames[-1] else with_closing_separator(tokenizer)


def has_delimiters(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary contains all three."""
    return all(tokenizer.id(token) is not None for token in DELIMITERS)


def with_delimiters(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the three tokens, which frame every text and pair; all its ids are kept."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(list(DELIMITERS))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {EXTRACT}",
        pair=f"{START} $A {DELIMITER} $B {EXTRACT}",
        special_tokens=[(token, backend.token_to_id(token)) for token in DELIMITERS],
    )
    return Tokenizer(backend, tokenizer.roles, lowercases=tokenizer.lowercases)


def with_closing_separator(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with [CLS] and [SEP] whose texts end with [SEP], which takes the place of the token whose state is
    classified."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    closed = Tokenizer(backend, tokenizer.roles, lowercases=tokenizer.lowercases)
    backend.post_processor = template(closed, "bert")
    return closed


def next_token_targets(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The predicting positions, (M,), and the predicted ids: all of a sequence except its last and its first."""
    follows_T = batch.positions_T > 0
    index_M = follows_T.nonzero()[:, 0]
    return index_M - 1, batch.ids_T[index_M]


def causal_loss(model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
    """Summed cross-entropy of every token but the first of its sequence, in nats."""
    index_M, id_M = next_token_targets(batch)
    return LossSum.of_words(model.projection(HEAD, hidden_TD.index_select(0, index_M)), id_M)


def predicted_tokens(batch: PackedBatch) -> int:
    """The number of predictions in a batch."""
    return batch.num_tokens - batch.num_sequences
