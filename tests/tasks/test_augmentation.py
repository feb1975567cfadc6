"""Augmentation: the papers' rates, draws that depend only on seed and example, and a model's most probable words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy import stats

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.tasks.augmentation import (
    AnyAugmentation,
    AugmentationContext,
    MaskedLMWords,
    Masking,
    augmented_examples,
)
from bertkit.tasks.augmentation import cache as cache_module
from bertkit.tasks.augmentation.function_words import FUNCTION_WORDS
from bertkit.tasks.augmentation.masked_lm import MaskedLMAugmenter
from bertkit.tasks.augmentation.word_classes import WordClasses, learnt_classes, read_tags
from bertkit.tasks.augmentation.words import WordSplitText
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import MaskedText, TextExample
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from tests.overrides import parsed

NOUNS = ("cat", "dog", "king", "garden", "river")
VERBS = ("sees", "likes", "paints")
COUNTS = {"cat": 9, "dog": 5, "king": 3, "garden": 2, "river": 1}
P_LIMIT = 1e-3
"""Seeds are fixed, so a test of a rate always has the same result."""


def sentence(number: int, words: int = 12) -> str:
    """A text of this many different nouns and verbs in a row, another one for each number."""
    generator = np.random.default_rng(number)
    return " ".join(generator.choice([*NOUNS, *VERBS], size=words).tolist())


def singles(count: int, words: int = 12) -> list[TextExample]:
    return [TextExample(f"e{n}", sentence(n, words), None, "yes") for n in range(count)]


def augmented(
    method: Masking | MaskedLMWords, examples: Sequence[TextExample], surroundings: AugmentationContext | None = None
) -> list[TextExample]:
    """Without the cache."""
    augmenter = method.augmenter(examples, surroundings or AugmentationContext())
    return method.with_copies(examples, augmenter.variants(examples))


def pairs(count: int) -> list[TextExample]:
    return [TextExample(f"p{n}", sentence(2 * n), sentence(2 * n + 1), "no") for n in range(count)]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tags") / "tags.tsv"
    path.write_text("".join([*(f"{word}\tNOUN\n" for word in NOUNS), *(f"{word}\tVERB\n" for word in VERBS)]))
    return str(path)


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with random weights, whose vocabulary has some words as one token and others as several."""
    words = ["the", "cat", "sees", "a", "dog", "and", "red", "king", "likes", "old", "garden", "!"]
    tokenizer = train_tokenizer(
        TokenizerConfig(vocab_size=300, lowercase=True), [" ".join(words)] * 4 + ["xylophonist quizzical"]
    )
    config = BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=40
    )
    model = HeadedModel(config.build(tokenizer.vocab_size), ("masked_lm",))
    model.initialise(seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    directory = tmp_path_factory.mktemp("masked-lm")
    save_model(model, tokenizer, directory)
    return directory


def fits(observed: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether counts agree with these shares."""
    total = sum(observed)
    return bool(stats.chisquare(observed, np.array(expected) / sum(expected) * total).pvalue > P_LIMIT)


def copies_of(method: Masking | MaskedLMWords, examples: list[TextExample], seed: int = 0) -> list[list[Any]]:
    return method.augmenter(examples, AugmentationContext(seed)).variants(examples)


def test_a_text_is_put_together_as_it_was_but_for_what_changed() -> None:
    cut = WordSplitText.of("  It's a well-made film, isn't it?")
    assert cut.words == ["It's", "a", "well-made", "film", ",", "isn't", "it", "?"]
    assert cut.changed({}) == cut.text
    assert cut.changed({3: "play", 6: "she"}) == "  It's a well-made play, isn't she?"
    assert cut.changed({3: "play", 7: "!"}, parsed(range(2, 5))) == "well-made play,"
    masked = cut.changed({1: None, 3: None}, parsed(range(1, 5)))
    assert isinstance(masked, MaskedText)
    assert masked.parts == ("", " well-made ", ",")
    assert masked == "[MASK] well-made [MASK],"


def test_words_have_their_vowel_signs_and_characters_are_words_in_scripts_without_spaces() -> None:
    assert WordSplitText.of("It's हिन्दी में, 去北京!").words == ["It's", "हिन्दी", "में", ",", "去", "北", "京", "!"]


def test_words_are_masked_and_exchanged_at_the_papers_rates(tagged: str) -> None:
    examples = singles(60)
    fates: Counter[str] = Counter()
    for example, variants in zip(examples, copies_of(Masking(ngram=0, tags=tagged), examples), strict=True):
        assert len(variants) == 20
        for text, _ in variants:
            words = text.replace("[MASK]", "MASK").split()
            for old, new in zip(example.text.split(), words, strict=True):
                fates["masked" if new == "MASK" else "kept" if new == old else "exchanged"] += 1
                kind = NOUNS if old in NOUNS else VERBS
                assert new == "MASK" or new in kind
    assert fits([fates["masked"], fates["exchanged"], fates["kept"]], [0.1, 0.1, 0.8])


def test_an_exchanged_word_is_drawn_by_how_often_words_of_its_kind_occur() -> None:
    classes = WordClasses(dict.fromkeys(NOUNS, "NOUN"), COUNTS)
    share = (np.arange(4000) + 0.5) / 4000
    for word in NOUNS:
        others = [each for each in sorted(NOUNS) if each != word]
        drawn = Counter(classes.another(word, float(each)) for each in share)
        assert set(drawn) <= set(others)
        expected = np.array([COUNTS[each] for each in others]) / (sum(COUNTS.values()) - COUNTS[word]) * 4000
        assert np.abs(np.array([drawn[each] for each in others]) - expected).max() <= 1
    assert WordClasses({"cat": "NOUN"}, COUNTS).another("cat", 0.5) is None
    assert classes.another("unheard", 0.5) is None


def test_ngrams_have_the_papers_rate_and_lengths(tagged: str) -> None:
    examples = singles(100)
    variants = copies_of(Masking(mask=0, same_tag=0, tags=tagged), examples)
    lengths: Counter[int] = Counter()
    starts: Counter[int] = Counter()
    for example, own in zip(examples, variants, strict=True):
        words = example.text.split()
        for text, _ in own:
            lengths[len(text.split())] += 1
            assert f" {text} " in f" {example.text} "
            if len(text.split()) == 5 and Counter(words)[text.split()[0]] == 1:
                starts[words.index(text.split()[0])] += 1
    assert fits([lengths[12], *(lengths[n] for n in range(1, 6))], [0.75, *[0.05] * 5])
    assert set(starts) <= set(range(8))


def test_a_short_text_loses_nothing_beyond_its_length(tagged: str) -> None:
    own = copies_of(Masking(mask=0, same_tag=0, ngram=1, copies=200), [TextExample("a", "cat sees", None, "x")])[0]
    counts = Counter(len(text.split()) for text, _ in own)
    assert fits([counts[1], counts[2]], [0.2, 0.8])
    nothing = copies_of(Masking(), [TextExample("a", " ", None, "x")])[0]
    assert {text for text, _ in nothing} == {" "}


def test_of_a_pair_two_copies_of_three_have_one_text_altered_and_the_third_both(tagged: str) -> None:
    examples = pairs(40)
    altered: Counter[tuple[bool, bool]] = Counter()
    for example, own in zip(examples, copies_of(Masking(mask=1, same_tag=0, copies=9), examples), strict=True):
        altered.update((first != example.text, second != example.text_pair) for first, second in own)
    assert altered == {(True, False): 120, (False, True): 120, (True, True): 120}
    assert len(copies_of(Masking(), examples)[0]) == 10


@pytest.mark.parametrize("kind", ["masking", "masked_lm"])
def test_copies_depend_on_the_seed_and_the_example_alone(kind: str, tagged: str, masked_lm: Path) -> None:
    method = Masking(tags=tagged) if kind == "masking" else MaskedLMWords(model=str(masked_lm), copies=4)
    examples = [*singles(7), *pairs(4)]
    straight = {each.id: each for each in augmented(method, examples)}
    backwards = {each.id: each for each in augmented(method, examples[::-1])}
    assert straight == backwards
    renamed = [TextExample("other", examples[3].text, None, "yes")]
    alone = method.augmenter(examples, AugmentationContext()).variants(renamed)[0]
    assert alone == method.augmenter(examples, AugmentationContext()).variants(examples)[3]
    other_seed = {each.id: each for each in augmented(method, examples, AugmentationContext(seed=1))}
    assert other_seed != straight


def test_duplicates_are_dropped_and_originals_stay(tagged: str) -> None:
    examples = [*singles(6, words=3), singles(1, words=3)[0]]
    found = augmented(Masking(tags=tagged, copies=60), examples)
    assert [each for each in found if "/" not in each.id] == examples
    for example in examples[:6]:
        own = [each for each in found if each.id.partition("/")[0] == example.id]
        own = own[: 1 + len({each.id for each in own if "/" in each.id})]
        texts = [(each.text, isinstance(each.text, MaskedText)) for each in own]
        assert len(set(texts)) == len(texts)
        assert 1 < len(own) < 61


def test_labels_are_kept_or_left_to_the_teacher(tagged: str, masked_lm: Path) -> None:
    examples = singles(3)
    for method, label in (
        (Masking(tags=tagged), None),
        (Masking(tags=tagged, labels="kept"), "yes"),
        (MaskedLMWords(model=str(masked_lm), copies=2), "yes"),
        (MaskedLMWords(model=str(masked_lm), copies=2, labels="none"), None),
    ):
        found = augmented(method, examples)
        assert len(found) > 3
        assert {each.label for each in found if "/" in each.id} == {label}
        assert {each.label for each in found if "/" not in each.id} == {"yes"}


def test_a_mask_is_the_tokenizers_own_and_a_written_one_is_text(masked_lm: Path) -> None:
    tokenizer = load_tokenizer(masked_lm)
    encoder = SequenceEncoder(tokenizer, max_tokens=40)
    plain, written, masked = encoder.ids(["the red cat", "the [MASK] cat", MaskedText(("the ", " cat"))])
    assert masked == [plain[0], tokenizer.mask_id, plain[2]]
    assert tokenizer.mask_id not in written
    assert encoder.ids([MaskedText(("", "", ""))]) == [[tokenizer.mask_id] * 2]


def likeliest(directory: Path, text: str, number: int, most: int) -> list[str]:
    """With one padded batch of one sentence, the softmax over the whole vocabulary, and a sorted list."""
    model, _ = load_model(directory)
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode_batch([text])[0]
    masked = [*ids[:number], tokenizer.mask_id, *ids[number + 1 :]]
    whole = [tokenizer.cls_id, *masked, tokenizer.sep_id, *ids, tokenizer.sep_id]
    types = [0] * (len(ids) + 2) + [1] * (len(ids) + 1)
    with torch.no_grad():
        hidden = model(PackedBatch.from_ids([whole], [types]))
        probability = model.masked_lm_logits(hidden).softmax(dim=-1)[1 + number]
    words = []
    for i in probability.argsort(descending=True).tolist():
        piece = tokenizer.token(i)
        if piece.isalnum() and i not in tokenizer.special_ids:
            words.append(piece)
    return words[:most]


def test_candidates_are_the_models_likeliest_whole_words(masked_lm: Path) -> None:
    text = "the cat sees a dog and the red king"
    method = MaskedLMWords(model=str(masked_lm), candidates=6)
    examples = [TextExample("a", text), TextExample("b", "red garden")]
    augmenter = method.augmenter(examples, AugmentationContext())
    assert isinstance(augmenter, MaskedLMAugmenter)
    found, other = augmenter.candidates([text, "red garden"])
    assert list(found) == [1, 2, 4, 7, 8]
    for number, own in found.items():
        assert list(own) == likeliest(masked_lm, text, number, 6), number
    assert list(other[0]) == likeliest(masked_lm, "red garden", 0, 6)


def test_tinyberts_code_changes_words_of_a_to_z_alone(masked_lm: Path) -> None:
    text = "cat 42 Garden x7 r\u00e9d king's dog"
    every, code = (MaskedLMWords(model=str(masked_lm), letters=letters) for letters in ("any", "a-z"))
    changed = {}
    for method in (every, code):
        augmenter = method.augmenter([TextExample("a", text)], AugmentationContext())
        assert isinstance(augmenter, MaskedLMAugmenter)
        words = WordSplitText.of(text).words
        changed[method.letters] = [word for word in words if augmenter._may_change(word)]
    # data_augmentation.py: not re.search("[^a-z]", word.lower()), apart from its stop words.
    assert changed["a-z"] == [word for word in changed["any"] if not re.search("[^a-z]", word.lower())]
    assert {"42", "x7", "r\u00e9d"} <= set(changed["any"])
    assert "Garden" in changed["a-z"]
    assert code.vector_words == 100_000
    assert "letters" not in every.model_dump()


def test_words_become_candidates_at_the_given_rate_and_evenly(masked_lm: Path) -> None:
    text = "cat sees dog red king likes old garden"
    method = MaskedLMWords(model=str(masked_lm), copies=400, candidates=4, replace=0.4)
    example = TextExample("a", text)
    augmenter = method.augmenter([example], AugmentationContext())
    assert isinstance(augmenter, MaskedLMAugmenter)
    (candidates,) = augmenter.candidates([text])
    assert len(candidates) == 8
    chosen: Counter[int] = Counter()
    asked = kept = 0
    for copy, _ in augmenter.variants([example])[0]:
        for number, (old, new) in enumerate(zip(text.split(), copy.split(), strict=True)):
            if old in candidates[number]:
                continue
            asked += 1
            if new == old:
                kept += 1
            else:
                chosen[candidates[number].index(new)] += 1
    assert asked > 1500
    assert fits([kept, *(chosen[n] for n in range(4))], [0.6, *[0.1] * 4])


def test_stop_words_signs_and_words_of_several_pieces_stay(masked_lm: Path, tmp_path: Path) -> None:
    text = "the red cat and a xylophonist isn't old !"
    example = TextExample("a", text)
    method = MaskedLMWords(model=str(masked_lm), replace=1.0, copies=30)
    for copy, _ in method.augmenter([example], AugmentationContext()).variants([example])[0]:
        words = copy.split()
        assert [words[n] for n in (0, 3, 4, 5, 6, 8)] == ["the", "and", "a", "xylophonist", "isn't", "!"]
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("xylophonist 1 0 0\nviolinist 0.9 0.1 0\nquizzical 0 1 0\nred 0 0 1\n")
    near = MaskedLMWords(model=str(masked_lm), replace=1.0, copies=30, candidates=1, word_vectors=str(vectors))
    variants = near.augmenter([example], AugmentationContext()).variants([example])[0]
    assert {copy.split()[5] for copy, _ in variants} == {"violinist"}
    stop = tmp_path / "stop.txt"
    stop.write_text("red\nOld\nold\n")
    own = MaskedLMWords(model=str(masked_lm), replace=1.0, copies=5, stop_words=str(stop))
    variants = own.augmenter([example], AugmentationContext()).variants([example])[0]
    assert {(copy.split()[1], copy.split()[7]) for copy, _ in variants} == {("red", "old")}
    assert {"the", "not", "isn", "and"} <= FUNCTION_WORDS
    assert all(word == word.lower() for word in FUNCTION_WORDS)


def test_each_text_of_a_pair_is_altered_by_itself(masked_lm: Path) -> None:
    example = TextExample("a", "red cat", "old king")
    method = MaskedLMWords(model=str(masked_lm), replace=1.0, copies=5)
    variants = method.augmenter([example], AugmentationContext()).variants([example])[0]
    assert len(variants) == 10
    assert all(second == "old king" for _, second in variants[:5])
    assert all(first == "red cat" for first, _ in variants[5:])


def test_a_sentence_too_long_for_the_model_is_altered_where_it_is_read(masked_lm: Path) -> None:
    text = " ".join(["red"] * 50)
    method = MaskedLMWords(model=str(masked_lm), replace=1.0, copies=1)
    augmenter = method.augmenter([TextExample("a", text)], AugmentationContext())
    assert isinstance(augmenter, MaskedLMAugmenter)
    (found,) = augmenter.candidates([text])
    assert list(found) == list(range(40 - 3))


def test_a_words_tag_is_the_commonest_of_a_file(tmp_path: Path) -> None:
    conllu = tmp_path / "a.conllu"
    rows = [("1", "Saw", "VERB"), ("2", "saw", "NOUN"), ("3-4", "don't", "_"), ("3", "saw", "NOUN"), ("3.1", "x", "X")]
    conllu.write_text("# sent_id = 1\n" + "".join(f"{n}\t{w}\t_\t{t}" + "\t_" * 6 + "\n" for n, w, t in rows) + "\n")
    assert read_tags(conllu) == {"saw": "NOUN"}
    lines = tmp_path / "a.tsv"
    lines.write_text("#\tSYM\nsaw\tNOUN\nSaw\tVERB\n")
    assert read_tags(lines) == {"#": "SYM", "saw": "NOUN"}
    lines.write_text("saw NOUN\n")
    with pytest.raises(DataError, match="line 1: 1 fields"):
        read_tags(lines)


def test_learnt_classes_put_words_with_like_neighbours_together() -> None:
    """Two artificial kinds of words, each with its own neighbours, among many others."""
    generator = np.random.default_rng(0)
    kinds = {name: [f"{name}{n}" for n in range(8)] for name in "abcdefghij"}
    order = "abcdefghij"
    texts = [" ".join(str(generator.choice(kinds[name])) for name in order) for _ in range(400)]
    classes = learnt_classes(texts)
    assert classes == learnt_classes(texts[::-1])
    assert len(classes) == 80
    members: dict[str, set[str]] = {}
    for word, number in classes.items():
        members.setdefault(number, set()).add(word[0])
    assert all(len(own) == 1 for own in members.values())
    assert learnt_classes(["too few words"]) == {}


def test_what_was_made_is_found_again_and_what_was_begun_goes_on(
    tagged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [
        *singles(5),
        *pairs(3),
        TextExample("r", "king likes", None, 2.5),
        TextExample("m", "cat", "dog", ("a", "b")),
        TextExample("n", 'a "dog"\u2028 likes', None, None),
    ]
    method = Masking(tags=tagged, labels="kept")
    straight = augmented(method, examples)

    def made(directory: Path) -> list[TextExample]:
        return augmented_examples(examples, method, cache=directory, block_examples=3)

    written: list[Path] = []
    write = cache_module.write_text

    def until_the_third(path: Path, text: str) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, text)

    monkeypatch.setattr(cache_module, "write_text", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "stopped")
    monkeypatch.setattr(cache_module, "write_text", lambda path, text: (written.append(path), write(path, text)))
    assert made(tmp_path / "stopped") == straight
    assert len(written) == len(set(written)) == 5
    assert [each.text for each in made(tmp_path / "stopped") if isinstance(each.text, MaskedText)]
    assert len(written) == 5
    (file,) = (tmp_path / "stopped").rglob("*.jsonl")
    assert made(tmp_path / "at-once") == straight
    (other,) = (tmp_path / "at-once").rglob("*.jsonl")
    assert other.read_bytes() == file.read_bytes()
    file.write_text("{}\n")
    assert made(tmp_path / "stopped") == straight


def test_a_second_process_at_the_same_work_takes_what_the_first_one_made(
    tagged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one finishes and removes its blocks while the second writes its last one."""
    examples, method = singles(7), Masking(tags=tagged)
    write = cache_module.write_text

    def made() -> list[TextExample]:
        return augmented_examples(examples, method, cache=tmp_path, block_examples=3)

    def write_after_the_other(path: Path, text: str) -> None:
        if path.name.startswith("block-000000006"):
            with monkeypatch.context() as inner:
                inner.setattr(cache_module, "write_text", write)
                assert made() == augmented(method, examples)
        write(path, text)

    monkeypatch.setattr(cache_module, "write_text", write_after_the_other)
    assert made() == augmented(method, examples)
    assert sorted(path.name for path in tmp_path.rglob("*.json*")) == ["examples.jsonl", "manifest.json"]


def test_other_settings_seeds_examples_or_files_are_other_work(tagged: str, masked_lm: Path, tmp_path: Path) -> None:
    examples = singles(3)
    copy = tmp_path / "same.tsv"
    copy.write_bytes(Path(tagged).read_bytes())

    def identity(method: Masking | MaskedLMWords, seed: int = 0, some: list[TextExample] = examples) -> str:
        return cache_module.augmented_identity(some, method, AugmentationContext(seed))

    first = identity(Masking(tags=tagged))
    assert identity(Masking(tags=str(copy))) == first
    copy.write_text("cat\tNOUN\n")
    others = [
        identity(Masking(tags=str(copy))),
        identity(Masking(tags=tagged), seed=1),
        identity(Masking(tags=tagged, mask=0.2)),
        identity(Masking(tags=tagged), some=examples[:2]),
        identity(Masking()),
        identity(MaskedLMWords(model=str(masked_lm))),
    ]
    assert len({first, *others}) == 7


def test_wrong_settings_and_models_are_refused(masked_lm: Path, tmp_path: Path) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(AnyAugmentation)
    for name, kind in {"masking": Masking, "masked_lm": MaskedLMWords}.items():
        assert type(adapter.validate_python({"name": name, **({"model": "m"} if name == "masked_lm" else {})})) is kind
    with pytest.raises(ValidationError, match=r"mask and same_tag add up to 1\.2"):
        Masking(mask=0.6, same_tag=0.6)
    with pytest.raises(DataError, match=r"augmentation\.tags: .*absent.*: no such file"):
        Masking(tags=str(tmp_path / "absent")).reads(offline=True)
    model, _ = load_model(masked_lm, heads=())
    save_model(model, load_tokenizer(masked_lm), tmp_path / "headless")
    with pytest.raises(DataError, match="no masked-LM head"):
        augmented(MaskedLMWords(model=str(tmp_path / "headless")), singles(1))
