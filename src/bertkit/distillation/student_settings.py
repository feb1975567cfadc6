"""What a student begins as: layers of its teacher, a model that was pretrained small, or weights drawn anew.

Sun et al. 2019, PKD, arXiv:1908.09355 (the teacher's first layers); Turc et al. 2019, arXiv:1908.08962 (a small
pretrained model); Tang et al. 2019, arXiv:1903.12136 (a BiLSTM that has learnt nothing yet). Which of them it is, the
keys say:

    student: {layers: uniform, number: 3}                 layers of the teacher
    student: {layers: all}                                the teacher itself, which a method then makes smaller
    student: {model: runs/bert-mini}                      a model of its own, with its own tokenizer
    student: {config: {family: bert, hidden_size: 192}}   weights drawn anew, with the teacher's tokenizer
    student: {family: bilstm}                             a BiLSTM with a vocabulary of its own
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from bertkit.models.bilstm import BilstmStudent
from bertkit.models.layer_choice import ChoiceName
from bertkit.models.registry import AnyEncoderConfig
from bertkit.settings import Settings


class TeacherLayers(Settings):
    """Some of the teacher's own layers."""

    layers: ChoiceName | Literal["all"] | tuple[int, ...] = Field(
        "uniform",
        description="Which: first, last, uniform (at equal distances, both ends among them), skip (the last of each of"
        " equally large blocks), all, or their numbers from 0.",
    )
    number: int | None = Field(None, ge=1, description="How many; null: half of the teacher's.")
    embeddings: bool = Field(True, description="Take the teacher's embeddings, else draw them anew.")
    head: bool = Field(True, description="Take the teacher's head and pooler, else draw them anew.")
    form: Literal["teacher", "distilbert"] = Field(
        "teacher", description="The teacher's family, or that of DistilBERT, without segment types and pooler."
    )
    init: Literal["teacher", "random"] = Field(
        "teacher", description="random: the same shape with all weights drawn anew."
    )

    @model_validator(mode="after")
    def _named_or_listed(self) -> TeacherLayers:
        if self.number is not None and (self.layers == "all" or not isinstance(self.layers, str)):
            raise ValueError("number goes with a name of layers; a list, or all, says how many there are by itself")
        return self


class GivenModel(Settings):
    """A model that is there already, with its own tokenizer."""

    model: str = Field(description="A Hub id, a model or a run directory; '?': the one that --student names.")


class NewModel(Settings):
    """A model of any sizes that has learnt nothing yet; it reads with the teacher's tokenizer."""

    config: AnyEncoderConfig = Field(description="The encoder; `family` names its kind.")


_TAGS = {"model": "given", "config": "drawn", "family": "bilstm"}
"""What a key says of the student that has it."""


def _kind(student: Any) -> str:
    """Which kind of student it is: by its class, or by the keys that it is written with."""
    if isinstance(student, dict):
        return next((tag for key, tag in _TAGS.items() if key in student), "copied")
    classes = {GivenModel: "given", NewModel: "drawn", BilstmStudent: "bilstm"}
    return next((tag for kind, tag in classes.items() if isinstance(student, kind)), "copied")


AnyStudent = Annotated[
    Annotated[TeacherLayers, Tag("copied")]
    | Annotated[GivenModel, Tag("given")]
    | Annotated[NewModel, Tag("drawn")]
    | Annotated[BilstmStudent, Tag("bilstm")],
    Discriminator(_kind),
]
