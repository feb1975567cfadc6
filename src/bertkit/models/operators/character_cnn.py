"""Word vectors from characters: convolutions of several widths, max-pooling, highway layers, a projection.

Kim et al. 2016, arXiv:1508.06615; Jozefowicz et al. 2016, arXiv:1602.02410; sizes and order as in ELMo's released code
(allenai/bilm-tf, bilm/training.py and bilm/data.py). A word is spelled in bytes, between begin and end marks. Each
different word of a batch is computed once.

Shapes: W different words, C characters of a word, K width of a character, F filters, P width of the projection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bertkit.models.operators.matmul import Linear
from bertkit.text.tokenizer import Tokenizer

BYTES = 256
TEXT_BEGINS, TEXT_ENDS, WORD_BEGINS, WORD_ENDS, PADDING = range(BYTES, BYTES + 5)
CHARACTERS = BYTES + 5


def spelling(tokenizer: Tokenizer, characters: int) -> Tensor:
    """The bytes of each token of a vocabulary between its marks, (V, C), int16; long tokens are truncated.

    [CLS] and [SEP] become the marks of a text's beginning and end, as in the released code.
    """
    table = torch.full((tokenizer.vocab_size, characters), PADDING, dtype=torch.int16)
    marks = {tokenizer.roles.get("cls"): TEXT_BEGINS, tokenizer.roles.get("sep"): TEXT_ENDS}
    for number in range(tokenizer.vocab_size):
        token = tokenizer.token(number)
        inside = [marks[token]] if token in marks else list(token.encode("utf-8", "ignore"))[: characters - 2]
        spelled = [WORD_BEGINS, *inside, WORD_ENDS]
        table[number, : len(spelled)] = torch.tensor(spelled, dtype=torch.int16)
    return table


class Highway(nn.Module):
    """gate * relu(W x) + (1 - gate) * x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = Linear(width, width)
        self.transform = Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(states))
        return gate * torch.relu(self.transform(states)) + (1 - gate) * states


class CharacterCnn(nn.Module):
    """Computes word vectors.

    Args:
        character_width: K.
        filters: width and number of filters of each convolution.
        highways: number of highway layers.
        projection: P.
    """

    def __init__(
        self, character_width: int, filters: Sequence[tuple[int, int]], highways: int, projection: int
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, character_width)
        # A convolution over all of a character's numbers is a linear map of each window.
        self.convolutions = nn.ModuleList(nn.Conv1d(character_width, number, width) for width, number in filters)
        total = sum(number for _, number in filters)
        self.highways = nn.ModuleList(Highway(total) for _ in range(highways))
        self.projection = Linear(total, projection)

    def forward(self, spelled_WC: Tensor) -> Tensor:
        """(W, C) to (W, P)."""
        characters_WKC = self.characters(spelled_WC.long()).transpose(1, 2)
        found = [torch.relu(convolution(characters_WKC).amax(dim=2)) for convolution in self.convolutions]
        states = torch.cat(found, dim=1)
        for highway in self.highways:
            states = highway(states)
        return self.projection(states)
