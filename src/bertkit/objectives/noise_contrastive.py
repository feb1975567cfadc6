"""Noise-contrastive estimation of an energy per token: which tokens are the text's own, and which are noise?

Clark et al. 2020, "Pre-Training Transformers as Energy-Based Cloze Models" (Electric), arXiv:2012.08561, sections 2.2
and 2.3; details as in google-research/electra (electric_objective). The model assigns each token x_t an energy E_t; its
companion, the cloze model (two_tower_cloze.py), a probability q(x_t) given all other tokens of the text. A share r of
the tokens becomes noise drawn from q. The log-odds that a token is noise are then

    E_t + log q(x_t) + log(r / (1 - r)),

and the loss is the binary cross-entropy of all tokens. After training, -E_t estimates log p(x_t | the others) without a
softmax, and one pass scores a text: rule `energy` of models/scoring/rules.py. Sibling of replaced_token.py, where the
log-odds are the head's output.

Quirks honoured: q is that of the unchanged text, at the token that the model reads; neither q nor the drawing gets a
gradient; a noise token that equals the text's own counts as noise; the loss is the mean over all tokens, including
[CLS] and [SEP], times 50; r is the setting, not the sequence's actual share (the paper's ceil(0.15 n) / n). Quirks
left: as in replaced_token.py, positions are chosen without replacement, with random numbers of the worker.

Shapes: T packed tokens, m tokens of one part, M noise tokens, D width of the two towers together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.pinned import sent
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.two_tower import TwoTower
from bertkit.models.headed import HeadedModel, share_embeddings
from bertkit.objectives.base import CompanionObjective, Objective, States, TokenDetection
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.replaced_token import drawn_ids
from bertkit.objectives.two_tower_cloze import COMPANION, TwoTowerCloze

_ROWS_AT_ONCE = 256
"""Number of tokens whose distributions are in memory at once: 31 MB with 30,522 words, plus the draw's copies."""


class NoiseContrastive(CompanionObjective, TokenDetection):
    """Binary classification of every token, original or noise, from its energy and its probability as noise."""

    weight: float = Field(50.0, ge=0, description="Weight of this term's mean in the total loss.")
    rate: float = Field(0.15, gt=0, lt=1, description="Share of a sequence's tokens that is replaced by noise.")
    generator_size: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Size of each tower: its width, feed-forward width and heads as a share of the model's.",
    )
    tie: Literal["embeddings", "none"] = Field(
        "embeddings", description="Parameters that the model and both towers share."
    )

    term: ClassVar[str] = "noise_contrastive"
    states: ClassVar[States] = "tokens"
    label_names: ClassVar[tuple[str, ...]] = ("original", "noise")
    companion: ClassVar[str] = COMPANION

    @property
    def heads(self) -> tuple[str, ...]:
        """ELECTRA's head: its logit is the energy."""
        return ("replaced_token",)

    @property
    def scoring_rule(self) -> str | None:
        return "energy"

    @property
    def companion_settings(self) -> Mapping[str, object]:
        return {"generator_size": f"{self.generator_size:g}", "tie": self.tie}

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        if not isinstance(model, ElectraConfig):
            return [
                f"objective.{self.term} needs model.family electra, from which its two towers are built, not"
                f" {model.model_type!r}"
            ]
        try:
            model.generator(self.generator_size)
        except ValueError as error:
            at = f"objective.{self.term}.generator_size"
            return [f"{at} ({self.generator_size:g}) gives no valid cloze model: {error}; use another size"]
        return []

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        at = f"objective.{self.term}"
        errors = []
        if not any(isinstance(each, TwoTowerCloze) for each in objectives):
            errors.append(f"{at} needs two_tower_cloze for its noise; add `- two_tower_cloze`")
        return errors + [
            f"{at} needs the unchanged text, but objective.{each.term} would change or predict its tokens; leave one of"
            " the two out"
            for each in objectives
            if each.target in ("token", "mark") and each is not self and not isinstance(each, TwoTowerCloze)
        ]

    def build_companion(self, model: HeadedModel, *, pad_id: int = 0) -> HeadedModel:
        """The cloze model of a model, with uninitialised weights except those shared with the model."""
        config = model.encoder.config.generator(self.generator_size)
        two_tower = TwoTower(config, model.encoder.vocab_size, pad_id=pad_id)
        if self.tie == "embeddings":
            for tower in two_tower.towers:
                share_embeddings(tower, model.encoder)
        return HeadedModel(two_tower, [MaskedLM.term])

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Mark the tokens that become noise, each with the random number for drawing it; nothing changes yet.

        Every token is a target: 1 for noise, with its uniform number as `columns["uniform"]`, 0 otherwise.
        """
        # As many as a masked LM would mask, chosen in the same way.
        choosing = MaskedLM(rate=self.rate, mask_share=0.0, random_share=0.0)
        index_M = choosing.corrupt(samples.with_changes(targets={}), vocabulary, draw).targets[choosing.term].index_M
        noise_T = np.zeros(samples.ids_T.size, dtype=np.int64)
        noise_T[index_M] = 1
        uniform_T = samples.uniform_T(draw, "noise/draw") * noise_T
        return samples.with_targets(
            self.term, Targets(np.arange(noise_T.size), noise_T, columns={"uniform": uniform_T})
        )

    @torch.no_grad()
    def filled(self, companion: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> PackedBatch:
        """The batch with its noise drawn, and the log-probability of each of its tokens as `columns["log_q"]`."""
        targets = batch.targets[self.term]
        # The places of noise are found on the host, which would otherwise wait for the GPU.
        noise_T = (batch.host or batch).targets[self.term].id_M
        ids, log_q = [], []
        parts = (torch.split(each, _ROWS_AT_ONCE) for each in (hidden_TD, batch.ids_T, noise_T))
        uniform = torch.split(targets.columns["uniform"], _ROWS_AT_ONCE)
        for hidden_mD, id_m, noise_m, uniform_m in zip(*parts, uniform, strict=True):
            logits_mV = companion.masked_lm_logits(hidden_mD).float()
            place_M = sent(noise_m.nonzero().flatten(), logits_mV.device)
            read_m = id_m.index_copy(0, place_M, drawn_ids(logits_mV[place_M], uniform_m[place_M]))
            log_q.append(logits_mV.log_softmax(dim=-1).gather(1, read_m[:, None]).squeeze(-1))
            ids.append(read_m)
        scored = replace(targets, columns={**targets.columns, "log_q": torch.cat(log_q)})
        return replace(batch, ids_T=torch.cat(ids), targets={**batch.targets, self.term: scored})

    def logits_M(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """The log-odds that each token of a filled batch is noise, (T,), float32: Clark et al. 2020, section 2.2."""
        energy_T = super().logits_M(model, hidden_TD, batch)
        log_q_T = batch.targets[self.term].columns["log_q"]
        return energy_T + log_q_T + math.log(self.rate / (1 - self.rate))

    def expected_count(self, length: int) -> float:
        return float(length)
