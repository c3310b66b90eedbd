#!/bin/sh
# Writes what the images install, with a hash for each file: `make lock`. It asks the package index that uv is set up for.
#
# TORCH_INDEX=URL: an index with CPU builds of torch. Then torch.txt has their hashes. Without it torch.txt has torch's
# version alone, because the default index has only CUDA builds for x86-64. `sh images/lock.sh torch` writes torch.txt
# alone, for the version that is locked.
set -eu
cd "$(dirname "$0")/.."
compile() {
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
    --no-emit-index-url --no-emit-find-links "$@"
}
[ "${1:-}" = torch ] || compile pyproject.toml --extra gpu --extra nvml --extra video --extra cli --extra metrics --extra jwt --extra otel --output-file images/gpu.txt
version=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' images/gpu.txt)
if [ -n "${TORCH_INDEX:-}" ]; then
  echo "$version" | compile - --index "$TORCH_INDEX" --no-deps --output-file images/torch.txt
else
  echo "$version" >images/torch.txt
fi
[ "${1:-}" != torch ] || exit 0
# What torch needs on a CPU is in cpu.txt, and torch itself, whose files are on an index of their own, in torch.txt.
compile pyproject.toml --extra worker --extra video --extra cli --extra metrics --extra jwt --extra otel --output-file images/cpu.txt --constraint images/gpu.txt \
  --no-emit-package torch $(sed -n 's/^\(nvidia-[a-z0-9-]*\|cuda-[a-z0-9-]*\|triton\)==.*/--no-emit-package \1/p' images/gpu.txt)
compile pyproject.toml --extra jwt --extra cli --extra otel --output-file images/gateway.txt --constraint images/gpu.txt
echo "hatchling
editables" | compile - --output-file images/build.txt
