"""Recipes of models that predict the next token, or a target, have the values of their papers and released code."""

from __future__ import annotations

import pytest
import torch

from bertkit.pretraining.recipe import load_recipe


def test_t5_has_the_values_of_the_paper() -> None:
    recipe = load_recipe("t5-small")
    assert (recipe.optimisation.batch_sequences, recipe.optimisation.steps) == (128, 2**19)
    (objective,) = recipe.objectives
    assert objective.model_dump() == {
        "weight": 1.0, "rate": 0.15, "mean_span": 3.0, "z_loss": 1e-4, "label_smoothing": 0.0
    }  # fmt: skip
    # From 568 tokens the released code makes 512 and 114, each including its end token.
    assert objective.sample_tokens(568 + 2) == pytest.approx(512 + 114 + 2, abs=3)
    weight = torch.nn.Parameter(torch.full((6, 5), 1.0))
    optimizer = recipe.optimisation.optimizer.build(torch.nn.ParameterList([weight]))
    schedule = recipe.optimisation.schedule
    for step in (0, 9_999, 40_000):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step, 2**19)
        weight.data.fill_(1.0)
        optimizer.state[weight]["step"] = torch.tensor(float(step))
        optimizer.state[weight].update(row_var=torch.zeros(6, 1), col_var=torch.zeros(1, 5))
        weight.grad = torch.full_like(weight, 0.3)
        optimizer.step()
        # All gradients are equal, so each weight (of size 1) moves by the learning rate itself.
        assert 1 - weight[0, 0].item() == pytest.approx(1 / max(step + 1, 10_000) ** 0.5, rel=0.02)


def test_t5s_rare_words_are_updated_as_by_mesh_tensorflow() -> None:
    """Its epsilon1 of 1e-30 is not a floor: rows whose squared gradients are tiny move as far as all others."""
    generator = torch.Generator().manual_seed(3)
    scale_V1 = torch.logspace(-3, -7, 50)[:, None]
    gradients = [torch.randn(50, 8, generator=generator) * scale_V1 for _ in range(4)]
    weight = torch.nn.Parameter(torch.randn(50, 8, generator=generator))
    weight.data[7] *= 1e-3
    expected, row_V1, column_1E = weight.detach().double(), torch.zeros(50, 1).double(), torch.zeros(1, 8).double()
    optimizer = load_recipe("t5-small").optimisation.optimizer.build(torch.nn.ParameterList([weight]))
    for step, gradient in enumerate(gradients, start=1):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        weight.grad = gradient.clone()
        optimizer.step()
        squares = gradient.double().square() + 1e-30
        decay = 1 - step**-0.8
        row_V1 = decay * row_V1 + (1 - decay) * squares.mean(1, keepdim=True)
        column_1E = decay * column_1E + (1 - decay) * squares.mean(0, keepdim=True)
        update = gradient.double() / (row_V1 * column_1E / row_V1.mean()).sqrt()
        size = max(1e-3, expected.square().mean().sqrt().item())
        expected = expected - 0.01 * size * update / max(1.0, update.square().mean().sqrt().item())
    moved = (weight.detach() - expected).abs().max().item()
    assert moved < 1e-5
    weight.grad = torch.zeros_like(weight)
    weight.grad[0] = 1e-4  # words that occur in no batch
    optimizer.step()
    assert weight.isfinite().all()


def test_bart_has_the_values_of_the_paper() -> None:
    recipe = load_recipe("bart-base")
    assert (recipe.optimisation.batch_sequences, recipe.optimisation.steps) == (8000, 500_000)
    (objective,) = recipe.objectives
    assert objective.model_dump() == {
        "weight": 1.0, "rate": 0.3, "mean_span": 3.0, "permute_sentences": True, "label_smoothing": 0.0
    }  # fmt: skip
    assert 1 < objective.sample_tokens(512) / 512 < 2


def test_the_transformer_has_the_values_of_the_paper() -> None:
    for name, width, heads, dropout, steps in (("base", 512, 8, 0.1, 100_000), ("big", 1024, 16, 0.3, 300_000)):
        recipe = load_recipe(f"transformer-{name}")
        model = recipe.model.model_dump()
        assert (model["hidden_size"], model["num_attention_heads"], model["num_hidden_layers"]) == (width, heads, 6)
        assert (model["intermediate_size"], model["hidden_dropout_prob"]) == (4 * width, dropout)
        schedule, optimizer = recipe.optimisation.schedule, recipe.optimisation.optimizer
        assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.98), 1e-9, 0.0)  # type: ignore[union-attr]  # AdamW has them
        assert recipe.optimisation.steps == steps
        for number in (1, 100, 4000, 4001, 90_000):  # section 5.3, equation 3
            published = width**-0.5 * min(number**-0.5, number * 4000**-1.5)
            assert schedule.learning_rate(number - 1, steps) == pytest.approx(published, rel=1e-9)
        assert recipe.objectives[0].model_dump()["label_smoothing"] == 0.1


