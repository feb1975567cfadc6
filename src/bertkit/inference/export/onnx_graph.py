"""A model as an ONNX graph with float or int8 weights, and its outputs in onnxruntime.

torch.onnx over torch.export; inputs have the names used by `transformers`. Every output has bertkit's name; states and
a single head's logits are there again under the names that optimum and sentence-transformers read. The graph reads
padded rectangles, because ONNX Runtime has no packed attention. Padding follows the tokens, is masked in attention, and
has the tokenizer's id of padding, by which ESM-2 counts a sequence's tokens. Batch size and length are dynamic.

Shapes: B sequences, S longest sequence, T = B * S cells, D width, K outputs of a head, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.data.batch import AttentionBlock, PackedBatch, PackedSequences
from bertkit.errors import UsageError
from bertkit.files import naming
from bertkit.inference.export.agreement import ProbeRow
from bertkit.models.headed import POOLER, HeadedModel
from bertkit.models.heads import HEAD_KINDS

# Before onnxruntime is imported, which would report its use to Microsoft.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

GRAPH_FILE = "model.onnx"
INT8_GRAPH_FILE = "onnx/model_qint8_avx2.onnx"
"""Where the Hub's tools look for a graph with int8 weights for processors with AVX2."""
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
FAMILIES = frozenset(
    {
        *("albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie"),
        *("esm", "eurobert", "gpt2", "gte", "jina-bert", "jina-bert-qk", "jina_embeddings_v3", "megatron-bert"),
        *("modernbert", "mosaicbert", "mpnet", "neobert", "nomic_bert", "openai-gpt", "roberta"),
        *("gemma3_text", "llama", "qwen2", "qwen3"),
        *("roberta-prelayernorm", "ultrabert", "xlm-roberta", "xlm-roberta-xl"),
    }
)
"""Families whose graph holds for every length and does not read padding. XLNet's distances, BigBird's blocks and
Longformer's global tokens are computed in Python for each batch, and in MobileBERT words read their neighbours, padding
included."""

HIDDEN = "hidden"

_LARGEST_FILE_BYTES = 2**31
"""Protobuf's limit; larger weights are stored in a separate file next to the graph."""


