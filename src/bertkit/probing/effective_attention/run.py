"""`probe effective-attention`: how much of an attention map does not affect the output, by length, layer and token.

Brunner et al. 2020, arXiv:1908.04211, section 3. The texts are randomly drawn sentences, concatenated and cut to the
given lengths, because few sentences are longer than the head width; they are not running text. Sibling attention/
measures raw maps.
"""

from __future__ import annotations

from collections.abc import Sequence

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.probing.attention.measure import SpecialTokens, pattern_points
from bertkit.probing.effective_attention import EffectiveAttentionSettings
from bertkit.probing.effective_attention.measure import layer_attention, output_maps
from bertkit.probing.effective_attention.report import DEFINITIONS, ExampleMaps, TextResult, effective_report
from bertkit.probing.report import Report
from bertkit.probing.run import ProbeArguments, ProbeResult, left_out, run_probe
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def probe_effective_attention(request: ProbeArguments, settings: EffectiveAttentionSettings) -> ProbeResult:
    """Measure and write a run.

    Raises:
        UsageError: no data, several models, or lengths that the model cannot read.
        DataError: unreadable text or model, or too little text.
    """
    subject = request.subject()
    layers = len(pattern_points(subject.model))
    width = output_maps(subject.model, layers)[0].shape[1]
    lengths = chosen_lengths(settings.lengths, subject)
    texts = request.texts(most=settings.sentences, seed=settings.seed)
    encoder = TextEncoder.of(subject.model, subject.tokenizer)
    made = make_texts(list(encoder.encode(texts.sentences)), encoder, lengths, settings.texts)
    if not made:
        raise DataError(
            f"{', '.join(request.data)}: not enough text for {settings.texts} texts of {lengths[0]} tokens; give more,"
            " or lower --texts"
        )

    def measure() -> Report:
        special = SpecialTokens.of(subject.tokenizer)
        results, example = [], None
        flat = [(length, text) for length, some in made.items() for text in some]
        with request.progress("effective attention", len(flat), "texts") as meter:
            stream = layer_attention(subject.model, [text for _, text in flat], request.engine())
            for (length, _), (text, found) in zip(flat, stream, strict=True):
                results.append(TextResult.of(length, text, found, special))
                example = example or ExampleMaps.of(subject, width, text, found)
                meter.update(len(results))
        summary, findings = effective_report(subject.label, width, results, example)
        summary["lengths_without_enough_text"] = [length for length in lengths if length not in made]
        summary["left_out"] = left_out(encoder.notes)
        return Report(summary, DEFINITIONS, findings)

    return run_probe(request, settings, [subject], measure, data=texts.hashes)


def chosen_lengths(given: Sequence[int], subject: LoadedModel) -> list[int]:
    """The lengths in ascending order.

    Raises:
        UsageError: a length exceeds the model's maximum, or leaves no room for words.
    """
    most = subject.config.max_tokens
    for length in given:
        if not 4 <= length <= most:
            raise UsageError(f"--length {length}: expected 4 to {most} tokens, the range of this model")
    return sorted(set(given)) or [length for length in LENGTHS if length <= most]


def make_texts(
    sentences: Sequence[EncodedSentence], encoder: TextEncoder, lengths: Sequence[int], each: int
) -> dict[int, list[EncodedSentence]]:
    """Texts of each length, as far as the words suffice; each length starts again at the first word.

    Args:
        sentences: the source of the words, in this order.
        encoder: the model's encoder.
        lengths: in tokens, including special tokens.
        each: number of texts per length; a length without enough words is left out.
    """
    # Texts are encoded word by word; some vocabularies have other tokens for a word that touches its neighbour.
    apart = list(encoder.encode(Sentence(sentence.name, words=sentence.words) for sentence in sentences))
    words = [
        (word, int(end - start))
        for sentence in apart
        for word, (start, end) in zip(sentence.words, sentence.spans_W2.tolist(), strict=True)
    ]
    special = int(apart[0].special_T.sum()) if apart else 0
    made: dict[int, list[EncodedSentence]] = {}
    for length in lengths:
        parts, place = list[Sentence](), 0
        while len(parts) < each:
            start, room = place, length - special
            while place < len(words) and words[place][1] <= room:
                room -= words[place][1]
                place += 1
            if place == len(words):
                break
            if place == start:
                place += 1
                continue
            text = tuple(word for word, _ in words[start:place])
            parts.append(Sentence(f"text {len(parts) + 1} of {length} tokens", words=text))
        if len(parts) == each:
            made[length] = list(encoder.encode(parts))
    return {length: some for length, some in made.items() if some}