def test_gpt_has_the_values_of_the_paper_and_its_code() -> None:
    recipe = load_recipe("gpt")
    assert recipe.data.layout.choice == "contiguous"
    assert (recipe.data.sequence_length, recipe.optimisation.batch_sequences) == (512, 64)
    assert [objective.heads for objective in recipe.objectives] == [("causal_lm",)]
    optimizer, schedule = recipe.optimisation.optimizer, recipe.optimisation.schedule
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay) == ((0.9, 0.999), 1e-8, 0.01)
    assert schedule.learning_rate(2000, recipe.optimisation.steps) == pytest.approx(2.5e-4)
    assert schedule.learning_rate(recipe.optimisation.steps, recipe.optimisation.steps) == pytest.approx(0, abs=1e-12)
    assert recipe.model.model_dump()["embedding_dropout_prob"] == 0.1


def test_gpt2_differs_from_gpt_in_tokens_length_batch_and_norms() -> None:
    recipe = load_recipe("gpt2")
    assert (recipe.tokenizer.type, recipe.tokenizer.vocab_size) == ("byte-bpe", 50_257)
    assert (recipe.data.sequence_length, recipe.optimisation.batch_sequences) == (1024, 512)
    assert recipe.model.model_type == "gpt2"


def test_elmo_has_the_values_of_its_code() -> None:
    recipe = load_recipe("elmo")
    optimisation = recipe.optimisation
    assert optimisation.schedule.learning_rate(0, 100) == optimisation.schedule.learning_rate(99, 100) == 0.2
    assert optimisation.optimizer.clip_norm == 10.0
    assert optimisation.steps == 10 * (768_648_884 // (128 * 20 * 3))
    assert [objective.weight for objective in recipe.objectives] == [0.5 * recipe.data.sequence_length] * 2


def test_transformer_xl_has_the_values_of_its_script() -> None:
    recipe = load_recipe("transformer-xl")
    schedule = recipe.optimisation.schedule
    assert schedule.learning_rate(0, 200_000) == pytest.approx(2.5e-4)
    assert schedule.learning_rate(100_000, 200_000) == pytest.approx(1.25e-4)
    assert recipe.optimisation.optimizer.clip_norm == 0.25
    assert recipe.optimisation.batch_sequences == 60
    assert recipe.data.sequence_length == recipe.model.model_dump()["mem_len"] == 150


def test_xlnet_has_the_values_of_its_table_7_and_code() -> None:
    recipe = load_recipe("xlnet-large")
    schedule, peak = recipe.optimisation.schedule, 4e-4
    assert schedule.learning_rate(20_000, 500_000) == pytest.approx(peak / 2, rel=1e-3)
    assert schedule.learning_rate(500_000, 500_000) == pytest.approx(peak / 1000)
    assert recipe.optimisation.batch_sequences == 8192
    objective = recipe.objectives[0]
    assert objective.expected_count(512) == 85
    assert load_recipe("xlnet-base").optimisation.schedule.peak == 1e-4


def test_the_universal_transformer_has_the_values_of_its_code() -> None:
    base, adaptive = (load_recipe(f"universal-transformer{ending}") for ending in ("", "-adaptive"))
    for recipe, steps in ((base, 6), (adaptive, 12)):
        model, schedule = recipe.model.model_dump(), recipe.optimisation.schedule
        assert (model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]) == (1024, 4096, 16)
        assert (model["num_hidden_layers"], model["num_decoder_layers"]) == (steps, None)
        dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout_prob")
        assert [model[name] for name in dropouts] == [0.3, 0.1, 0.1]
        assert recipe.optimisation.optimizer.betas == (0.9, 0.997)  # type: ignore[union-attr]  # AdamW has them
        for number in (1, 100, 8000, 8001, 90_000):
            published = 2 * 1024**-0.5 * min(number**-0.5, number * 8000**-1.5)
            assert schedule.learning_rate(number - 1, 100_000) == pytest.approx(published, rel=1e-9)
    assert {objective.term: objective.weight for objective in adaptive.objectives} == {
        "seq2seq_lm": 1.0,
        "pondering": 0.02,
    }
    model = adaptive.model.model_dump()
    assert (model["halting"], model["halting_epsilon"], model["halting_bias"]) == (True, 0.01, 1.0)
