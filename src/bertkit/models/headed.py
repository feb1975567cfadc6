"""An encoder with heads: the model class used for both pretraining and tasks.

Devlin et al. 2019, BERT, arXiv:1810.04805, sections 3 and 4. The family's `HeadPlan`s define which heads it has, how
they pool, and their names on the Hub.

A companion is a second model that is trained with the first and may share parameters with it, such as ELECTRA's
generator (Clark et al. 2020, arXiv:2003.10555, section 3.2). Its parameters belong to the model; its files are
separate.

Shapes: T packed tokens, B sequences, M selected tokens, D width, V vocabulary, K labels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.data.random import derived_seed
from bertkit.errors import UsageError
from bertkit.models.encoder import Encoder, EncoderConfig, initialise
from bertkit.models.heads import HEAD_KINDS, HeadShape, Summary
from bertkit.models.labels import Labels
from bertkit.models.operators.disentangled_embedding import DIFFERENCE, DisentangledEmbedding
from bertkit.models.operators.vocabulary import VocabularyHead, VocabularyProjection
from bertkit.models.quantisation.int8 import QuantisedModule
from bertkit.models.recorder import Recorder
from bertkit.models.weights import HubForm, prefixed, to_hub_names

POOLER = "pooler"
SCORING_RULE = "scoring_rule"
"""Key of config.json: the rule of `bertkit.models.scoring.rules` that matches how the vocabulary head was trained, if
the heads do not determine it. It is one of a model's `extras`."""
COMPANIONS = "companions."


