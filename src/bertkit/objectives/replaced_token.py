"""Replaced-token detection: which tokens are the text's own, and which were predicted by a small masked LM?

Clark et al. 2020, ELECTRA, arXiv:2003.10555, sections 2 and 3.2 and table 6; details as in google-research/electra.
It needs `masked_lm`, which trains the generator: a smaller model that is trained along with the main model, reads the
masked batch and fills its masks by sampling from its own predictions. The main model reads the filled text and predicts
for every token whether it was replaced. Siblings: masked_lm.py, whose loss is only at the masked tokens;
random_token_detection.py, which needs no generator.

Quirks honoured: the loss is the mean over all tokens, including [CLS] and [SEP], times 50; a sampled token that equals
the text's own counts as original; tokens that were chosen but not masked are sampled too; no gradient flows through the
sampling, which is at temperature 1; the embeddings are shared with their norm (one scope in the released code).
Quirks left: the released code chooses the masked positions with replacement, so a few are chosen twice and fewer than
15% are masked; masked_lm chooses without. It samples by the Gumbel trick with the framework's generator. Here one
uniform number per target goes through the inverse of the distribution function, which gives the same distribution. The
number comes from the worker and depends on sample and position, so evaluation and resuming do not change it.

DeBERTaV3 (He et al. 2021, arXiv:2111.09543, section 3; details as in rtd_task.py of microsoft/DeBERTa) trains the same
task with a generator of the same width and half the depth, DeBERTa's mask decoder in it (`generator_mask_decoder`),
embeddings that are shared without their gradients (`tie: gradient-disentangled`), and a head that also reads the first
token (`head: contextual`). Quirks left: there, generator and model are updated one after the other, so that the model
already reads the generator's new embeddings; the released code also shares embeddings of absolute positions, which the
model does not read.

Section 3.2 and figure 3 (right) of the first paper compare with a two-stage procedure, of which no code was released:
the generator is trained alone, the model of the same size starts from its weights, and is then trained alone
(`training: two-stage`, in a stage after one with only masked_lm). Not specified in the paper: the optimiser's state is
reset in between, the head of the model is new, and the generator samples with its dropout on, as in joint training.

Shapes: T packed tokens, M masked tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.deberta import CONTEXTUAL_HEAD, DebertaLikeConfig
from bertkit.models.headed import HeadedModel, disentangle_embeddings, share_embeddings
from bertkit.objectives.base import CompanionObjective, Objective, States, TokenDetection
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.text.tokenizer import Tokenizer

_ROWS_AT_ONCE = 256
"""Number of targets whose distribution functions are in memory at once: 60 MB with 30,522 words."""

_NEEDS_MASKED_LM = "objective.replaced_token needs masked_lm for its generator; add `- masked_lm`"


class ReplacedToken(CompanionObjective, TokenDetection):
    """Binary classification of every token: original, or sampled from the generator."""

    weight: float = Field(50.0, ge=0, description="Weight of this term's mean in the total loss.")
    generator_size: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Size of the generator: its width, feed-forward width and heads as a share of the model's.",
    )
    generator_depth: float = Field(
        1.0, gt=0, le=1, description="Number of the generator's layers as a share of the model's; DeBERTaV3's is 0.5."
    )
    generator_mask_decoder: bool = Field(
        False,
        description="Whether the generator predicts with DeBERTa's enhanced mask decoder, which reads positions.",
    )
    tie: Literal["embeddings", "gradient-disentangled", "none", "all"] = Field(
        "embeddings",
        description="Parameters that the model and the generator share. gradient-disentangled: the model's word"
        " embeddings are the generator's, which it does not train, plus differences of its own (DeBERTaV3); all"
        " requires a generator of the model's sizes.",
    )
    head: Literal["token", "contextual"] = Field(
        "token",
        description="The model's head: it reads each token's state (ELECTRA), or its sum with the state of the"
        " sequence's first token (DeBERTaV3; in families deberta and deberta-v2).",
    )
    training: Literal["joint", "two-stage"] = Field(
        "joint",
        description="joint: the generator is trained along with the model; two-stage: the generator was trained in"
        " the previous stage, which had only masked_lm; in this stage the model takes over its weights and the"
        " generator is unchanged.",
    )

    term: ClassVar[str] = "replaced_token"
    states: ClassVar[States] = "tokens"
    companion: ClassVar[str] = "generator"
    rank: ClassVar[int] = MaskedLM.rank + 1
    later_fields: ClassVar[frozenset[str]] = frozenset({"generator_depth", "generator_mask_decoder", "head"})

    @property
    def heads(self) -> tuple[str, ...]:
        return (CONTEXTUAL_HEAD if self.head == "contextual" else self.term,)

    def generator(self, model: EncoderConfig) -> EncoderConfig:
        """The settings of the generator of a model.

        Raises:
            ValueError: the scaled sizes do not fit together, or the family has no enhanced mask decoder.
        """
        return model.generator(self.generator_size, self.generator_depth, mask_decoder=self.generator_mask_decoder)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        at = "objective.replaced_token"
        if MaskedLM.term not in model.all_heads():
            return [
                f"{at} needs a generator with a masked-LM head, which model.family {model.model_type!r} cannot have"
            ]
        if self.heads[0] not in model.all_heads():
            return [f"{at}.head is contextual, which model.family {model.model_type!r} does not have; set it to token"]
        if self.generator_mask_decoder and not isinstance(model, DebertaLikeConfig):
            return [
                f"{at}.generator_mask_decoder is true, but model.family {model.model_type!r} has no mask decoder; set"
                " it to false, or use deberta or deberta-v2"
            ]
        try:
            generator = self.generator(model)
        except ValueError as error:
            return [
                f"{at}.generator_size ({self.generator_size:g}) gives no valid generator: {error}; use another size"
            ]
        if self.tie == "all" and generator != model:
            if self.generator_size != 1:
                return [f"{at}.tie is all, which needs {at}.generator_size 1, not {self.generator_size:g}"]
            return [f"{at}.tie is all, which needs {at}.generator_depth 1 and generator_mask_decoder: false"]
        if self.training == "two-stage" and (self.tie != "none" or generator != model):
            return [
                f"{at}.training is two-stage, in which the model starts from all weights of its generator and is then"
                f" trained alone; set {at}.generator_size to 1 and {at}.tie to none"
            ]
        return []

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        masked_lm = next((objective for objective in objectives if isinstance(objective, MaskedLM)), None)
        if masked_lm is None:
            return [_NEEDS_MASKED_LM]
        if self.training == "two-stage" and masked_lm.weight:
            return [
                "objective.replaced_token.training is two-stage, in which the generator is not trained further, but"
                f" objective.masked_lm.weight is {masked_lm.weight:g}; set it to 0, so that it only chooses the tokens"
            ]
        return []

    @property
    def companion_settings(self) -> Mapping[str, object]:
        return {
            "generator_size": f"{self.generator_size:g}",
            "generator_depth": f"{self.generator_depth:g}",
            "generator_mask_decoder": self.generator_mask_decoder,
            "tie": self.tie,
        }

    @property
    def takes_over(self) -> bool:
        return self.training == "two-stage"

    def build_companion(self, model: HeadedModel, *, pad_id: int = 0) -> HeadedModel:
        """The generator of a model: a masked LM with uninitialised weights except those shared with the model.

        Raises:
            UsageError: if its embeddings are to be shared with the model but have another shape.
        """
        encoder = model.encoder
        if self.tie != "all":
            encoder = self.generator(encoder.config).build(encoder.vocab_size, pad_id=pad_id)
        if self.tie == "embeddings":
            share_embeddings(encoder, model.encoder)
        elif self.tie == "gradient-disentangled":
            disentangle_embeddings(model.encoder, encoder)
        return HeadedModel(encoder, [MaskedLM.term])

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Give every masked token the uniform number for the generator's sampling; nothing is replaced yet.

        Raises:
            UsageError: if no masked LM has chosen tokens.
        """
        masked = samples.targets.get(MaskedLM.term)
        if masked is None:
            raise UsageError(_NEEDS_MASKED_LM)
        sequence_M = samples.sequence_T[masked.index_M]
        uniform_M = draw.uniform(
            "replace/draw",
            epoch=samples.epoch_B[sequence_M],
            sample=samples.sample_B[sequence_M],
            position=samples.position_T[masked.index_M],
        )
        return samples.with_targets(self.term, Targets(masked.index_M, masked.id_M, columns={"uniform": uniform_M}))

    @torch.no_grad()
    def filled(self, companion: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> PackedBatch:
        """The batch with its masked tokens sampled from the generator's predictions.

        Args:
            companion: the generator.
            hidden_TD: its states of the masked batch.
            batch: the masked batch.
        """
        targets = batch.targets[self.term]
        rows = zip(
            torch.split(targets.index_M, _ROWS_AT_ONCE),
            torch.split(targets.columns["uniform"], _ROWS_AT_ONCE),
            strict=True,
        )
        drawn = [
            drawn_ids(companion.masked_lm_logits(hidden_TD.index_select(0, index_M)), uniform_M)
            for index_M, uniform_M in rows
        ]
        return replace(batch, ids_T=batch.ids_T.index_copy(0, targets.index_M, torch.cat(drawn)))

    def expected_count(self, length: int) -> float:
        return float(length)

    def logits_M(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        return super().logits_M(model, model.with_first(self.heads[0], hidden_TD, batch), batch)

    def marks_M(self, batch: PackedBatch) -> Tensor:
        """For a filled batch, whether each token differs from the text's own."""
        targets = batch.targets[self.term]
        replaced_M = batch.ids_T.index_select(0, targets.index_M) != targets.id_M
        return torch.zeros_like(batch.ids_T, dtype=torch.bool).index_copy(0, targets.index_M, replaced_M)

    def described(self, targets: Targets, tokenizer: Tokenizer) -> list[str | None]:
        """The text's own tokens, since the sampled ones depend on the generator's weights."""
        return [tokenizer.token(target) for target in targets.id_M.tolist()]


def drawn_ids(logits_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """One id per row from the softmax of its logits, (M,): the first at which the distribution function exceeds u.

    Args:
        logits_MV: any floating-point type.
        uniform_M: u, float64 in [0, 1).
    """
    # In float32 the function's rounding would be as large as the probability of a rare word.
    reached_MV = logits_MV.float().softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    wanted_M1 = uniform_M[:, None] * reached_MV[:, -1:]
    return torch.searchsorted(reached_MV, wanted_M1, right=True).squeeze(-1).clamp_max(logits_MV.shape[-1] - 1)
