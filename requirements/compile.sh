#!/usr/bin/env bash
# Pins the dependencies of pyproject.toml with hashes, for x86_64 and aarch64 alike. Needs uv on the path.
# torch and its CUDA libraries stay out: the Makefile installs torch first, in whichever build the index offers.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH=2.13.0
compile() { uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url "$@"; }
scratch=$(mktemp -d); trap 'rm -rf "$scratch"' EXIT
echo "torch==$TORCH" > "$scratch/torch"

without_torch() { # LOCK ARGUMENTS…: compile once to learn which packages torch brings, then again without them
    local lock=$1; shift
    compile "$@" -c "$scratch/torch" -o "$scratch/all"
    local skip=()
    while read -r name; do skip+=(--no-emit-package "$name"); done \
        < <(grep -oE '^(nvidia|cuda|triton|torch)[a-z0-9-]*' "$scratch/all" | sort -u)
    compile --generate-hashes "$@" -c "$scratch/torch" "${skip[@]}" -o "$lock"
}

without_torch requirements/dev.lock pyproject.toml --extra dev
# Packages of which it has one version for every Python.
grep -oE '^[a-z0-9-]+==[^ ]+' requirements/dev.lock | sort -u |
    awk -F== '{ seen[$1]++; pin[$1] = $0 } END { for (name in pin) if (seen[name] == 1) print pin[name] }' > "$scratch/dev"
compile --generate-hashes pyproject.toml --extra cpu --extra traces -c "$scratch/dev" -o requirements/serve.lock
# The other images, whole: indexer (Ray, Qdrant), train (torch with its CUDA libraries) and gpu (x86_64 alone has its wheels).
compile --generate-hashes pyproject.toml --extra cpu --extra ray --extra qdrant -c "$scratch/dev" -o requirements/indexer.lock
compile --generate-hashes pyproject.toml --extra cpu --extra train --extra ray --extra qdrant \
    -c "$scratch/dev" -c "$scratch/torch" -o requirements/train.lock
grep -vE '^(onnxruntime|faiss)' "$scratch/dev" > "$scratch/gpu"
uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.12 --no-header --no-annotate --no-emit-index-url \
    --generate-hashes pyproject.toml --extra gpu --extra traces -c "$scratch/gpu" -o requirements/gpu.lock
without_torch requirements/optimum.lock requirements/optimum.in
for peer in txtai infinity; do without_torch "requirements/peers-$peer.lock" "requirements/peers-$peer.in"; done
compile --generate-hashes requirements/audit.in -o requirements/audit.lock
