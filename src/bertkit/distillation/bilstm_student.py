"""An untrained BiLSTM: its own vocabulary, trained on the task's texts, and randomly initialised weights.

Tang et al. 2019, arXiv:1903.12136, section 4.2. The only output is a model directory, which `bertkit finetune`,
`distill`, `predict` and `eval` accept like any other.

Quirks: the paper's students have every word of the word2vec release; here the vocabulary is small because its table
would otherwise be larger than the rest of the model.

Shapes: V vocabulary, E width of the embeddings.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import processors

from bertkit.errors import UsageError
from bertkit.files import sha256_of, unfinished_name
from bertkit.finetuning.data import load_examples
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.models.families.bilstm import BilstmStudent
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.tasks.examples import ChoiceExample, Example, QuestionExample, TaggedExample, TextExample
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer, word_tokenizer
from bertkit.text.word_vectors import read_word_vectors

log = logging.getLogger(__name__)

_CONTINUES = "##"


def cached_bilstm(recipe: FinetuneRecipe, student: BilstmStudent, *, cache: Path, offline: bool) -> Path:
    """The directory of a BiLSTM with untrained weights, created once per set of texts, settings and seed."""
    examples = load_examples(recipe, "train", offline=offline).examples
    pairs = recipe.spec.kind == "choice" or any(isinstance(each, TextExample) and each.text_pair for each in examples)
    # A resolved recipe contains the number of texts; here it follows from the data.
    settings = {name: getattr(student, name) for name in BilstmStudent.model_fields if name != "texts"}
    texts = [text for example in examples for text in _texts(example)]
    vectors = None if student.word_vectors is None else sha256_of(Path(student.word_vectors).expanduser())
    digest = hashlib.sha256(json.dumps([settings, vectors, pairs, recipe.seed]).encode())
    for text in texts:
        digest.update(f"{len(text)} {text}".encode("utf-8", "backslashreplace"))
    directory = cache / "students" / digest.hexdigest()[:32]
    if not (directory / "model.safetensors").is_file():
        # Written under a temporary name, so that a directory with the final name is always complete.
        writing = unfinished_name(directory)
        new_bilstm(texts, BilstmStudent(**settings), writing, pairs=pairs, seed=recipe.seed)
        try:
            writing.rename(directory)
        except OSError as error:
            # Another process was first and wrote the same bytes.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(writing)
    return directory


def new_bilstm(texts: Iterable[str], student: BilstmStudent, out: Path, *, pairs: bool, seed: int = 0) -> Path:
    """Write a BiLSTM with untrained weights, without a head; the same texts, settings and seed give identical bytes.

    Args:
        texts: those of the task's training examples only; for pairs, both texts.
        student: sizes and vocabulary.
        out: the directory to write.
        pairs: whether examples are pairs.
        seed: for the weights.

    Returns:
        `out`.

    Raises:
        UsageError: a vocabulary too small for the text's characters, word vectors of another width, or a student
            created for another number of texts.
        DataError: no text, or word vectors that cannot be read.
    """
    tokenizer = own_tokenizer(texts, student)
    model = HeadedModel(student.config(2 if pairs else 1).build(tokenizer.vocab_size, pad_id=tokenizer.pad_id))
    model.initialise(seed)
    if student.word_vectors is not None:
        _take_vectors(model, tokenizer, student, Path(student.word_vectors).expanduser())
    save_model(model.eval(), tokenizer, out)
    return out


def own_tokenizer(texts: Iterable[str], student: BilstmStudent) -> Tokenizer:
    """The vocabulary; each text is followed by one [SEP], with nothing before it."""
    if student.vocabulary == "words":
        tokenizer = word_tokenizer(texts, student.vocab_size, lowercase=student.lowercase)
    else:
        config = TokenizerConfig(type="wordpiece", vocab_size=student.vocab_size, lowercase=student.lowercase)
        tokenizer = train_tokenizer(config, texts)
    sep = tokenizer.roles["sep"]
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {sep}:0", pair=f"$A:0 {sep}:0 $B:1 {sep}:1", special_tokens=[(sep, tokenizer.sep_id)]
    )
    # A tokenizer caches properties of its rules, and these have just changed.
    return Tokenizer(tokenizer.backend, tokenizer.roles, lowercases=tokenizer.lowercases)


def _take_vectors(model: HeadedModel, tokenizer: Tokenizer, student: BilstmStudent, path: Path) -> None:
    """Replace the random embeddings of known words with their vectors."""
    special = tokenizer.special_ids
    words = {
        token: number
        for token, number in tokenizer.backend.get_vocab().items()
        if number not in special and not token.startswith(_CONTINUES)
    }
    vectors = read_word_vectors(path, only=words.keys())
    if vectors.width != student.embedding_size:
        raise UsageError(
            f"student.embedding_size is {student.embedding_size}, but the vectors in {path} have {vectors.width}"
            f" numbers; write embedding_size: {vectors.width}"
        )
    row = torch.from_numpy(np.array([words[word] for word in vectors.words], dtype=np.int64))
    with torch.no_grad():
        model.encoder.word_embedding.weight[row] = torch.from_numpy(vectors.vector_NE)
    log.info("%s: vectors found for %d of %d words", path, len(vectors.words), len(words))


def _texts(example: Example) -> Iterable[str]:
    if isinstance(example, TextExample):
        return [text for text in (example.text, example.text_pair) if text]
    if isinstance(example, TaggedExample):
        return [" ".join(example.words)]
    if isinstance(example, QuestionExample):
        return [example.question, example.context]
    assert isinstance(example, ChoiceExample)
    return [text for text in (example.context, example.question, *example.endings) if text]
