"""Token identifiability: the share of hidden states from which their input token can be recovered.

Brunner et al. 2020, arXiv:1908.04211, section 2: a map from a layer's states to the inputs is trained on some
sentences. On other sentences, a state counts as identified if its own input is, of all inputs of its sentence, the
nearest to the map's output (by cosine). There are three maps: the identity (`nearest`), a linear map, and a perceptron
with one hidden layer. Choices made here: the linear map is the least-squares solution with a small ridge penalty
instead of gradient descent; the hidden layer is twice as wide as the states, with GELU, trained with Adam on the
squared error.

Inputs are those of the first layer. If they include positions, no two inputs of a sentence are equal. In families where
only attention encodes positions, a repeated word has equal inputs, and any of them counts as correct.

Shapes: T tokens of all sentences, n of one, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.arrays import BoolArray, Int64Array
from bertkit.data.random import derived_seed
from bertkit.models.headed import HeadedModel
from bertkit.probing.sentences import EncodedSentence
from bertkit.probing.states import layer_states
from bertkit.progress import Progress, silent_progress
from bertkit.training.engine import Engine

MAPS = ("nearest", "linear", "mlp")
_RIDGE = 1e-4
"""Share of the mean squared state that is added to the diagonal."""
_EQUAL = 1e-6
"""Cosines that differ by less count as equal."""
_WIDTH_FACTOR, _LEARNING_RATE, _BATCH = 2, 1e-3, 256
Mapping = Callable[[Tensor], Tensor]


def as_tokens(sentence: EncodedSentence) -> EncodedSentence:
    """The sentence with every token, including special tokens, as a separate word: for states of tokens."""
    place = np.arange(sentence.ids_T.size)
    return replace(
        sentence,
        words=("",) * place.size,
        word_T=place,
        spans_W2=np.stack([place, place + 1], axis=1),
    )


@dataclass(frozen=True, eq=False)
class TokenStates:
    """States of all tokens.

    Attributes:
        layers: states of each layer, (T, D), the inputs first.
        sentence_T: the sentence of each token.
    """

    layers: tuple[Tensor, ...]
    sentence_T: Int64Array

    def of(self, sentences: Sequence[int]) -> TokenStates:
        """The states of these sentences."""
        wanted = np.isin(self.sentence_T, np.array(sentences, dtype=np.int64))
        rows = torch.from_numpy(np.flatnonzero(wanted))
        return TokenStates(tuple(layer[rows] for layer in self.layers), self.sentence_T[wanted])


def token_states(
    model: HeadedModel, sentences: Sequence[EncodedSentence], engine: Engine, *, progress: Progress = silent_progress
) -> TokenStates:
    """States of all tokens of all sentences, in memory; sentences are numbered from 0.

    Raises:
        DataError: the model has no hidden states to record, or they are not finite.
    """
    parts: list[tuple[Tensor, ...]] = []
    numbers: list[Int64Array] = []
    done = 0
    with progress("hidden states", len(sentences), "sentences") as meter:
        for batch in layer_states(model, map(as_tokens, sentences), engine):
            parts.append(batch.states)
            numbers.append(batch.sentence_W + done)
            done += len(batch.sentences)
            meter.update(done)
    layers = tuple(torch.cat(layer) for layer in zip(*parts, strict=True))
    return TokenStates(layers, np.concatenate(numbers))


def identified(guess_TD: Tensor, inputs_TD: Tensor, sentence_T: Int64Array) -> BoolArray:
    """Whether a token's own input is, of all inputs of its sentence, the nearest to its guess by cosine, (T,).

    Args:
        guess_TD: guesses for all tokens.
        inputs_TD: their inputs.
        sentence_T: each token's sentence, in ascending order.
    """
    guess_TD, inputs_TD = (nn.functional.normalize(each, dim=-1) for each in (guess_TD, inputs_TD))
    _, sizes = np.unique(sentence_T, return_counts=True)
    found = []
    rows = sizes.tolist()
    for guess_nD, input_nD in zip(torch.split(guess_TD, rows), torch.split(inputs_TD, rows), strict=True):
        cosine_nn = guess_nD @ input_nD.T
        found.append((cosine_nn.diagonal() >= cosine_nn.amax(-1) - _EQUAL).numpy())
    return np.concatenate(found)


def linear_map(states_TD: Tensor, inputs_TD: Tensor) -> Mapping:
    """The affine map with the least squared error; a small ridge penalty keeps it solvable."""
    from sklearn.linear_model import Ridge

    states, inputs = states_TD.double().numpy(), inputs_TD.double().numpy()
    penalty = _RIDGE * states.var(0).mean() * len(states)
    fitted = Ridge(alpha=penalty, solver="cholesky").fit(states, inputs)
    return lambda rows_TD: torch.from_numpy(fitted.predict(rows_TD.double().numpy())).float()


def perceptron_map(states_TD: Tensor, inputs_TD: Tensor, *, epochs: int, seed: int) -> Mapping:
    """A perceptron with one hidden layer, trained on the squared error; reproducible for the same seed.

    Args:
        states_TD, inputs_TD: the training data; both are scaled to unit variance first.
        epochs: passes over the data.
        seed: seed of weights and order.
    """
    width, out = states_TD.shape[1], inputs_TD.shape[1]
    state_mean, state_scale = states_TD.mean(0), states_TD.std(0).clamp_min(1e-6)
    input_mean, input_scale = inputs_TD.mean(0), inputs_TD.std(0).clamp_min(1e-6)
    generator = torch.Generator().manual_seed(derived_seed(seed, "perceptron") >> 1)
    net = nn.Sequential(nn.Linear(width, _WIDTH_FACTOR * width), nn.GELU(), nn.Linear(_WIDTH_FACTOR * width, out))
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            bound = (1 / parameter.shape[1]) ** 0.5 if name.endswith("weight") else 0.0
            parameter.uniform_(-bound, bound, generator=generator)
    optimiser = torch.optim.Adam(net.parameters(), lr=_LEARNING_RATE)
    states, targets = (states_TD - state_mean) / state_scale, (inputs_TD - input_mean) / input_scale
    steps = epochs * -(-states.shape[0] // _BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, total_iters=max(1, steps))
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(states.shape[0], generator=generator), _BATCH):
            optimiser.zero_grad()
            loss = nn.functional.mse_loss(net(states[rows]), targets[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward untyped
            optimiser.step()
            schedule.step()

    @torch.no_grad()
    def guess(rows_TD: Tensor) -> Tensor:
        found: Tensor = net((rows_TD - state_mean) / state_scale) * input_scale + input_mean
        return found

    return guess


def identifiability(
    train: TokenStates,
    test: TokenStates,
    *,
    epochs: int,
    seed: int,
    progress: Progress = silent_progress,
) -> dict[str, list[float]]:
    """Share of test tokens that are identified in each layer, by map, starting with the inputs themselves.

    Args:
        train, test: states of different sentences.
        epochs, seed: for the perceptron.
    """
    found: dict[str, list[float]] = {name: [] for name in MAPS}
    with progress("identifiability", len(train.layers), "layers") as meter:
        for number, (train_TD, test_TD) in enumerate(zip(train.layers, test.layers, strict=True)):
            maps: dict[str, Mapping] = {
                "linear": linear_map(train_TD, train.layers[0]),
                "mlp": perceptron_map(train_TD, train.layers[0], epochs=epochs, seed=seed),
            }
            # Without a map, states and inputs can only be compared if they have the same width.
            if test_TD.shape[1] == test.layers[0].shape[1]:
                maps["nearest"] = lambda rows_TD: rows_TD
            for name in MAPS:
                hits = identified(maps[name](test_TD), test.layers[0], test.sentence_T) if name in maps else None
                found[name].append(float("nan") if hits is None else float(hits.mean()))
            meter.update(number + 1)
    return found
