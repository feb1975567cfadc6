"""Small texts shared by tests of tokenizers and sources."""

from __future__ import annotations

import random

AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\nline ends\r\n and  double   spaces",
    "no\u00a0break\u2003spaces \u200b zero\ufeffwidth",
    "Naïve cafés, ÅNGSTRÖM — “quoted” ‘text’… (brackets) [CLS] [MASK]tail [SEP].",
    "中文字符 mixed with English, 日本語。",
    "e\u0301 combining \u0301alone, ﬁ ligature, ½ ², İstanbul ß ΣΑΣ",
    "x" * 150 + " " + "y" * 250,
    "a.b,c;d:e!f?g -- don't o'clock #tags @names 3.14 1,000 50% $5 <tag> a_b ``q''",
    "control \x00\x01\x1c\x85 characters \ufffd",
    "🙂 emoji 👩‍👩‍👧 family",
]

HINDI = ["हिन्दी में लिखा हुआ पृष्ठ है।", "यह पृष्ठ हिन्दी में है।"]


def english(sentences: int, seed: int = 0) -> list[str]:
    """Sentences of artificial English: few words, many repeats, so small vocabularies can be trained."""
    draw = random.Random(seed)
    stems = [
        "read",
        "writ",
        "run",
        "walk",
        "build",
        "test",
        "learn",
        "model",
        "token",
        "sentence",
        "document",
        "number",
        "value",
        "file",
    ]
    endings = ["", "s", "ed", "ing", "er", "able"]
    words = [stem + ending for stem in stems for ending in endings] + [
        "the",
        "a",
        "of",
        "to",
        "and",
        "in",
        "is",
        "it",
        "that",
        "for",
    ] * 6
    return [" ".join(draw.choices(words, k=draw.randint(3, 17))).capitalize() + "." for _ in range(sentences)]
