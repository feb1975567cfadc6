"""The engine section of a recipe: settings for speed and reporting, which are not hashed.

A separate file without torch, because command-line options are generated from it. Sibling engine.py resolves `auto`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertkit.jobs.settings import ExecutorSettings


class EngineConfig(ExecutorSettings):
    """Where and how fast the run computes, and how often it reports; does not change the result beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device to compute on.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Number format of matrix products; auto: bf16 if the processor has instructions for it."
    )
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Number of tokens computed at once (the micro-batch); affects only speed and memory."
    )
    kernels: Literal["auto", "compiled", "torch"] = Field(
        "auto",
        description="On a CPU, loops compiled for this processor in place of torch's operators. auto: in bf16, if"
        " there is a C++ compiler; compiled: also in fp32; torch: only torch's operators and its choice of library for"
        " matrix products, which may take twice as long in fp32. On a GPU, auto: Triton kernels for attention.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Gradient checkpointing: layers keep only their inputs and are recomputed in the backward pass."
        " Less memory, a third more arithmetic, the same results.",
    )
    compile: bool = Field(
        False,
        description="Whether layers are compiled for training (torch.compile), for GPUs. On a CPU the results are"
        " the same up to rounding; on a GPU dropout draws other numbers.",
    )
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Number of processes that prepare batches; 0: a thread of the training process, the fastest on a"
        " CPU.",
    )
    report_to: list[Literal["wandb", "mlflow"]] = Field(
        default_factory=list,
        description="Experiment trackers that the run is also reported to: wandb (Weights & Biases), mlflow; each needs"
        " the extra of its name.",
    )
    log_every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Updates between two lines of metrics.jsonl; auto: 20 on text, 10 on a task."
    )
    evaluate_every_steps: int = Field(
        1000, ge=1, description="On text: updates between two evaluations on held-out text."
    )
    evaluation_sequences: int = Field(512, ge=1, description="Number of held-out sequences per evaluation.")
    pseudo_perplexity_sequences: int = Field(
        16,
        ge=0,
        description="Held-out sequences scored at the end with tokens masked one at a time: every token, or 64"
        " tokens of a long sequence.",
    )
    translated_pairs: int = Field(
        200, ge=0, description="Number of held-out pairs of parallel text to translate at the end, for BLEU; 0: none."
    )
    save_every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Updates between two checkpoints; auto: 1000 on text, 500 on a task."
    )
    keep_checkpoints: Annotated[int, Field(ge=0)] | Literal["auto", "all"] = Field(
        "auto",
        description="Number of newest checkpoints to keep, or all; 0: none after the run; auto: 2 on text, 0 on a"
        " task.",
    )
    models_at_words: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list,
        max_length=1000,
        description="On text: numbers of words, separated by white space, after which the model is saved in"
        " RUN/models, such as [1000000, 2000000]; every pass counts its words again.",
    )
    expected_files: list[str] = Field(
        default_factory=list,
        description="On text: names, up to their first dot, of the files that the sources should have; unexpected"
        " and missing files are named in a warning.",
    )
    examples: list[str] | None = Field(
        default_factory=list,
        description="On text: texts with [MASK] to fill in after training; without any, five sentences of the held-out"
        " text, with a word masked in each; null: none.",
    )
    follow_times: str | None = Field(
        None,
        description="With schedule.clock: time, a run directory whose recorded times are used in place of the"
        " clock's, for an exact repetition.",
    )
    feature_store_gb: float = Field(
        8.0,
        ge=0,
        description="Maximum disk space in GB for the features of a frozen encoder during the run"
        " (method.name=features); what does not fit is recomputed in every pass.",
    )
    teacher_store_gb: float = Field(
        4.0,
        ge=0,
        description="Maximum disk space in GB for a teacher's outputs on a task in the cache; what does not fit is"
        " recomputed in every pass.",
    )
    ranks: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of processes on this machine that train together, each on its share of every batch;"
        " torchrun starts them on several machines.",
    )
    rank_timeout_seconds: float = Field(
        600.0,
        ge=1,
        le=86_400,
        description="With several ranks: seconds without an answer after which a rank counts as lost and the run"
        " stops.",
    )
    shard: bool = Field(
        False,
        description="With several ranks: shard weights, gradients and moments over the ranks, for models that do not"
        " fit on one; slower. A checkpoint continues with any number of ranks, sharded or not.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"models_at_words", "expected_files", "kernels", "activation_checkpointing", "compile", "report_to"}
    )

    @model_validator(mode="after")
    def _runs_or_ranks(self) -> Self:
        if self.is_parallel and self.ranks > 1:
            raise ValueError(
                f"--nproc {self.ranks} (engine.ranks) cannot be combined with --jobs {self.jobs} (engine.jobs) or"
                f" --executor {self.executor}: choose several processes for each run, or several runs at a time"
            )
        return self

    @model_validator(mode="after")
    def _compiled_or_recomputed(self) -> Self:
        if self.compile and self.activation_checkpointing:
            raise ValueError(
                "compile and activation_checkpointing do not work together yet; set only one of them to true"
            )
        return self

    @model_validator(mode="after")
    def _words_ascend(self) -> Self:
        marks = self.models_at_words
        if any(after <= before for before, after in pairwise(marks)):
            raise ValueError(f"models_at_words must be in ascending order without repetition; found {marks}")
        return self
