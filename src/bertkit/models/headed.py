"""An encoder with heads: the one model class, for pretraining and for tasks alike.

Devlin et al. 2019, BERT, arXiv:1810.04805, sections 3 and 4. Which heads there can be, how they pool and what the Hub
calls them is the family's to say; here they are put on the encoder and asked.

Shapes: T packed tokens, B sequences, M tokens asked for, D width, V vocabulary, K labels.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.models.encoder import Encoder, initialise
from bertkit.models.heads import HEAD_KINDS, HeadShape, Summary
from bertkit.models.labels import Labels
from bertkit.models.recorder import Recorder
from bertkit.models.weights import HubForm, prefixed, to_hub_names

POOLER = "pooler"


class HeadedModel(nn.Module):
    """An encoder and its heads.

    Args:
        encoder: any family's.
        heads: names out of `bertkit.models.heads.HEAD_KINDS`; `pooler` for a pooler without a head.
        labels: of the classification heads.

    Attributes:
        head_names: the heads, in the family's order.
        extras: keys of the config.json that the model was read from and that nothing here interprets; saved again.

    Raises:
        UsageError: if the family has no such head.
    """

    def __init__(self, encoder: Encoder, heads: Collection[str] = (), *, labels: Labels | None = None) -> None:
        super().__init__()
        self.labels = Labels.unnamed() if labels is None else labels
        self.extras: dict[str, Any] = {}
        self.plans = encoder.config.all_heads()
        unknown = sorted(set(heads) - set(self.plans) - {POOLER})
        if unknown:
            raise UsageError(
                f"model.family {encoder.config.model_type!r} has no head for {', '.join(unknown)}; it has"
                f" {', '.join(self.plans)}"
            )
        self.encoder = encoder
        self.head_names = tuple(name for name in self.plans if name in heads)
        shape = HeadShape(encoder.width, encoder.embedding_width, encoder.vocab_size, self.labels.count)
        # The pooler stands before the first head that reads it: the order of parameters is the order of their sums.
        for name in self.head_names:
            if self.plans[name].pooled and not self.has_pooler:
                self.add_module(POOLER, encoder.config.build_pooler(encoder.width))
            self.add_module(name, self.plans[name].build(shape))
        if POOLER in heads and not self.has_pooler:
            self.add_module(POOLER, encoder.config.build_pooler(encoder.width))

    @property
    def has_pooler(self) -> bool:
        return hasattr(self, POOLER)

    def initialise(self, seed: int, *, only: Collection[str] | None = None) -> None:
        """Draw weights anew, by the family's initialisation.

        Args:
            seed: of the draws.
            only: names of parameters; all of them where None.
        """
        initialise(self, self.encoder.config, seed=seed, only=only)
        if only is None:
            self.encoder.finish_initialisation()

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """Hidden states, (T, D)."""
        hidden_TD: Tensor = self.encoder(self.encoder.marked(batch, self.head_names), recorder)
        return hidden_TD

    def token_logits(self, head: str, hidden_MD: Tensor) -> Tensor:
        """States of the tokens asked for, (M, D), to (M, V) of a vocabulary head or (M, K) of another token head."""
        module = self.get_submodule(head)
        logits: Tensor = (
            module(hidden_MD, self.encoder.word_embedding.weight)
            if HEAD_KINDS[head] == "vocabulary"
            else module(hidden_MD)
        )
        return logits

    def sequence_logits(self, head: str, summary_BD: Tensor) -> Tensor:
        """Summaries of the sequences (see `summary`), (B, D), to (B, K)."""
        if self.plans[head].pooled:
            summary_BD = self.get_submodule(POOLER)(summary_BD)
        logits_BK: Tensor = self.get_submodule(head)(summary_BD)
        return logits_BK

    def summary(self, head: str, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """What a sequence head reads, (B, D): the state of the first or last token, or the mean."""
        return summarise(self.plans[head].summary, hidden_TD, batch)

    def logits(self, head: str, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """A head's logits for every token, (T, K), or every sequence, (B, K)."""
        if HEAD_KINDS[head] == "sequences":
            return self.sequence_logits(head, self.summary(head, hidden_TD, batch))
        return self.token_logits(head, hidden_TD)

    def masked_lm_logits(self, hidden_MD: Tensor) -> Tensor:
        """(M, D) to (M, V)."""
        return self.token_logits("masked_lm", hidden_MD)

    def next_sentence_logits(self, first_BD: Tensor) -> Tensor:
        """States of the first tokens, (B, D), to (B, 2)."""
        return self.sequence_logits("next_sentence", first_BD)

    @property
    def architectures(self) -> list[str]:
        """The Hub's classes that load this model whole, as config.json names them."""
        config = self.encoder.config
        known = {name: self.plans[name].architecture for name in self.head_names}
        known = {name: architecture for name, architecture in known.items() if architecture is not None}
        joint = config.joint_architectures.get(frozenset(known))
        if joint is not None:
            return [joint]
        return list(known.values()) or [config.base_architecture]

    def hub_form(self) -> HubForm:
        """How the weights stand in a file of the Hub."""
        config, prefix = self.encoder.config, f"{self.encoder.config.hub_prefix}."
        names = prefixed(self.encoder.hub_names, "encoder.", prefix)
        if config.pooler_hub_name is not None:
            names["pooler.dense"] = config.pooler_hub_name
        for head in self.head_names:
            names |= prefixed(self.plans[head].hub_names, f"{head}.", "")
        copies = {prefix + copy: prefix + source for copy, source in self.encoder.hub_copies().items()}
        layouts = [layout.below(prefix) for layout in self.encoder.layouts()]
        return HubForm(names, layouts, tied=self._tied(names), copies=copies)

    def _tied(self, names: dict[str, str]) -> dict[str, str]:
        """What the files of the Hub may hold a second time for the sake of the vocabulary projection."""
        tied: dict[str, str] = {}
        for head in self.head_names:
            decoder = self.plans[head].decoder
            if decoder is None:
                continue
            embedding = self.encoder.word_embedding.weight
            (own,) = (name for name, parameter in self.named_parameters() if parameter is embedding)
            sources = {"weight": own, "bias": f"{head}.bias"}
            present = {kind: name for kind, name in sources.items() if name in self.state_dict()}
            hub = to_hub_names(present.values(), names)
            tied |= {f"{decoder}.{kind}": hub[name] for kind, name in present.items()}
        # A head whose own bias stands in the decoder on the Hub is not a copy of anything.
        return {name: source for name, source in tied.items() if name != source}


def summarise(kind: Summary, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """One state a sequence, (B, D)."""
    if kind == "first":
        return hidden_TD.index_select(0, batch.first_token_B)
    ends_B = batch.sequences.cu_seqlens_B1[1:].long()
    if kind == "last":
        return hidden_TD.index_select(0, ends_B - 1)
    lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
    sequence_T = torch.repeat_interleave(lengths_B, output_size=batch.num_tokens)
    sums_BD = hidden_TD.new_zeros(lengths_B.numel(), hidden_TD.shape[1]).index_add(0, sequence_T, hidden_TD)
    return sums_BD / lengths_B[:, None]
