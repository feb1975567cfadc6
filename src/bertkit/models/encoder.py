"""The interface of every encoder family: settings, a forward pass over a packed batch, heads, Hub names.

A family is one file: a configuration that reads and writes the family's config.json and plans its heads, an encoder
built from layers.py, and a table of the Hub's names for its weights. registry.py lists the families.

Shapes: T packed tokens, D width, E width of the embeddings, V vocabulary.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.data.random import derived_seed
from bertkit.models.heads import HeadPlan, Pooler, auxiliary_heads
from bertkit.models.layers import NORMS, Activation
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.weights import Names, TensorLayout
from bertkit.settings import Settings
from bertkit.text.tokenizer import Tokenizer

_SCALED = ("hidden_size", "intermediate_size", "num_attention_heads")
"""Settings that make a model narrower; the width of the embeddings is unchanged."""


LARGEST_SIZES = {"_layers": 512, "_num": 512, "_networks": 64, "_size": 1 << 17, "_width": 1 << 17}
"""The largest value of a field with this ending, several times that of any published model. They are checked before
anything is built, since the sizes in a config.json or a recipe cost time and memory even without weights."""
LAYER_NAME = re.compile(r"^encoder\.layers\.(\d+)\.")
"""The beginning of the names of a layer's parameters, with the layer's number."""
LARGEST_SIZE = 1 << 24
"""The largest value of any other field, and of the vocabulary size."""


def in_layer(name: str, number: Callable[[int], int]) -> str:
    """A parameter's name in another layer, whose number depends on its own; the same name if it is in no layer."""
    return LAYER_NAME.sub(lambda found: f"encoder.layers.{number(int(found[1]))}.", name)


ClassifierDropout = Annotated[
    float | None, Field(ge=0, lt=1, description="Dropout before a task's classifier; null: hidden_dropout_prob.")
]


