"""English function words, which augmentation does not replace.

Own list, by closed word classes; Jiao et al. 2020, arXiv:1909.10351, algorithm 1, skips stop words without listing
them. The list includes negations, because replacing one would reverse the meaning of the sentence.
"""

from __future__ import annotations

_BY_CLASS = {
    "articles and determiners": "a an the this that these those each every either neither some any no all both half"
    " such another other others own same",
    "pronouns": "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she"
    " her hers herself it its itself they them their theirs themselves one oneself who whom whose which what whoever"
    " whatever whichever somebody someone something anybody anyone anything nobody none nothing everybody everyone"
    " everything",
    "prepositions": "about above across after against along among around as at before behind below beneath beside"
    " besides between beyond by despite down during except for from in inside into like near of off on onto out outside"
    " over past per since than through throughout till to toward towards under until up upon via with within without",
    "conjunctions": "and but or nor so yet if unless because although though while whereas whether once when whenever"
    " where wherever how why",
    "auxiliaries": "am is are was were be been being do does did doing done have has had having can could may might"
    " must shall should will would ought need dare",
    "negations and particles": "not never n't too very just only also even still again then there here now ever already"
    " more most less least much many few",
    "contracted": "s t d m o re ve ll y ain aren couldn didn doesn don hadn hasn haven isn mightn mustn needn shan"
    " shouldn wasn weren won wouldn",
}
FUNCTION_WORDS = frozenset(word for words in _BY_CLASS.values() for word in words.split())