class HeadedModel(nn.Module):
    """An encoder and its heads.

    Args:
        encoder: of any family.
        heads: names in `bertkit.models.heads.HEAD_KINDS`; `pooler` for a pooler without a head.
        labels: those of the classification heads.

    Attributes:
        head_names: the heads, in the family's order.
        extras: keys of config.json that are not interpreted here, but saved with the model.
        companions: models that are trained with this one, by name.

    Raises:
        UsageError: the family has no such head.
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
                f" {', '.join(self.plans)}{_families_with(unknown)}"
            )
        self.encoder = encoder
        self.head_names = tuple(name for name in self.plans if name in heads)
        shape = HeadShape(encoder.width, encoder.embedding_width, encoder.vocab_size, self.labels.count)
        # The pooler goes before the first head that reads it: sums over parameters follow the order of parameters.
        for name in self.head_names:
            if (self.plans[name].pooled or self.plans[name].keeps_pooler) and not self.has_pooler:
                self.add_module(POOLER, encoder.config.build_pooler(encoder.width))
            self.add_module(name, self.plans[name].build(shape))
        if POOLER in heads and not self.has_pooler:
            self.add_module(POOLER, encoder.config.build_pooler(encoder.width))
        # Added last: a shared parameter keeps its name in this model.
        self.companions = nn.ModuleDict()

    @property
    def has_pooler(self) -> bool:
        return hasattr(self, POOLER)

    @property
    def heads(self) -> list[str]:
        """The heads, and `pooler` if there is one: the constructor's argument for a model with the same parts."""
        return [*self.head_names, *([POOLER] if self.has_pooler else [])]

    @property
    def heads_in_words(self) -> str:
        """Which heads it has, for messages."""
        return f"its heads are {', '.join(self.head_names)}" if self.head_names else "it has no heads"

    def named_companions(self) -> dict[str, HeadedModel]:
        """The companions, typed as `HeadedModel`."""
        return {name: companion for name, companion in self.companions.items() if isinstance(companion, HeadedModel)}

    def companion(self, name: str) -> HeadedModel | None:
        """The companion with this name; None if there is none."""
        return self.named_companions().get(name)

    def unshared(self, name: str) -> dict[str, nn.Parameter]:
        """A companion's parameters that it does not share with this model, by its own names."""
        own = {id(parameter) for key, parameter in self.named_parameters() if not key.startswith(COMPANIONS)}
        return {key: each for key, each in self.companions[name].named_parameters() if id(each) not in own}

    def own_state_dict(self) -> dict[str, Tensor]:
        """The weights by name, without those that only companions have; embeddings that are a sum with a companion's
        are whole."""
        state = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(COMPANIONS)}
        for name, part in self._disentangled().items():
            del state[name + DIFFERENCE]
            state[f"{name}.weight"] = part.weight
        return state

    def initialise(self, seed: int, *, only: Collection[str] | None = None) -> None:
        """Draw weights by the family's rules: those of the parameters named in `only`, or all if it is None."""
        own = {name for name, _ in self.named_parameters() if not name.startswith(COMPANIONS)}
        initialise(self, self.encoder.config, seed=seed, only=own if only is None else only)
        if only is None:
            self.encoder.finish_initialisation()
            self.initialise_companions(seed)

    def initialise_companions(self, seed: int) -> None:
        """Draw the companions' weights that are not shared with the model, by their own families' rules."""
        for name, companion in self.named_companions().items():
            companion.initialise(derived_seed(seed, name), only=set(self.unshared(name)))
            if companion.encoder is not self.encoder:
                companion.encoder.finish_initialisation()
        for part in self._disentangled().values():
            part.settle()

    def take_companion(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Give a companion these weights, by its own names, except those that it shares with this model."""
        tables = {id(part.shared): part for part in self._disentangled().values()}
        companion = self.companions[name]
        with torch.no_grad():
            for key, parameter in self.unshared(name).items():
                owner = companion.get_submodule(key.rpartition(".")[0])
                if id(owner) in tables:
                    tables[id(owner)].share_instead(state[key])
                else:
                    parameter.copy_(state[key])

    def _disentangled(self) -> dict[str, DisentangledEmbedding]:
        """The embeddings of this model that are a sum with a companion's, by name."""
        return {name: part for name, part in self.named_modules() if isinstance(part, DisentangledEmbedding)}

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """Hidden states, (T, D)."""
        hidden_TD: Tensor = self.encoder(self.encoder.with_global_tokens(batch, self.head_names), recorder)
        return hidden_TD

    def states(self, head: str, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """The hidden states that a head reads: those of all tokens, (T, D), or of one token per sequence, (B, D)."""
        summary = self.plans[head].summary
        if summary == "mean" or not self.reads_one_token(head):
            hidden_TD: Tensor = self(batch, recorder)
            if self.encoder.decodes_masks and head == "masked_lm":
                return self.encoder.forward_tokens(batch, torch.arange(batch.num_tokens, device=hidden_TD.device))
            return hidden_TD
        token_B = summarised_token(summary, batch)
        return self.encoder.forward_summary_token(
            self.encoder.with_global_tokens(batch, self.head_names), token_B, recorder
        )

    def reads_one_token(self, head: str) -> bool:
        """Whether a head reads exactly one token of every sequence."""
        return HEAD_KINDS[head] == "sequences" and self.plans[head].summary != "mean"

    def token_logits(self, head: str, hidden_MD: Tensor) -> Tensor:
        """States of selected tokens, (M, D), to (M, V) of a vocabulary head or (M, K) of another token head."""
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
        """The input of a sequence head, (B, D): the state of the first or last token, the mean, or the family's own
        function of all states."""
        plan = self.plans[head]
        if plan.read is not None:
            return plan.read(hidden_TD, batch)
        return summarise(plan.summary, self.before_mean(head, hidden_TD), batch)

    def before_mean(self, head: str, states: Tensor) -> Tensor:
        """What a sequence head takes the mean of, in the states' shape (..., D): the states, unless it maps them."""
        mapped = self.plans[head].before_mean
        return states if mapped is None else mapped(self.get_submodule(head), states)

    def logits(self, head: str, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """A head's logits for every token, (T, K), or sequence, (B, K), from all states or those `states` returns."""
        if HEAD_KINDS[head] == "sequences":
            return self.sequence_logits(head, self.summary(head, hidden_TD, batch))
        return self.token_logits(head, self.with_first(head, hidden_TD, batch))

    def with_first(self, head: str, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """The states that a token head reads, (T, D): the given ones, or their sums with each sequence's first."""
        if not self.plans[head].adds_first:
            return hidden_TD
        lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
        first_T = torch.repeat_interleave(batch.first_token_B, lengths_B, output_size=batch.num_tokens)
        return hidden_TD + hidden_TD.index_select(0, first_T)

    def projection(self, head: str, hidden_MD: Tensor) -> VocabularyProjection:
        """The logits of a vocabulary head for these states, (M, D), not yet computed."""
        module = self.get_submodule(head)
        assert isinstance(module, VocabularyHead), f"{head} has no vocabulary logits"
        return module.project(hidden_MD, self.encoder.word_embedding.weight)

    def masked_lm_logits(self, hidden_MD: Tensor) -> Tensor:
        """(M, D) to (M, V)."""
        return self.token_logits("masked_lm", hidden_MD)

    @property
    def architectures(self) -> list[str]:
        """The Hub's classes that load this model with all its heads, as written to config.json."""
        config = self.encoder.config
        known = {
            name: architecture
            for name in self.head_names
            if (architecture := self.plans[name].architecture) is not None
        }
        joint = config.joint_architectures.get(frozenset(known)) or config.joint_architectures.get(
            frozenset(self.head_names)
        )
        if joint is not None:
            return [joint]
        return list(known.values()) or [config.classes + config.base_class_ending]

    def hub_form(self) -> HubForm:
        """Names and layout of the weights in a Hub file."""
        config = self.encoder.config
        prefix = f"{config.hub_prefix}." if config.hub_prefix else ""
        names = prefixed(self.encoder.hub_names, "encoder.", prefix)
        if config.pooler_hub_name is not None:
            names["pooler.dense"] = config.pooler_hub_name
        for head in self.head_names:
            names |= prefixed(self.plans[head].hub_names, f"{head}.", "")
        copies = {prefix + copy: prefix + source for copy, source in self.encoder.hub_copies().items()}
        if any(isinstance(part, QuantisedModule) for part in self.modules()):
            copies = {}  # tensors that the Hub's class stores twice; it does not read quantised files
        layouts = [layout.below(prefix) for layout in self.encoder.tensor_layouts()]
        tied = {prefix + copy: prefix + source for copy, source in self.encoder.hub_tied().items()}
        return HubForm(names, layouts, tied={**tied, **self._tied(names)}, copies=copies)

    def _tied(self, names: dict[str, str]) -> dict[str, str]:
        """Tensors that Hub files may contain a second time, for the vocabulary projection."""
        tied: dict[str, str] = {}
        for head in self.head_names:
            decoder = self.plans[head].decoder
            if decoder is None:
                continue
            words = self.encoder.word_embedding
            (table,) = (name for name, part in self.named_modules() if part is words)
            sources = {"weight": f"{table}.weight", "bias": f"{head}.bias"}
            present = {kind: name for kind, name in sources.items() if name in self.state_dict()}
            hub = to_hub_names(present.values(), names)
            tied |= {f"{decoder}.{kind}": hub[name] for kind, name in present.items()}
        # If the head's own bias is the decoder's on the Hub, it is not a copy.
        return {name: source for name, source in tied.items() if name != source}


def _families_with(heads: Collection[str]) -> str:
    """The families that have these heads, as the end of a message; empty if there are none."""
    kinds: list[type[EncoderConfig]] = EncoderConfig.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
    families = [kind for kind in kinds if "family" in kind.model_fields]
    having = sorted(kind.model_type for kind in families if set(heads) <= kind().heads().keys())
    return f". Use a model of a family that has it: {', '.join(having)}" if having else ""


def share_embeddings(encoder: Encoder, source: Encoder) -> None:
    """Replace an encoder's embedding module with another's: for BERT and related families, the tables of words,
    positions and segments with their norm.

    Raises:
        UsageError: the two modules have different parameters or shapes.
    """
    name, part = _embedding_part(source)
    shapes, wanted = (
        {key: tuple(parameter.shape) for key, parameter in each.named_parameters()}
        for each in (part, encoder.get_submodule(name))
    )
    if shapes != wanted:
        differing = [key for key in wanted if shapes.get(key) != wanted[key]]
        raise UsageError(
            f"model.family {source.config.model_type!r} cannot share its embeddings with a smaller generator:"
            f" {', '.join(f'{name}.{key} is {shapes.get(key)} and {wanted[key]}' for key in differing)}; set"
            " objective.replaced_token.tie=none, or use a family with embedding_size, such as electra"
        )
    encoder.add_module(name, part)


def disentangle_embeddings(encoder: Encoder, source: Encoder) -> None:
    """Make an encoder's word embeddings the sum of the source's, without gradient, and of its own differences.

    Raises:
        UsageError: the tables have different shapes.
    """
    own, shared = encoder.word_embedding, source.word_embedding
    if own.weight.shape != shared.weight.shape:
        raise UsageError(
            f"model.family {encoder.config.model_type!r} cannot share its word embeddings with its generator: their"
            f" shapes are {tuple(own.weight.shape)} and {tuple(shared.weight.shape)}; set"
            " objective.replaced_token.generator_size=1 or objective.replaced_token.tie=none"
        )
    parent, _, name = encoder.word_module.rpartition(".")
    encoder.get_submodule(parent).add_module(name, DisentangledEmbedding(own, shared))


def with_whole_tables(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's weights by parameter, in which each difference is replaced by its sum with a companion's table."""
    whole = dict(weights)
    for name in (name for name in weights if name.endswith(DIFFERENCE)):
        table = name.removesuffix(DIFFERENCE) + ".weight"
        shared = (key for key in weights if key.startswith(COMPANIONS) and key.endswith(f".{table}"))
        whole[table] = whole.pop(name) + weights[next(shared)]
    return whole


def _embedding_part(encoder: Encoder) -> tuple[str, nn.Module]:
    words = encoder.word_embedding
    return next(
        (name, part) for name, part in encoder.named_children() if any(words is each for each in part.modules())
    )


def summarised_token(kind: Literal["first", "last"], batch: PackedBatch) -> Tensor:
    """The position of each sequence's first or last token, (B,)."""
    return batch.first_token_B if kind == "first" else batch.sequences.cu_seqlens_B1[1:].long() - 1


def summarise(kind: Summary, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
    """One state per sequence, (B, D), from the states of all tokens, or states that are already one per sequence."""
    if hidden_TD.shape[0] == batch.num_sequences:
        return hidden_TD
    if kind != "mean":
        return hidden_TD.index_select(0, summarised_token(kind, batch))
    lengths_B = batch.sequences.cu_seqlens_B1.diff().long()
    sequence_T = torch.repeat_interleave(lengths_B, output_size=batch.num_tokens)
    sums_BD = hidden_TD.new_zeros(lengths_B.numel(), hidden_TD.shape[1]).index_add(0, sequence_T, hidden_TD)
    return sums_BD / lengths_B[:, None]
