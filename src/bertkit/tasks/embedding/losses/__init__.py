"""The losses on vectors of texts, by their name in recipes; a new one is one file and one entry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.tasks.embedding.losses.angle import AngleLoss
from bertkit.tasks.embedding.losses.contrastive import ContrastiveLoss, OnlineContrastiveLoss
from bertkit.tasks.embedding.losses.cosent import CosentLoss
from bertkit.tasks.embedding.losses.cosine import CosineLoss
from bertkit.tasks.embedding.losses.kl_divergence import KlDivergenceLoss
from bertkit.tasks.embedding.losses.margin import MarginLoss
from bertkit.tasks.embedding.losses.multiple_negatives import MultipleNegativesLoss
from bertkit.tasks.embedding.losses.simcse import SimcseLoss
from bertkit.tasks.embedding.losses.softmax import SoftmaxLoss
from bertkit.tasks.embedding.losses.teacher_vectors import TeacherVectorLoss
from bertkit.tasks.embedding.losses.triplet import TripletLoss
from bertkit.tasks.embedding.losses.tsdae import TsdaeLoss

AnyLoss = Annotated[
    SoftmaxLoss
    | CosineLoss
    | TripletLoss
    | CosentLoss
    | AngleLoss
    | MultipleNegativesLoss
    | ContrastiveLoss
    | OnlineContrastiveLoss
    | MarginLoss
    | KlDivergenceLoss
    | SimcseLoss
    | TsdaeLoss
    | TeacherVectorLoss,
    Field(discriminator="name"),
]
