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
grep -oE '^[a-z0-9-]+==[^ ]+' requirements/dev.lock | grep -v '^numpy' | sort -u > "$scratch/dev"
compile --generate-hashes pyproject.toml --extra cpu -c "$scratch/dev" -o requirements/serve.lock
without_torch requirements/optimum.lock requirements/optimum.in
for peer in txtai infinity; do without_torch "requirements/peers-$peer.lock" "requirements/peers-$peer.in"; done
compile --generate-hashes requirements/audit.in -o requirements/audit.lock
