"""Model directories in the Hugging Face format, which `AutoModel.from_pretrained` loads.

File formats of `transformers` and `safetensors`, without their classes of `transformers`. Sibling model_files.py finds
models by name and reads their files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from bertkit.errors import DataError
from bertkit.files import read_json, write_text
from bertkit.models.conversion.pruning import PRUNED_HEADS, pruned_to_hub, shrink_to_pruned_heads
from bertkit.models.encoder import LARGEST_SIZE, EncoderConfig, require_values
from bertkit.models.encoder_decoder import DECODER_START, FORCED_FIRST
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bilstm import BilstmConfig
from bertkit.models.families.gpt_bert import GptBertConfig
from bertkit.models.families.gte import PUBLISHED as PUBLISHED_GTE
from bertkit.models.families.gte import GteConfig
from bertkit.models.families.jina_bert import published_family as published_jina_bert
from bertkit.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Config
from bertkit.models.families.mosaicbert import HUB_MARK as MOSAICBERT_MARK
from bertkit.models.families.mosaicbert import MosaicBertConfig
from bertkit.models.families.nomic_bert_moe import HUB_MARK as NOMIC_MOE_MARK
from bertkit.models.families.nomic_bert_moe import PUBLISHED as PUBLISHED_NOMIC_MOE
from bertkit.models.families.nomic_bert_moe import NomicBertMoeConfig
from bertkit.models.families.roberta import XLMRobertaConfig
from bertkit.models.families.static import StaticConfig
from bertkit.models.families.t5_encoder import PUBLISHED as PUBLISHED_T5
from bertkit.models.families.t5_encoder import T5EncoderConfig
from bertkit.models.families.t5_encoder import is_encoder as is_t5_encoder
from bertkit.models.feature_lstm import FeatureLstmConfig
from bertkit.models.files.model_files import (
    CONFIG_FILE,
    SAFETENSORS,
    encoder_directory,
    find_model,
    find_weights,
    is_model,
    read_weights,
    what_is_there,
    write_safetensors,
)
from bertkit.models.files.untrained import untrained_parts
from bertkit.models.headed import POOLER, HeadedModel
from bertkit.models.heads import HEAD_KINDS, LABELLED
from bertkit.models.labels import Labels
from bertkit.models.quantisation.int8 import TRAINING_REFUSED
from bertkit.models.quantisation.quantised import METHOD, QUANTISATION, restructure, with_plain_names
from bertkit.models.registry import FAMILIES
from bertkit.models.weights import WeightReport, compare_weights, load_weights
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import save_tokenizer

log = logging.getLogger(__name__)

WEIGHTS_FILE = SAFETENSORS
_MODEL = "model"
"""A run's model directory; its companion models are in sibling directories."""
_KINDS: dict[str, type[EncoderConfig]] = {
    **FAMILIES,
    BilstmConfig.model_type: BilstmConfig,
    FeatureLstmConfig.model_type: FeatureLstmConfig,
    StaticConfig.model_type: StaticConfig,
    "gpt_bert": GptBertConfig,
    PUBLISHED_GTE: GteConfig,
}
"""Every readable model_type: the families, two that no recipe pretrains and the Hub has no class for, and other
names of two families."""
_CODE = "auto_map"
"""Key of config.json with the classes of a checkpoint's own code; `transformers` runs it with `trust_remote_code`."""
_WRITTEN_ANEW = {
    *("architectures", "model_type", "vocab_size", "tie_word_embeddings", "dtype"),
    *("id2label", "label2id", "num_labels", "problem_type"),
    *("torch_dtype", "transformers_version", "_name_or_path", "use_cache", PRUNED_HEADS, _CODE),
}
"""Keys of config.json that are rewritten when a model is saved, or dropped."""
GENERATION_FILE = "generation_config.json"
"""File in which transformers 5 stores the first tokens of a target."""


