#!/bin/sh
# Runs the reference recipes and the ablations of examples/ on the real sample, and the default run
# on synthetic data. Writes the results to docs/benchmarks/; `make reference` calls this.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
recsys=$PWD/.venv/bin/recsys
results=$PWD/docs/benchmarks/reference
raw=$RECSYS_DATA/criteo_kaggle_137k/train.txt.gz
mkdir -p "$results"
cp examples/ablate_*.toml "$work"
cd "$work" # records then name files without a path

"$recsys" prepare criteo-kaggle "$raw" --out criteo_kaggle_137k
for seed in 0 1 2; do
    for embeddings in recsys torch fbgemm; do
        "$recsys" train criteo_kaggle_137k --run "sgd-$embeddings-$seed" \
            --set "seed=$seed" --set "embeddings=$embeddings"
        "$recsys" train criteo_kaggle_137k --run "adagrad-$embeddings-$seed" \
            --set "seed=$seed" --set "embeddings=$embeddings" \
            --set optimizer.name=adagrad --set optimizer.lr=0.01 --set batch_size=1024
    done
done
"$recsys" train synthetic:criteo-kaggle --run synthetic
cp synthetic/run.json "$results/../synthetic.json"
for run in sgd-* adagrad-*; do
    cp "$run/run.json" "$results/$run.json"
done
for name in embeddings precision; do
    "$recsys" ablate "ablate_$name.toml" --set data=criteo_kaggle_137k --run "$name"
    cp "$name/ablate.json" "$results/../ablate_$name.json"
done