class EncoderConfig(Settings, ABC):
    """A family's settings; the size of the vocabulary comes from the tokenizer.

    Fields have the same names in all families (`hidden_size`, `num_hidden_layers`, ...); `hub_keys` maps those that
    have other names in the family's config.json.
    """

    model_type: ClassVar[str]
    """The Hub's name for the family; that of recipes, the default of `family`, unless it has another."""

    hub_prefix: ClassVar[str]
    """Name of the encoder in the Hub's models with a head; empty if they have its parts directly."""

    classes: ClassVar[str]
    """Prefix of the names of the Hub's classes."""

    former_classes: ClassVar[str] = ""
    """This prefix in files of before the Hub had these classes, if it was another."""

    base_class_ending: ClassVar[str] = "Model"
    """Ending of the name of the Hub's class without a head."""

    draws_by_fan_in: ClassVar[bool] = False
    """Whether `draw` gives linear maps a standard deviation proportional to 1 / sqrt(inputs)."""
    live_fields: ClassVar[frozenset[str]] = frozenset()
    """Settings that may change during training, since no weight's shape depends on them."""
    tiled_parts: ClassVar[Mapping[str, int] | None] = None
    """For `tiled` (models/conversion/tiling.py): linear maps that consist of several matrices stacked by rows, and how
    many; None if a family's weights cannot be tiled."""
    joint_architectures: ClassVar[Mapping[frozenset[str], str]] = {}
    """The Hub's classes with several heads."""

    pooler_hub_name: ClassVar[str | None] = None
    """The Hub's module of the pooler's linear layer; None if the family has no pooler."""

    hub_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of config.json that differ from the field's name."""

    hub_defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that are missing in a config.json, if the Hub's class has another default than the field."""

    hub_fixed: ClassVar[Mapping[str, Any]] = {"is_decoder": False, "add_cross_attention": False}
    """Keys of config.json that must have this value; with any other it is a different model."""

    hub_fixed_by_head: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The same for keys that only these heads read."""

    hub_ignored: ClassVar[tuple[str, ...]] = (".position_ids", ".token_type_ids")
    """Endings of names in weight files that are not weights."""

    hub_zero: ClassVar[tuple[str, ...]] = ()
    """Tensors of weight files that must be zero; otherwise it is a different model."""

    is_encoder_decoder: ClassVar[bool] = False
    """Whether there is also a decoder, for targets that follow the sources that the encoder reads."""

    causal_attention: ClassVar[bool] = True
    """Whether single sequences of a batch can be read from left to right only."""

    reads_order: ClassVar[bool] = False
    """Whether it reads the order of a batch, which decides what each token attends to (`Samples.order_T4`)."""

    reads_backward: ClassVar[bool] = False
    """Whether a separate part of the model reads text from right to left; its states are the second half of each
    state."""

    default_pad_id: ClassVar[int] = 0
    """The padding id if a config.json does not have one."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_settings: Any) -> None:
        if "family" in cls.__annotations__ and "model_type" not in vars(cls):
            cls.model_type = cls.model_fields["family"].default

    @model_validator(mode="after")
    def _sizes_are_bounded(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            most = next((most for ending, most in LARGEST_SIZES.items() if name.endswith(ending)), LARGEST_SIZE)
            if isinstance(value, int) and value > most:
                raise ValueError(f"{name} is {value:,}; at most {most:,} can be built")
        return self

    @abstractmethod
    def build(self, vocab_size: int, *, pad_id: int = 0) -> Encoder:
        """The encoder with uninitialised weights."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model can read: no limit for families without positions of their own."""
        return int(getattr(self, "max_position_embeddings", sys.maxsize))

    @property
    def reads_token_types(self) -> bool:
        """Whether segments are distinguished."""
        return bool(getattr(self, "type_vocab_size", 1) > 1)

    @abstractmethod
    def heads(self) -> dict[str, HeadPlan]:
        """The family's heads, by their names in `bertkit.models.heads.HEAD_KINDS`."""

    def all_heads(self) -> dict[str, HeadPlan]:
        """The family's heads, and those common to all families that it does not override."""
        own = self.heads()
        shared = auxiliary_heads(pooled=self.pooler_hub_name is not None)
        return own | {name: plan for name, plan in shared.items() if name not in own}

    def generator(self, size: float, depth: float = 1.0, *, mask_decoder: bool = False) -> Self:
        """The settings of a smaller model for replaced-token detection (Clark et al. 2020, arXiv:2003.10555, table 6).

        Args:
            size: width, feed-forward width and heads as a share of this model's; 1/4 to 1/2 in the paper.
            depth: number of layers as a share of this model's; 1 in the paper.
            mask_decoder: whether it predicts with DeBERTa's enhanced mask decoder.

        Raises:
            ValueError: if the scaled sizes do not fit together, or the family has no such decoder.
        """
        if mask_decoder:
            raise ValueError(
                f"model.family {self.model_type!r} has no enhanced mask decoder, only deberta and deberta-v2"
            )
        settings = self.model_dump()
        shares = dict.fromkeys(_SCALED, size) | {"num_hidden_layers": depth}
        scaled = {name: max(1, round(settings[name] * share)) for name, share in shares.items() if name in settings}
        return type(self).model_validate({**settings, **scaled})

    def build_pooler(self, width: int) -> nn.Module:
        """The module before pooled heads."""
        return Pooler(width)

    def special_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Keys of config.json for a tokenizer's special tokens, if the Hub's classes need them."""
        return {}

    @abstractmethod
    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Draw a weight in place; biases and norms are set elsewhere."""

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in a config.json.

        Raises:
            ValueError: an unsupported model, or an invalid value.
        """
        require_values(contents, cls.hub_fixed)
        keys = {name: cls.hub_keys.get(name, name) for name in cls.model_fields if name != "family"}
        known = {name: contents[key] for name, key in keys.items() if key in contents}
        return cls.model_validate({**cls.hub_defaults, **known}, strict=False)

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file with the family's current names and forms on the Hub, if there were others before."""
        return tensors

    def with_dropout(self, rates: Mapping[str, float]) -> Self:
        """The settings with other dropout rates, given by name.

        Raises:
            ValueError: there is no such rate.
        """
        known = [name for name in type(self).model_fields if "dropout" in name]
        for name in rates:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise ValueError(f"{name}: the family {self.model_type} has no such dropout rate; {has}")
        return self.model_copy(update=dict(rates))

    def to_hub(self) -> dict[str, Any]:
        """The settings as keys of config.json."""
        return {
            self.hub_keys.get(name, name): value
            for name, value in self.model_dump(mode="json", exclude={"family"}).items()
        }


Initializer = Annotated[
    Literal["family", "normal"],
    Field(
        description="How initial weights are drawn: as in the family's released code, or all from an untruncated"
        " normal distribution with standard deviation initializer_range."
    ),
]


def require_values(contents: Mapping[str, Any], fixed: Mapping[str, Any], *, where: str = "") -> None:
    """Raise ValueError if a key of config.json has another value than this; `where`: what reads it, for the message."""
    for key, wanted in fixed.items():
        if contents.get(key, wanted) != wanted:
            raise ValueError(f"{key} is {contents[key]!r:.60}; only {wanted!r} is supported{where}")


def require_whole_heads(width: int, heads: int, field: str = "num_attention_heads") -> None:
    """Raise ValueError if the width cannot be cut into heads, whose number is in this field."""
    if width % heads:
        raise ValueError(f"hidden_size ({width}) must be a multiple of {field} ({heads})")


class TransformerConfig(EncoderConfig):
    """Settings of nearly every family; defaults are BERT base's."""

    hidden_size: int = Field(768, ge=1, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(12, ge=1, description="Number of layers.")
    num_attention_heads: int = Field(12, ge=1, description="Attention heads per layer; must divide hidden_size.")
    intermediate_size: int = Field(3072, ge=1, description="Width of the feed-forward layer.")
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(512, ge=1, description="Maximum sequence length in tokens.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")
    hidden_act: Activation = Field("gelu", description="Activation of the feed-forward layers and the masked-LM head.")

    truncates_weights: ClassVar[bool] = True
    """Whether initial weights are drawn from a truncated normal distribution."""

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """BERT's normal, truncated at two standard deviations unless the family or its `initializer` does not truncate
        it."""
        if not self.truncates_weights or getattr(self, "initializer", "family") == "normal":
            nn.init.normal_(parameter, std=self.initializer_range, generator=generator)
            return
        std = self.initializer_range
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)

    def model_post_init(self, _context: Any) -> None:
        require_whole_heads(self.hidden_size, self.num_attention_heads)


class BertLikeConfig(TransformerConfig):
    """Settings common to BERT and closely related families."""

    type_vocab_size: int = Field(2, ge=1, description="Number of segment types.")
    layer_norm_eps: float = Field(1e-12, gt=0, description="Epsilon added to the variance in layer normalisation.")

    hub_fixed: ClassVar[Mapping[str, Any]] = {**EncoderConfig.hub_fixed, "position_embedding_type": "absolute"}

    @property
    def task_dropout(self) -> float:
        """The dropout rate before a task's classifier: `classifier_dropout` if the family has it and it is not null."""
        rate: float | None = getattr(self, "classifier_dropout", None)
        return self.hidden_dropout_prob if rate is None else rate


class Encoder(nn.Module, ABC):
    """A stack of layers over packed tokens. It contains only parameters; fixed tables are computed in `forward`."""

    hub_names: ClassVar[Names]
    """The Hub's name of each module, by its name here; `{n}` stands for a layer's number."""

    word_module: ClassVar[str] = "embeddings.word"
    """The module of the word embeddings."""

    has_hub_class: ClassVar[bool] = True
    """Whether a class of the Hub reads its weights; models without one are only kept in checkpoints."""

    caches_keys: ClassVar[bool] = False
    """Whether its causal attention supports `bertkit.models.attention.key_value_cache`: queries, keys and values of a
    token depend only on its state and its position."""

    scores_all_tokens: ClassVar[bool] = False
    """For companion models: whether the additional pass without gradients computes distributions for every token of a
    batch rather than only for the predicted ones."""

    hashed_tables: ClassVar[tuple[str, ...]] = ()
    """Parameters whose rows are found from the numbers of words, and so belong to one vocabulary."""

    padded_tables: ClassVar[tuple[str, ...]] = ()
    """Tables in which the row of the padding starts as zeros."""

    recomputes_layers: ClassVar[bool] = True
    """Whether a layer can be recomputed from the inputs of its `forward` alone."""

    decodes_masks: bool = False
    """Whether `forward_tokens` computes the states that predict masked tokens in another way than `forward`."""

    layers_run_once: ClassVar[bool] = True
    """Whether a pass calls each layer exactly once, rather than its parts or as often as the batch needs. Its weights
    can then be gathered when it is called (`engine.shard`)."""

    def __init__(self, config: EncoderConfig, *, width: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.width = width
        self.vocab_size = vocab_size

    def reconfigure(self, config: EncoderConfig) -> None:
        """Switch to a configuration in which only keys of `config.live_fields` differ; the weights are unchanged."""
        self.config = config

    @property
    def word_embedding(self) -> nn.Embedding:
        """V x E; a language-model head is tied to it."""
        words: nn.Embedding = attrgetter(self.word_module)(self)
        return words

    @property
    def embedding_width(self) -> int:
        return self.word_embedding.embedding_dim

    @property
    def padding_id(self) -> int:
        """The padding id that it was built with, from which some families count positions."""
        built_with = getattr(self, "pad_id", self.config.default_pad_id)
        return int(self.to_hub().get("pad_token_id", built_with))

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model can read."""
        return self.config.max_tokens

    @abstractmethod
    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """The last layer's hidden states, (T, D)."""

    def finish(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        """The last layer's states, through the norm behind it if the family has one as `norm`. Point, if so:
        `ln_final.hook_normalized`."""
        norm = getattr(self, "norm", None)
        return hidden_TD if norm is None else scope.tap("ln_final.hook_normalized", norm(hidden_TD))

    def forward_carried(
        self, batch: PackedBatch, state: Mapping[str, Tensor] | None, recorder: Recorder | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `forward`, for sequences that continue others; also returns the state for those that follow.

        Args:
            state: returned by `forward_carried` for the preceding sequences, each tensor with B rows; None: no such.

        Returns:
            Hidden states, (T, D), and tensors by name with B rows each; none for a family that carries no state.
        """
        hidden_TD: Tensor = self(batch, recorder)
        return hidden_TD, {}

    def forward_summary_token(self, batch: PackedBatch, token_B: Tensor, recorder: Recorder | None = None) -> Tensor:
        """The last layer's hidden states of one token per sequence, (B, D), for a head that reads no others.

        Args:
            token_B: positions of these tokens among the packed ones.
        """
        hidden_TD: Tensor = self(batch, recorder)
        return hidden_TD.index_select(0, token_B)

    def forward_tokens(self, batch: PackedBatch, index_M: Tensor) -> Tensor:
        """The last layer's hidden states of the tokens `index_M`, (M, D), for heads that read no others.

        A family whose layers mix tokens only in attention computes the rest of its last layer only for these.
        """
        hidden_TD: Tensor = self(batch)
        return hidden_TD.index_select(0, index_M)

    def selected_token_modules(self) -> Iterable[nn.Module]:
        """The modules that `forward_tokens` runs only on the selected tokens."""
        return ()

    @property
    def summary_token_layer(self) -> nn.Module | None:
        """The layer in which `forward_summary_token` computes keys and values for all tokens and everything else for
        one token per sequence."""
        return None

    def recomputable_layers(self) -> Iterable[nn.Module]:
        """The layers, shared ones once, if the family `recomputes_layers`."""
        stacks = (getattr(self, name, None) for name in ("layers", "decoder_layers") if self.recomputes_layers)
        return [layer for stack in stacks if isinstance(stack, nn.ModuleList) for layer in stack]

    def executed_modules(self) -> Iterable[nn.Module]:
        """The modules that tokens pass through, repeated as often as they do."""
        return (self,)

    def with_global_tokens(self, batch: PackedBatch, heads: Sequence[str]) -> PackedBatch:
        """The batch with the global tokens that these heads need, for families that have any."""
        return batch

    def untrained_copies(self, heads: Sequence[str]) -> Names:
        """Modules that training of these heads alone leaves as they are and that now equal another module, with its
        name."""
        return {}

    @torch.no_grad()
    def renew_copies(self, copies: Names) -> None:
        """Copy each of these modules again from the one that it equalled, as that is now."""
        for name, origin in copies.items():
            self.get_submodule(name).load_state_dict(self.get_submodule(origin).state_dict())

    def to_hub(self) -> dict[str, Any]:
        """Keys of config.json that belong to the encoder but are not settings."""
        return {"vocab_size": self.vocab_size}

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        """Tensors that have another form on the Hub, by their names there, without the encoder's prefix."""
        return ()

    def hub_copies(self) -> Names:
        """Tensors that are separate in the Hub's class and shared here, with the name of the shared one."""
        return {}

    def hub_tied(self) -> Names:
        """Tensors that a file from the Hub may contain twice, with the name of the shared one."""
        return {}

    def read_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Take from the vocabulary what the family keeps in addition to weights."""
        return

    @torch.no_grad()
    def finish_initialisation(self) -> None:
        """Set what a family sets after all weights are drawn."""
        for name in self.padded_tables:
            self.get_parameter(f"{name}.weight")[self.padding_id].zero_()


def initialise(module: nn.Module, config: EncoderConfig, *, seed: int, only: Collection[str] | None = None) -> None:
    """Initialise weights as the family draws them, biases to zero, and norms to one.

    Each tensor has its own generator, seeded by the seed and its name; adding a head or a layer therefore does not
    change the others. `only` names the parameters to initialise; None: all.
    """
    norms = {
        name: getattr(part, "initial_weight", 1.0) for name, part in module.named_modules() if isinstance(part, NORMS)
    }
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            owner, _, kind = name.rpartition(".")
            if only is not None and name not in only:
                continue
            if owner in norms:
                parameter.fill_(norms[owner] if kind == "weight" else 0.0)
            elif kind == "bias":
                parameter.zero_()
            else:
                generator = torch.Generator(parameter.device).manual_seed(derived_seed(seed, name) >> 1)
                config.draw(name, parameter, generator)