def config_json(model: HeadedModel, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The contents of config.json."""
    config = model.encoder.config
    contents = {
        **({} if tokenizer is None else config.special_tokens(tokenizer)),
        **model.extras,
        "architectures": model.architectures,
        "model_type": config.model_type,
        **config.to_hub(),
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if LABELLED & set(model.head_names) or model.labels != Labels.unnamed():
        contents |= model.labels.to_hub()
    if tokenizer is not None and "pad" in tokenizer.roles:
        contents["pad_token_id"] = tokenizer.pad_id
    return {**contents, **model.encoder.to_hub(), **pruned_to_hub(model.encoder)}


def write_config(model: HeadedModel, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Write config.json."""
    text = json.dumps(config_json(model, tokenizer), indent=2, sort_keys=True)
    write_text(directory / CONFIG_FILE, text + "\n")


def save_model(model: HeadedModel, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files. Equal weights give byte-identical files.

    Raises:
        UsageError: two heads have one name in Hub files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_config(model, tokenizer, directory)
    state = {name: tensor.detach().cpu() for name, tensor in model.own_state_dict().items()}
    # Copies are cloned: safetensors refuses tensors that share memory.
    form = model.hub_form()
    form.check_distinct(state)
    tensors = {
        name: tensor.clone() if name in form.copies else tensor.contiguous()
        for name, tensor in form.to_hub(state).items()
    }
    write_safetensors(directory / WEIGHTS_FILE, tensors)
    # safetensors makes its files readable by the user alone; the other files follow the umask.
    (directory / WEIGHTS_FILE).chmod((directory / CONFIG_FILE).stat().st_mode)
    if tokenizer is not None:
        write_tokenizer(model, tokenizer, directory)


def write_tokenizer(
    model: HeadedModel, tokenizer: Tokenizer, directory: Path, *, max_tokens: int | None = None
) -> None:
    """Write the tokenizer's files, which include the maximum length (None: the model's) and whether segments differ."""
    limit = model.encoder.max_tokens if max_tokens is None else max_tokens
    save_tokenizer(tokenizer, directory, max_tokens=limit, token_types=model.encoder.config.reads_token_types)


def family_in(contents: Mapping[str, Any]) -> str | None:
    """The family of a config.json, None if it names none. One without a model_type, such as a published GPT-BERT's, is
    recognised by its class; published MosaicBERTs and JinaBERTs have BERT's model_type, jina-embeddings-v3 XLM-R's,
    a Nomic BERT with experts that of one without, T5's encoder that of T5."""
    given = contents.get("model_type")
    names = contents.get("architectures")
    if not given and isinstance(names, list):
        kinds = [kind for kind in FAMILIES.values() if any(str(name).startswith(kind.classes) for name in names)]
        given = max(kinds, key=lambda kind: len(kind.classes)).model_type if kinds else None
    if given == XLMRobertaConfig.model_type and contents.get("position_embedding_type") == "rotary":
        return JinaEmbeddingsV3Config.model_type
    if given == PUBLISHED_NOMIC_MOE and contents.get(NOMIC_MOE_MARK):
        return NomicBertMoeConfig.model_type
    if given == PUBLISHED_T5 and is_t5_encoder(contents):
        return T5EncoderConfig.model_type
    if given == BertConfig.model_type:
        return MosaicBertConfig.model_type if MOSAICBERT_MARK in contents else published_jina_bert(contents) or given
    return given if isinstance(given, str) else None


def _code_elsewhere(code: Any) -> dict[str, Any]:
    """An `auto_map` without the files next to config.json, which are not written with the model: only its entries that
    name a repository (`ORG/NAME--module.Class`). Empty if there are none."""
    found = {name: value for name, value in code.items() if "--" in str(value)} if isinstance(code, dict) else {}
    return {_CODE: found} if found else {}


def read_config(directory: Path) -> tuple[EncoderConfig, dict[str, Any]]:
    """The family's settings, and config.json itself.

    Raises:
        DataError: the file is damaged, its model type is unknown, or a setting is invalid.
    """
    path = directory / CONFIG_FILE
    if not path.exists():
        raise DataError(f"{path}: does not exist{what_is_there(directory)}")
    contents = read_json(path)
    kind = _KINDS.get(family_in(contents) or "")
    if kind is None:
        raise DataError(f"{path}: model_type is {contents.get('model_type')!r}; known are {', '.join(sorted(_KINDS))}")
    _check_types(path, contents)
    _labels(directory, contents)
    try:
        return kind.from_hub(contents), contents
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        said = (
            f"{key}: {first['msg']} (found {first['input']!r})" if key else first["msg"].removeprefix("Value error, ")
        )
        raise DataError(f"{path}: {said}") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    except (TypeError, AttributeError, KeyError, OverflowError, ZeroDivisionError) as error:
        # Families use some values before their settings are validated.
        raise DataError(f"{path}: a value is of the wrong type or size: {error!r}") from error


def _check_types(path: Path, contents: Mapping[str, Any]) -> None:
    """Check the keys that every family reads.

    Raises:
        DataError: a value has the wrong type or is out of range.
    """
    vocab_size, pad_id = contents.get("vocab_size"), contents.get("pad_token_id")
    if type(vocab_size) is not int or not 1 <= vocab_size <= LARGEST_SIZE:
        raise DataError(f"{path}: vocab_size is {vocab_size!r:.60}; expected a whole number from 1 to {LARGEST_SIZE:,}")
    if pad_id is not None and (type(pad_id) is not int or not 0 <= pad_id < vocab_size):
        raise DataError(
            f"{path}: pad_token_id is {pad_id!r:.60}; expected a whole number below vocab_size, {vocab_size}"
        )
    architectures = contents.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise DataError(f"{path}: architectures is {architectures!r:.60}; expected a list of names")


def load_model(
    directory: Path,
    *,
    heads: Collection[str] | None = None,
    labels: Labels | None = None,
    new: Collection[str] = (),
    is_trained: bool = False,
    dropout: Mapping[str, float] = MappingProxyType({}),
) -> tuple[HeadedModel, WeightReport]:
    """A model with its heads, in evaluation mode.

    Args:
        directory: as found by `find_model`.
        heads: which heads to build; None: those of the checkpoint. A head that the checkpoint does not have is
            initialised: a warning explains the consequence, and its weights are in the report's `missing`.
        labels: of the classification heads; None: those in config.json. A classifier with a different number of labels
            is initialised.
        new: heads that are expected to be initialised, without a warning.
        is_trained: whether the caller will train the model, including newly initialised weights.
        dropout: rates that replace those in config.json, by the names of the family's settings.

    Raises:
        DataError: a file is damaged, a weight of the encoder is missing, or a shape does not match.
        UsageError: the family has no such head.
    """
    directory = encoder_directory(directory)
    config, contents = read_config(directory)
    config = config.with_dropout(dropout)
    path = find_weights(directory)
    checkpoint_labels = _labels(directory, contents)
    found = read_weights(path, ignored=config.hub_ignored)
    tensors = config.from_older_files(found)
    # The code of a checkpoint in another form cannot read what is written in the newer one.
    code = _code_elsewhere(contents.get(_CODE)) if tensors.keys() == found.keys() else {}
    tensors = _without_zeros(_with_prefix(tensors, config), config, path)
    quantisation = _quantisation(directory, contents, new)
    if heads is None:
        heads = heads_in(config, contents, tensors if quantisation is None else with_plain_names(tensors))
    tensors = _without_outputs_of_others(tensors, config, contents, heads)
    _check_heads(directory, config, contents, heads)
    pad_id = contents.get("pad_token_id", config.default_pad_id)
    with torch.device("meta"):
        encoder = config.build(contents["vocab_size"], pad_id=config.default_pad_id if pad_id is None else pad_id)
        shrink_to_pruned_heads(encoder, contents, source=str(directory / CONFIG_FILE))
        model = HeadedModel(encoder, heads, labels=labels or checkpoint_labels)
        if quantisation is not None:
            try:
                restructure(model, tensors, model.hub_form().names, quantisation)
            except DataError as error:
                raise DataError(f"{directory / CONFIG_FILE}: {error}") from error
    generation = read_json(directory / GENERATION_FILE) if (directory / GENERATION_FILE).is_file() else {}
    told = {key: generation[key] for key in (DECODER_START, FORCED_FIRST) if generation.get(key) is not None}
    kept = {key: value for key, value in contents.items() if key not in _WRITTEN_ANEW}
    model.extras = told | kept | code
    form = model.hub_form()
    names = form.hub_names(model.state_dict())
    may_differ = [name for name in names if labels is not None and name.partition(".")[0] in LABELLED]
    # Compare before allocating memory: config.json can claim any size.
    report = compare_weights(model, tensors, form, source=str(path), may_differ=may_differ)
    backbone = [names[name] for name in names if name.startswith("encoder.")]
    lacking = [name for name in report.missing if name in set(backbone)]
    if lacking:
        there = ", ".join(report.unexpected[:3])
        raise DataError(
            f"{path}: the encoder lacks {len(lacking)} weights, such as {', '.join(lacking[:3])}"
            + (f"; names in the file that the model does not have are {there}" if there else "")
        )
    model.to_empty(device="cpu")
    with torch.no_grad():
        load_weights(model, tensors, form, report)
    initialised = set(report.newly_initialised)
    model.initialise(seed=0, only={name for name, hub_name in names.items() if hub_name in initialised})
    unexpected = initialised - {hub_name for name, hub_name in names.items() if name.partition(".")[0] in new}
    replaced = report.reinitialised
    for line in untrained_parts(names, unexpected, source=str(path), is_trained=is_trained, replaced=replaced):
        log.log(logging.INFO if is_trained else logging.WARNING, "%s", line)
    return model.eval(), report


def _check_heads(directory: Path, config: EncoderConfig, contents: Mapping[str, Any], heads: Collection[str]) -> None:
    """Raise DataError if a key of config.json that one of these heads reads makes it a different one."""
    try:
        for head in heads:
            require_values(contents, config.hub_fixed_by_head.get(head, {}), where=f" for the head {head}")
    except ValueError as error:
        raise DataError(f"{directory / CONFIG_FILE}: {error}") from error


def _quantisation(directory: Path, contents: Mapping[str, Any], new: Collection[str]) -> Mapping[str, Any] | None:
    """The settings of quantised weights in config.json; None if the weights are floats.

    Raises:
        DataError: they were quantised by other software, or a head is to be trained on them.
    """
    found = contents.get(QUANTISATION)
    if found is None:
        return None
    path = directory / CONFIG_FILE
    method = found.get("quant_method") if isinstance(found, dict) else found
    if not isinstance(found, dict) or method != METHOD:
        raise DataError(
            f"{path}: {QUANTISATION} has quant_method {method!r}; only {METHOD!r}, which `bertkit export` writes, can"
            " be read; use the model that it was quantised from"
        )
    if new:
        refuse_quantised(directory, contents)
    return found


def refuse_quantised(directory: Path, contents: Mapping[str, Any]) -> None:
    """Raise DataError if the model in this directory cannot be trained; `contents` is its config.json."""
    if QUANTISATION in contents:
        raise DataError(f"{directory}: {TRAINING_REFUSED}")


def load_companions(model: HeadedModel, directory: Path) -> None:
    """Load a model's companions from an earlier run's directory: RUN/generator next to RUN/model.

    Weights that a companion shares with the model are unchanged, and so are companions without a directory there.

    Raises:
        DataError: a companion there has different settings.
    """
    for name, companion in model.named_companions().items():
        beside = directory.parent / name
        if directory.name != _MODEL or not is_model(beside):
            continue
        loaded, _ = load_model(beside, heads=companion.head_names)
        if loaded.encoder.config != companion.encoder.config:
            found, wanted = loaded.encoder.config.model_dump(), companion.encoder.config.model_dump()
            differing = [
                f"{key} is {found.get(key)}, not {wanted[key]}" for key in wanted if found.get(key) != wanted[key]
            ]
            raise DataError(f"{beside}: not the recipe's {name}: {', '.join(differing)}")
        model.take_companion(name, loaded.state_dict())


def check_vocabulary(model: HeadedModel, tokenizer: Tokenizer, *, source: str) -> None:
    """Raise DataError if the tokenizer has ids beyond the embedding table. A table with more rows is common; it is only
    logged."""
    rows = model.encoder.vocab_size
    if tokenizer.vocab_size > rows:
        raise DataError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} entries, the model's embedding table {rows} rows; they"
            " do not belong together"
        )
    if tokenizer.vocab_size < rows:
        log.info("%s: the embedding table has %d rows, the tokenizer %d entries", source, rows, tokenizer.vocab_size)


