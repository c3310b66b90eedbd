# syntax=docker/dockerfile:1
# Three images from one file: --target gpu (CUDA) and --target cpu for workers, and --target gateway, which has neither
# torch nor the engine. Each holds a checkout, installed where it lies:
# `tasks` and `petiole.tasks` are the same modules there. images/ has what they install, with hashes.

# `make pin` adds the digests that these tags have.
ARG PYTHON_IMAGE=python:3.12-slim
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# --- cpu: what needs a compiler -------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu-build
# An index with CPU-only builds of torch makes this image gigabytes smaller.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PATH=/srv/venv/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /srv/venv
WORKDIR /srv/petiole
COPY images images
# torch comes last: its needs are there by then, with hashes.
RUN pip install --require-hashes -r images/cpu.txt \
    && PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL}" pip install -r images/torch.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY cache cache
COPY gateway gateway
COPY gpu_worker gpu_worker
COPY tasks tasks
COPY petiole petiole
COPY bench bench
# The build backend is in another environment, which stays here. Nothing is compiled, neither C nor Python, when the
# image runs.
RUN python3 -m venv /srv/build \
    && /srv/build/bin/pip install --require-hashes -r images/build.txt \
    && /srv/build/bin/python -c "import hatchling.build; hatchling.build.build_editable('/srv/build')" \
    && pip install --no-deps /srv/build/*.whl \
    && python -m petiole.gpu_worker.runtime.cpu.native.build \
    && python -m compileall -q cache gateway gpu_worker tasks petiole bench

# --- cpu ------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu
ENV PYTHONUNBUFFERED=1 PATH=/srv/venv/bin:$PATH
# The CPU kernels' threads need libgomp1.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 petiole
COPY --from=cpu-build /srv/venv /srv/venv
COPY --from=cpu-build /srv/petiole /srv/petiole
WORKDIR /srv/petiole
USER 10001
# Made here so that a volume mounted on it belongs to the worker's user.
RUN mkdir -p /home/petiole/.cache/huggingface /home/petiole/kv
CMD ["celery", "-A", "tasks", "worker", "--loglevel", "INFO"]

# --- gateway --------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS gateway
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 PATH=/srv/venv/bin:$PATH
RUN useradd --create-home --uid 10001 petiole && python3 -m venv /srv/venv
WORKDIR /srv/petiole
COPY images images
RUN pip install --require-hashes -r images/gateway.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY gateway gateway
COPY tasks tasks
COPY petiole petiole
RUN python3 -m venv /srv/build \
    && /srv/build/bin/pip install --require-hashes -r images/build.txt \
    && /srv/build/bin/python -c "import hatchling.build; hatchling.build.build_editable('/srv/build')" \
    && pip install --no-deps /srv/build/*.whl \
    && rm -r /srv/build \
    && python -m compileall -q gateway tasks petiole
USER 10001
CMD ["petiole", "serve"]

# --- gpu ------------------------------------------------------------------------------------------
# This image keeps its compilers: FlashInfer compiles kernels that its wheel does not bring (nvcc), and Triton compiles
# Petiole's for the card and the model that it meets (gcc).
FROM ${CUDA_IMAGE} AS gpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 DEBIAN_FRONTEND=noninteractive PATH=/srv/venv/bin:$PATH
# With the other compiled kernels, in the volume of compose.
ENV TRITON_CACHE_DIR=/home/petiole/.cache/triton
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev ninja-build \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 petiole \
    && python3 -m venv /srv/venv
WORKDIR /srv/petiole
COPY images images
RUN pip install --require-hashes -r images/gpu.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY cache cache
COPY gateway gateway
COPY gpu_worker gpu_worker
COPY tasks tasks
COPY petiole petiole
COPY bench bench
RUN python3 -m venv /srv/build \
    && /srv/build/bin/pip install --require-hashes -r images/build.txt \
    && /srv/build/bin/python -c "import hatchling.build; hatchling.build.build_editable('/srv/build')" \
    && pip install --no-deps /srv/build/*.whl \
    && rm -r /srv/build \
    && python -m compileall -q cache gateway gpu_worker tasks petiole bench
USER 10001
# Made here so that a volume mounted on it belongs to the worker's user.
RUN mkdir -p /home/petiole/.cache/huggingface /home/petiole/kv
CMD ["celery", "-A", "tasks", "worker", "--loglevel", "INFO"]
