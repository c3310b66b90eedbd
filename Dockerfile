# syntax=docker/dockerfile:1
# Two images from one file: --target gpu (CUDA) and --target cpu. Both hold a checkout, installed where it lies:
# `tasks` and `petiole.tasks` are the same modules there.

# --- cpu ------------------------------------------------------------------------------------------
FROM python:3.12-slim AS cpu
# An index with CPU-only builds of torch makes this image gigabytes smaller.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# gcc compiles the CPU's decoder on first use; without it torch computes everything, slower.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 petiole
WORKDIR /srv/petiole
COPY pyproject.toml README.md LICENSE ./
COPY cache cache
COPY gpu_worker gpu_worker
COPY tasks tasks
COPY petiole petiole
COPY bench bench
# hadolint ignore=DL3013
RUN PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL}" pip install --editable '.[worker,cli,metrics]'
USER 10001
# Made here so that a volume mounted on it belongs to the worker's user.
RUN mkdir -p /home/petiole/.cache/huggingface
CMD ["celery", "-A", "tasks", "worker", "--loglevel", "INFO"]

# --- gpu ------------------------------------------------------------------------------------------
# The devel image carries nvcc: FlashInfer compiles kernels that its wheel does not bring.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS gpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev ninja-build \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 petiole \
    && python3 -m venv /opt/petiole
ENV PATH=/opt/petiole/bin:$PATH
WORKDIR /srv/petiole
COPY pyproject.toml README.md LICENSE ./
COPY cache cache
COPY gpu_worker gpu_worker
COPY tasks tasks
COPY petiole petiole
COPY bench bench
# hadolint ignore=DL3013
RUN pip install --editable '.[gpu,cli,metrics]'
USER 10001
# Made here so that a volume mounted on it belongs to the worker's user.
RUN mkdir -p /home/petiole/.cache/huggingface
CMD ["celery", "-A", "tasks", "worker", "--loglevel", "INFO"]
