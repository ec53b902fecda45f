#!/bin/sh
# Measures the numbers of docs/synthetic.md into docs/benchmarks/; `make coverage` calls this.
# For a trial of a minute, write to another folder: sh docs/benchmarks/coverage.sh OUT 200000
set -eu

results=${1:-$PWD/docs/benchmarks}
max_samples=${2:-}
bin=${BIN:-$PWD/.venv/bin}
raw=$RECSYS_DATA/criteo_kaggle_137k/train.txt.gz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$bin/recsys" prepare criteo-kaggle "$raw" --out "$work/store"
"$bin/python" docs/benchmarks/synthetic_coverage.py "$work/store" \
    --out "$results/synthetic_coverage.json" ${max_samples:+--max-samples "$max_samples"}
"$bin/recsys" train synthetic:criteo-kaggle --run "$work/reached" \
    --set "synthetic.num_samples=${max_samples:-5000000}" --set save_model=false \
    --set embeddings=fbgemm --set optimizer.name=adagrad --set optimizer.lr=0.01 \
    --set batch_size=1024
"$bin/python" docs/benchmarks/synthetic_reached.py "$work/reached" \
    --out "$results/synthetic_reached.json"