class PaddedModel(nn.Module):
    """The model with inputs (B, S): ids, a mask that is 1 at tokens, and segment types if it reads them."""

    def __init__(self, model: HeadedModel) -> None:
        super().__init__()
        self.model = model
        self.names = output_names(model)
        self.repeated = repeated_outputs(model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> list[Tensor]:
        """`hidden` (B, S, D); each head's logits, (B, S, K) or (B, K); `pooler` (B, D). Then `repeated_outputs`, of
        which those of one column are (B, S)."""
        sequences, length = input_ids.shape
        is_token_BS = attention_mask.bool()
        device = input_ids.device
        block = AttentionBlock(sequences, length, is_token_BS[:, None, None, :])
        starts_B1 = torch.arange(sequences + 1, device=device) * length
        types_BS = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        batch = PackedBatch(
            ids_T=input_ids.reshape(-1),
            token_types_T=types_BS.reshape(-1),
            positions_T=torch.arange(length, device=device)[None].expand(sequences, length).reshape(-1),
            sequences=PackedSequences(starts_B1, length, (block,), None, None),
            targets={},
            labels={},
        )
        hidden_TD = self.model(batch)
        hidden_BSD = hidden_TD.view(sequences, length, -1)
        found = {name: self._output(name, hidden_TD, hidden_BSD, is_token_BS) for name in self.names}
        again = [
            # A clone, because a tensor is one output.
            found[name].clone() if column is None else found[name][..., column]
            for name, column in self.repeated.values()
        ]
        return [*found.values(), *again]

    def _output(self, name: str, hidden_TD: Tensor, hidden_BSD: Tensor, is_token_BS: Tensor) -> Tensor:
        if name == HIDDEN:
            return hidden_BSD
        if name == POOLER:
            pooled_BD: Tensor = self.model.get_submodule(POOLER)(hidden_BSD[:, 0])
            return pooled_BD
        if HEAD_KINDS[name] == "sequences":
            return self.model.sequence_logits(name, self._summary(name, hidden_BSD, is_token_BS))
        if self.model.plans[name].adds_first:
            hidden_TD = (hidden_BSD + hidden_BSD[:, :1]).flatten(0, 1)
        logits_TK = self.model.token_logits(name, hidden_TD)
        return logits_TK.view(*hidden_BSD.shape[:2], -1)

    def _summary(self, head: str, hidden_BSD: Tensor, is_token_BS: Tensor) -> Tensor:
        """As `models.headed.summarise`, for padded rows."""
        where = self.model.plans[head].summary
        if where == "first":
            return hidden_BSD[:, 0]
        lengths_B = is_token_BS.sum(dim=1)
        if where == "last":
            index_B1D = (lengths_B - 1)[:, None, None].expand(-1, 1, hidden_BSD.shape[2])
            return hidden_BSD.gather(1, index_B1D)[:, 0]
        mapped_BSD = self.model.before_mean(head, hidden_BSD)
        return (mapped_BSD * is_token_BS[..., None]).sum(dim=1) / lengths_B[:, None]


def output_names(model: HeadedModel) -> list[str]:
    """The graph's outputs under bertkit's names, in order."""
    return [HIDDEN, *model.head_names, *([POOLER] if model.has_pooler else [])]


def repeated_outputs(model: HeadedModel) -> dict[str, tuple[str, int | None]]:
    """Outputs that optimum and others read: their names there, our names, and the column (None: the whole output)."""
    found: dict[str, tuple[str, int | None]] = {"last_hidden_state": (HIDDEN, None)}
    if len(model.head_names) == 1:
        (head,) = model.head_names
        found |= {"start_logits": (head, 0), "end_logits": (head, 1)} if head == "span" else {"logits": (head, None)}
    return found


def check_exportable(model: HeadedModel) -> None:
    """Raises:
    UsageError: the packages are not installed, or the family cannot be exported as a graph.
    """
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise UsageError(f"--format onnx needs {', '.join(lacking)}; install the extra: pip install 'bertkit[onnx]'")
    kind = model.encoder.config.model_type
    if kind not in FAMILIES:
        raise UsageError(
            f"--format onnx: a graph of {kind} would be wrong for some texts (other lengths, or padding);"
            f" families that can be exported are {', '.join(sorted(FAMILIES))}. Export as --format hf instead"
        )


def write_graph(model: HeadedModel, path: Path) -> None:
    """Write the graph; large weights go into a file next to it."""
    padded = PaddedModel(model).eval()
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if model.encoder.config.reads_token_types else [])]
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=_longest(model))}
    with warnings.catch_warnings(), _errors_only("torch.onnx"), torch.no_grad():
        # These warnings concern the exporter's internals.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            padded,
            # A separate tensor for each: the same tensor three times would become one input.
            tuple(torch.ones(2, 3, dtype=torch.int64) for _ in names),
            input_names=names,
            output_names=[*padded.names, *padded.repeated],
            dynamic_shapes=tuple(dict(free) for _ in names),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        parameters_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        with naming(path):
            program.save(str(path), external_data=parameters_bytes >= _LARGEST_FILE_BYTES // 2)


def write_int8_graph(model: HeadedModel, path: Path) -> None:
    """Write the graph with int8 weights, one scale per output; activations are quantised dynamically.

    Weights use 7 bits: AVX2's instruction for bytes adds two products in 16 bits, which overflows with 8 bits. The
    graph is one file of at most 2 GB.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name("float.onnx")
    write_graph(model, whole)
    graph = onnx.load(str(whole))
    # Shapes that the exporter recorded before it transposed the weights.
    del graph.graph.value_info[:]
    _part_shared_weights(graph.graph)
    with naming(path), _errors_only(""):
        quantize_dynamic(graph, str(path), per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    for left in path.parent.glob(f"{whole.name}*"):
        left.unlink()


def _part_shared_weights(graph: Any) -> None:
    """Give each product its own copy of a tensor that other nodes also read, such as the table of words. Quantisation
    transposes a product's weights in place."""
    readers = Counter(name for node in graph.node for name in node.input)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for place, name in enumerate(node.input):
            if node.op_type == "Gemm" and name in tensors and readers[name] > 1:
                own = graph.initializer.add()
                own.CopyFrom(tensors[name])
                own.name = f"{name}_of_{node.name or node.output[0]}"
                node.input[place] = own.name


def _longest(model: HeadedModel) -> int | None:
    return model.encoder.max_tokens if model.encoder.max_tokens < 2**31 else None


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Let a library's logger report only errors, temporarily."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Graph:
    """A graph loaded in onnxruntime.

    Args:
        path: the graph's file.
        model: its source, which defines the outputs.
    """

    def __init__(self, path: Path, model: HeadedModel) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = [entry.name for entry in self.session.get_inputs()]
        self.names = output_names(model)
        padding_id = model.encoder.padding_id
        self.padding_id = padding_id if padding_id < model.encoder.vocab_size else 0

    def outputs(self, rows: Sequence[ProbeRow]) -> dict[str, Tensor]:
        """The outputs of `agreement.outputs_of` for the rows, without padding."""

        def padded(parts: list[list[int]], value: int = 0) -> Tensor:
            tensors = [torch.tensor(part) for part in parts]
            return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

        mask_BS = padded([[1] * len(row.ids) for row in rows])
        inputs = {
            "input_ids": padded([list(row.ids) for row in rows], self.padding_id),
            "attention_mask": mask_BS,
            "token_type_ids": padded([row.token_types for row in rows]),
        }
        found = self.session.run(self.names, {name: inputs[name].numpy() for name in self.inputs})
        is_token_BS = mask_BS.bool()
        return {
            name: tensor if name == POOLER or HEAD_KINDS.get(name) == "sequences" else tensor[is_token_BS]
            for name, tensor in zip(self.names, map(torch.from_numpy, found), strict=True)
        }