def heads_in(config: EncoderConfig, contents: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The heads of a checkpoint; `pooler` if it has only a pooler.

    Several heads can have the same names on the Hub (`classifier.weight`), and some have no weights of their own. In
    these cases `architectures` decides.
    """
    plans = config.all_heads()
    found_names = {head: _present(plan.hub_names.values(), tensors) for head, plan in plans.items()}
    named = _named_heads(config, contents)
    heads = []
    for head, names in found_names.items():
        others = set().union(*(found_names[other] for other in plans if other != head))
        is_there = bool(names) or not plans[head].hub_names
        can_be_no_other = bool(names) and not names & others
        if can_be_no_other or (is_there and head in named):
            heads.append(head)
    if not heads and config.pooler_hub_name is not None and _present([config.pooler_hub_name], tensors):
        return (POOLER,)
    return tuple(heads)


def heads_of(directory: Path) -> tuple[str, ...]:
    """The heads of a checkpoint, see `heads_in`.

    Raises:
        DataError: a file is damaged.
    """
    config, contents = read_config(directory)
    tensors = config.from_older_files(read_weights(find_weights(directory), ignored=config.hub_ignored))
    return heads_in(config, contents, _with_prefix(tensors, config))


def _present(modules: Collection[str], tensors: Mapping[str, Tensor]) -> set[str]:
    return {f"{name}.{leaf}" for name in modules for leaf in ("weight", "bias") if f"{name}.{leaf}" in tensors}


def _named_heads(config: EncoderConfig, contents: Mapping[str, Any]) -> set[str]:
    former = config.former_classes
    architectures = {
        config.classes + name.removeprefix(former) if former and name.startswith(former) else name
        for name in contents.get("architectures") or ()
    }
    heads = {head for head, plan in config.heads().items() if plan.architecture in architectures}
    joint = [members for members, name in config.joint_architectures.items() if name in architectures]
    return heads.union(*joint)


def _without_outputs_of_others(
    tensors: dict[str, Tensor], config: EncoderConfig, contents: Mapping[str, Any], heads: Collection[str]
) -> dict[str, Tensor]:
    """Without the outputs of a checkpoint's head for tokens that a head for sequences would take for its own, or the
    other way round, since both have the same name."""
    named = _named_heads(config, contents)
    outputs = {head: plan.hub_names.get("output") for head, plan in config.all_heads().items()}
    shared = {
        name
        for other in named
        for head in outputs.keys() & set(heads) - named
        if (name := outputs[head]) == outputs[other] and name and HEAD_KINDS[head] != HEAD_KINDS[other]
    }
    dropped = _present(shared, tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}


def _labels(directory: Path, contents: Mapping[str, Any]) -> Labels:
    try:
        return Labels.from_hub(contents)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{directory / CONFIG_FILE}: labels: {error}") from error


def _without_zeros(tensors: dict[str, Tensor], config: EncoderConfig, path: Path) -> dict[str, Tensor]:
    """The tensors without those that must be zero; DataError if one of these is not."""
    for name in config.hub_zero:
        if name in tensors and bool(tensors[name].any()):
            raise DataError(f"{path}: {name} is not zero; a model with a separate bias for each word is not supported")
    return {name: tensor for name, tensor in tensors.items() if name not in config.hub_zero}


def _with_prefix(tensors: dict[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Add the prefix of models with a head, which files of a bare encoder omit from the names."""
    with torch.device("meta"):
        encoder = config.build(1)
        form = HeadedModel(encoder).hub_form()
    known = set(form.hub_names(f"encoder.{name}" for name in encoder.state_dict()).values())
    if known & set(tensors):
        return tensors
    if config.pooler_hub_name is not None:
        known |= {f"{config.pooler_hub_name}.{leaf}" for leaf in ("weight", "bias")}
    with_prefix = {f"{config.hub_prefix}.{name}": name for name in tensors}
    whole = {name: with_prefix.get(name, "") for name in known}
    renamed = {bare: name for name, bare in whole.items() if bare}
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "find_model",
    "load_companions",
    "load_model",
    "save_model",
]
