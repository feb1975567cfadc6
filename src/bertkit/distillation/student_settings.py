"""What recipes for distillation on text and on a task share: the teacher, and the kinds of student.

Students made from their teacher's layers follow Sanh et al. 2019, arXiv:1910.01108 (DistilBERT), and Sun et al. 2019,
arXiv:1908.09355 (PKD); `models/families/bilstm.py` has the BiLSTM of Tang et al. 2019, arXiv:1903.12136.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from bertkit.models.conversion.layer_choice import ChoiceName
from bertkit.models.families.bilstm import BilstmStudent
from bertkit.models.registry import AnyEncoderConfig
from bertkit.settings import Settings, UnreadKey

TO_BE_GIVEN = "?"
"""The value of `teacher` in a recipe that works with any teacher that the user names."""


class Distillation(Settings):
    """What both kinds of recipe share."""

    teacher: str | tuple[str, ...] = Field(
        TO_BE_GIVEN,
        description="Teacher: a Hub id, a model directory or a run directory; of several, the mean of their logits"
        " is used; '?': the one given by --teacher. On text, it must have the student's tokenizer (unless"
        " mixed_vocabulary is among the objectives) and, if words are compared, a masked-LM head.",
    )
    control: bool = Field(
        False,
        description="Train the same student without its teacher, for comparison: on the text alone (as a masked LM"
        " if the recipe has no other objective), or with the task's own loss alone and without the preceding run.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.control:
            why = "control: true trains without a teacher"
            for name in ("distillation", "before", "teacher_store"):
                if name in type(self).model_fields:
                    yield UnreadKey(name, why, "leave control out", refused=False, told=False)

    @property
    def teachers(self) -> tuple[str, ...]:
        """All teachers."""
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher

    @property
    def teacher_in_json(self) -> str | list[str]:
        """For documents: the teacher's name, or a list of several."""
        return self.teacher if isinstance(self.teacher, str) else list(self.teacher)


class CopiedParts(Settings):
    """Parts of the teacher that a student is initialised from; the others are initialised randomly from the seed."""

    embeddings: bool = Field(
        True, description="Copy the teacher's embeddings; otherwise they are initialised randomly."
    )
    head: bool = Field(
        True, description="Copy the teacher's heads and pooler; otherwise they are initialised randomly."
    )


class TextStudent(CopiedParts):
    """A student of any configuration, initialised from parts of its teacher."""

    layers: ChoiceName | tuple[int, ...] | None = Field(
        "uniform",
        description="Layers of the teacher to copy, one for each of the student's: first, last, uniform (at equal"
        " distances, including both ends), skip (the last of each of equally large blocks), or their numbers from 0;"
        " null: none.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if not any(each.heads for each in recipe.objectives):
            yield UnreadKey("head", "no objective and no term reads a head, so the student has none")


class TeacherLayers(CopiedParts):
    """A student made from some of the teacher's own layers."""

    layers: ChoiceName | Literal["all"] | tuple[int, ...] = Field(
        "uniform",
        description="Layers of the teacher that make up the student: first, last, uniform (at equal distances,"
        " including both ends), skip (the last of each of equally large blocks), all, or their numbers from 0.",
    )
    number: int | None = Field(None, ge=1, description="Number of layers; null: half of the teacher's.")
    form: Literal["teacher", "distilbert"] = Field(
        "teacher",
        description="Family of the student: teacher: the same as the teacher's; distilbert: DistilBERT's, without"
        " segment types and pooler.",
    )
    init: Literal["teacher", "random"] = Field(
        "teacher",
        description="teacher: weights are copied from the teacher; random: the same shape, with all weights"
        " initialised randomly.",
    )
    of: str | None = Field(
        None,
        description="Model that the layers, embeddings and pooler are copied from, below a new classifier; '?': the"
        " pretrained model that the teacher's run started from; null: the teacher.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"of"})

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.init == "random":
            why = "student.init is random: nothing is taken from the teacher except its shape"
            yield UnreadKey("embeddings", why)
            yield UnreadKey("head", why)
            if isinstance(self.layers, str) and self.layers != "all":
                yield UnreadKey("layers", f"{why}, and student.number is the number of layers")

    @model_validator(mode="after")
    def _named_or_listed(self) -> TeacherLayers:
        if self.number is not None and (self.layers == "all" or not isinstance(self.layers, str)):
            raise ValueError("number works only with a named choice of layers; leave it out for a list or all")
        return self


class GivenModel(Settings):
    """A separate model with its own tokenizer."""

    model: str = Field(
        description="The student: a Hub id, a model directory or a run directory; '?': the one given by --student."
    )


class NewModel(Settings):
    """A model of any size with randomly initialised weights and the teacher's tokenizer."""

    config: AnyEncoderConfig = Field(description="Configuration of the encoder; `family` selects the architecture.")


_STUDENTS = {GivenModel: "model", NewModel: "config", BilstmStudent: "family"}
"""The key that only a student of this kind has."""


def _student_kind(student: Any) -> str:
    """The tag of the kind of student, which unlike its key is not in the data: an error lists both in its location."""
    for kind, key in _STUDENTS.items():
        if key in student if isinstance(student, dict) else isinstance(student, kind):
            return f"<{key}>"
    return "<layers>"


AnyStudent = Annotated[
    Annotated[TeacherLayers, Tag("<layers>")]
    | Annotated[GivenModel, Tag("<model>")]
    | Annotated[NewModel, Tag("<config>")]
    | Annotated[BilstmStudent, Tag("<family>")],
    Discriminator(_student_kind),
]
