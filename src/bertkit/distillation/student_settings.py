"""What recipes that distil on text and on a task have in common: the teacher, and the kinds of student.

Students made of their teacher's layers follow Sanh et al. 2019, arXiv:1910.01108 (DistilBERT), and Sun et al. 2019,
arXiv:1908.09355 (PKD); `models/bilstm.py` has the BiLSTM of Tang et al. 2019, arXiv:1903.12136.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from bertkit.models.bilstm import BilstmStudent
from bertkit.models.layer_choice import ChoiceName
from bertkit.models.registry import AnyEncoderConfig
from bertkit.settings import Settings, UnreadKey

TO_BE_GIVEN = "?"
"""The value of `teacher` in a recipe that takes whatever teacher its user names."""


class Distillation(Settings):
    """What both kinds of recipe have."""

    teacher: str | tuple[str, ...] = Field(
        TO_BE_GIVEN,
        description="Model to learn from: a Hub id, a model or a run directory; several: the mean of their logits; '?':"
        " the one that --teacher names. On text it has the student's tokenizer (unless mixed_vocabulary is among the"
        " objectives), and a masked LM's head where words are compared.",
    )
    control: bool = Field(
        False,
        description="The same student without its teacher, for comparison: by the text alone (as a masked LM, where the"
        " recipe has no other objective), or by the task's own loss alone, without the run before.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.control:
            why = "control: true learns without a teacher"
            for name in ("distillation", "before", "teacher_store"):
                if name in type(self).model_fields:
                    yield UnreadKey(name, why, "leave control out", refused=False, told=False)

    @property
    def teachers(self) -> tuple[str, ...]:
        """All of them."""
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher

    @property
    def teacher_in_json(self) -> str | list[str]:
        """For documents: the teacher's name, or the names of several."""
        return self.teacher if isinstance(self.teacher, str) else list(self.teacher)


class CopiedParts(Settings):
    """Parts of the teacher that a student is initialised from; the others are drawn by the seed."""

    embeddings: bool = Field(True, description="Take the teacher's embeddings, else initialise them randomly.")
    head: bool = Field(True, description="Take the teacher's heads and pooler, else initialise them randomly.")


class TextStudent(CopiedParts):
    """A student of any configuration, initialised from parts of its teacher."""

    layers: ChoiceName | tuple[int, ...] | None = Field(
        "uniform",
        description="Which of the teacher's layers, one for each of the student's: first, last, uniform (at equal"
        " distances, both ends among them), skip (the last of each of equally large blocks), or their numbers from 0;"
        " null: none.",
    )


class TeacherLayers(CopiedParts):
    """A student made of some of the teacher's own layers."""

    layers: ChoiceName | Literal["all"] | tuple[int, ...] = Field(
        "uniform",
        description="Which: first, last, uniform (at equal distances, both ends among them), skip (the last of each of"
        " equally large blocks), all, or their numbers from 0.",
    )
    number: int | None = Field(None, ge=1, description="How many; null: half of the teacher's.")
    form: Literal["teacher", "distilbert"] = Field(
        "teacher", description="The teacher's family, or that of DistilBERT, without segment types and pooler."
    )
    init: Literal["teacher", "random"] = Field(
        "teacher", description="random: the same shape, with all weights randomly initialised."
    )
    of: str | None = Field(
        None,
        description="Model whose layers, embeddings and pooler they are, below a new classifier; '?': the pretrained"
        " one that the teacher's run started from; null: the teacher.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"of"})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.init == "random":
            why = "student.init is random: nothing is taken from the teacher but its shape"
            yield UnreadKey("embeddings", why)
            yield UnreadKey("head", why)
            if isinstance(self.layers, str) and self.layers != "all":
                yield UnreadKey("layers", f"{why}, and student.number is the number of layers")

    @model_validator(mode="after")
    def _named_or_listed(self) -> TeacherLayers:
        if self.number is not None and (self.layers == "all" or not isinstance(self.layers, str)):
            raise ValueError("number goes with a name of layers; a list, or all, gives their number by itself")
        return self


class GivenModel(Settings):
    """A model of its own, with its own tokenizer."""

    model: str = Field(description="A Hub id, a model or a run directory; '?': the one that --student names.")


class NewModel(Settings):
    """A model of any sizes with randomly initialised weights; it reads with the teacher's tokenizer."""

    config: AnyEncoderConfig = Field(description="The encoder; `family` names its kind.")


_STUDENTS = {GivenModel: "model", NewModel: "config", BilstmStudent: "family"}
"""The key that only a student of this kind has."""


def _student_kind(student: Any) -> str:
    """The key that decides the kind of student; `layers` where it has none of these keys."""
    if isinstance(student, dict):
        return next((key for key in _STUDENTS.values() if key in student), "layers")
    return next((key for kind, key in _STUDENTS.items() if isinstance(student, kind)), "layers")


AnyStudent = Annotated[
    Annotated[TeacherLayers, Tag("layers")]
    | Annotated[GivenModel, Tag("model")]
    | Annotated[NewModel, Tag("config")]
    | Annotated[BilstmStudent, Tag("family")],
    Discriminator(_student_kind),
]
