"""Messages for parts of a model that are missing from its file: which part starts untrained, and what to do.

The weights of such a part are drawn at random, so its predictions are meaningless until it is trained. Sibling
weights.py reports which weights are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bertkit.models.headed import POOLER
from bertkit.models.heads import HEAD_KINDS

_PRETRAIN = "train it by `bertkit pretrain RECIPE --init MODEL`"
_FINETUNE = "train it by `bertkit finetune --model MODEL`"


@dataclass(frozen=True)
class _ModelPart:
    """A part of a model: its name, what depends on it, and how it is trained."""

    name: str
    needed_by: str
    remedy: str


_PARTS = {
    "masked_lm": _ModelPart("masked-LM head", "`fill`, `eval mlm` and `eval blimp`", _PRETRAIN),
    "causal_lm": _ModelPart("causal-LM head", "the probability of a text and `eval blimp`", _PRETRAIN),
    "permutation_lm": _ModelPart("permutation-LM head", "its predictions of words", _PRETRAIN),
    "span_boundary": _ModelPart("span-boundary head", "its predictions of spans", _PRETRAIN),
    "next_sentence": _ModelPart("next-sentence head", "its predictions of pairs", _PRETRAIN),
    "sentence_order": _ModelPart("sentence-order head", "its predictions of pairs", _PRETRAIN),
    "sentence_structure": _ModelPart("sentence-structure head", "its predictions of pairs", _PRETRAIN),
    "replaced_token": _ModelPart("replaced-token head", "its predictions of replaced tokens", _PRETRAIN),
    "contextual_replaced_token": _ModelPart("replaced-token head", "its predictions of replaced tokens", _PRETRAIN),
    "sequence_classification": _ModelPart("classification head", "`predict` and `eval`", _FINETUNE),
    "token_classification": _ModelPart("tagging head", "`predict` and `eval`", _FINETUNE),
    "span": _ModelPart("span head", "`predict` and `eval`", _FINETUNE),
    "multiple_choice": _ModelPart("multiple-choice head", "`predict` and `eval`", _FINETUNE),
    POOLER: _ModelPart("pooler", "everything that reads one vector per text", _FINETUNE),
}


def _other_part(part: str) -> _ModelPart:
    """The description of a head that an objective added, or of another module."""
    if part in HEAD_KINDS:
        return _ModelPart(f"{part.replace('_', '-')} head", "its predictions", _PRETRAIN)
    return _ModelPart(part.replace("_", " "), "what it predicts", _FINETUNE)


def untrained_parts(
    names: Mapping[str, str], drawn: Collection[str], *, source: str, is_trained: bool, replaced: Collection[str] = ()
) -> list[str]:
    """One sentence for each part of a model with randomly drawn weights.

    Args:
        names: the Hub's name of each parameter.
        drawn: Hub names of the weights that were drawn.
        source: the file, for the message.
        is_trained: whether the caller will train the model.
        replaced: Hub names of those weights that the file has for another number of labels.
    """
    drawn = set(drawn)
    lines = []
    for part in dict.fromkeys(name.partition(".")[0] for name, hub_name in names.items() if hub_name in drawn):
        own = {hub_name for name, hub_name in names.items() if name.partition(".")[0] == part}
        lacking = sorted(own & drawn)
        known = _PARTS.get(part) or _other_part(part)
        weights = ", ".join(lacking[:2]) + (f" and {len(lacking) - 2} more" if len(lacking) > 2 else "")
        has = f"has no {known.name}" if lacking == sorted(own) else f"lacks weights of its {known.name}"
        if not own.isdisjoint(replaced):
            has = f"has a {known.name} for another number of labels"
        means = (
            "it starts untrained, and this run trains it"
            if is_trained
            else f"it is untrained, so {known.needed_by} would be meaningless; {known.remedy}"
        )
        lines.append(f"{source}: {has} ({weights}): {means}")
    return lines
