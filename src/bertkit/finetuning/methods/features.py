"""Feature-based training: the encoder is frozen; a BiLSTM over its states and the head are trained.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 5.3 and table 7. The network is in models/feature_lstm.py.
This method wraps the encoder of a checkpoint in it and stores its features during the run (feature_store.py), so an
epoch costs only the LSTM. The result is a model of the family `feature-lstm`, which contains the encoder.

Quirk: the paper specifies neither the learning rate nor the dropout of the LSTM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

from pydantic import Field, ValidationError

from bertkit.errors import UsageError
from bertkit.finetuning.methods.feature_store import FeatureStore, fill
from bertkit.models.feature_lstm import FeatureLstm, FeatureLstmConfig, LayerChoice
from bertkit.models.headed import HeadedModel
from bertkit.tasks.base import Features
from bertkit.training.method import Method, RunResources, TrainingData


class FeatureBased(Method):
    """A BiLSTM and the head are trained on the states of the frozen encoder."""

    name: Literal["features"] = "features"
    layers: LayerChoice = Field(
        "concat-last-four",
        description="Hidden states that the LSTM reads, as in table 7 of the BERT paper; by default the best choice"
        " there.",
    )
    lstm_width: int = Field(768, ge=1, description="Width of the LSTM in each direction.")
    lstm_layers: int = Field(2, ge=1, description="Number of LSTM layers.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before each LSTM layer and before the classifier.")

    trains_head_alone: ClassVar[bool] = True

    def is_trained(self, depth: int, epoch: int) -> bool:
        return depth == 0

    def prepare(self, model: HeadedModel, seed: int, data: TrainingData | None = None) -> HeadedModel:
        """The encoder wrapped in a `FeatureLstm`, or the model itself if it is one with these settings."""
        wrapped = self.with_lstm(model)
        if wrapped is not model:
            drawn = {name for name, _ in wrapped.named_parameters() if not name.startswith("encoder.base.")}
            wrapped.initialise(seed, only=drawn)
            wrapped.eval()
        return wrapped

    def with_lstm(self, model: HeadedModel) -> HeadedModel:
        """As `prepare`, without drawing the weights of LSTM and head.

        Raises:
            UsageError: the encoder has too few layers.
        """
        given = model.encoder
        base = given.base if isinstance(given, FeatureLstm) else given
        settings = self.model_dump(exclude={"name"})
        try:
            config = FeatureLstmConfig(base=base.config, **settings)
        except ValidationError as error:
            raise UsageError(f"method.{error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
        if given.config == config:
            return model
        return HeadedModel(FeatureLstm(config, base), model.head_names, labels=model.labels)

    @contextmanager
    def session(self, model: HeadedModel, splits: Sequence[Features], resources: RunResources) -> Iterator[None]:
        encoder = model.encoder
        assert isinstance(encoder, FeatureLstm)
        store = FeatureStore(resources.directory, encoder.features_width)
        try:
            fill(store, model, splits, resources)
            encoder.store = store
            yield
        finally:
            encoder.store = None
            store.close()
