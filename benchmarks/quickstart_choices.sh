#!/usr/bin/env bash
# What the quickstart's model was chosen from: the same text and seed, other layers, sizes and rates. One line each.
set -euo pipefail
try() {
    local name=$1
    shift
    local run=${BERTKIT_RUNS:-runs}/choice-$name
    bertkit pretrain quickstart --run-dir "$run" -q --set engine.examples=[] --set engine.pseudo_perplexity_sequences=0 \
        --set optimisation.batch_sequences=16 --set optimisation.schedule.peak=2.5e-3 --set optimisation.schedule.warmup_steps=100 \
        --set optimisation.steps=3000 "$@"
    grep -o '"accuracy/[a-z_]*": [0-9.]*' "$run/results.json" | tr '\n' ' '
    echo
}
bert='{family: bert, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 512, max_position_embeddings: 128, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0'
try bert-128x2 --set "model=$bert, initializer_range: 0.07}" --set tokenizer.vocab_size=4096 --set optimisation.steps=5000
try bert-128x2-init-0.02 --set "model=$bert, initializer_range: 0.02}" --set tokenizer.vocab_size=4096
try modernbert-128x2 --set tokenizer.vocab_size=4096 --set model.num_hidden_layers=2 --max-steps 2000
try modernbert-256x3 --set model.hidden_size=256 --set model.num_attention_heads=4 --set model.intermediate_size=384 --max-steps 1500
try modernbert-128x3
